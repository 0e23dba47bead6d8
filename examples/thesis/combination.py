"""Weight masks and activation pruning together, on the thesis' CIFAR model: accuracy, FLOP and bytes of dense, each alone, and both.

    python examples/thesis/combination.py --csv examples/results/cifar10_accuracy.csv --out examples/results/thesis

Accuracy is that of the runs `final` of accuracy.py of one data set, length and holdout (empty until they have ended); FLOP and bytes are counted by
`fxmask.analyze` on the model of the run, at its final ratio. Bytes held: what autograd keeps of activations from the forward to the backward of one step.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # beside the other examples, from whatever folder it is started

import torch
from tabulate import tabulate

import fxmask
from fxmask.errors import ConfigError
from thesis import csv_files, train
from thesis.accuracy_table import DATA_NAMES, RESULTS, of_one_setting
from thesis.masked_model import build
from thesis.recipes import COMMON, arguments_of
from thesis.side_by_side import exit_code, options

RUNS = ("dense-adamw-lr0.01", "dense-activations50-x4", "b16-tokens-whole-taylor", "b16-activations50-x4")


def counted(name: str, epochs: int = 20, steps: int = 352) -> dict[str, Any]:
    """FLOP and bytes of one training step of a run, at its end."""
    args = train.arguments(["--data", "cifar10", "--epochs", str(epochs), *COMMON, *arguments_of(name, epochs)])
    model = build(args, "cifar", 3, 10, steps)
    if not args.dense:
        fxmask.step(model, epochs * steps)
    report = fxmask.analyze(model, torch.empty(args.batch, 3, 32, 32, device="meta"))
    flop, held = report.summary["flop"], report.tables["footprint"][-1]["saved_activations"]
    return {"run": name, **{f"GFLOP {k}": flop[k] / 1e9 for k in ("fwd", "bwd_dx", "bwd_dw", "total")}, "MiB held": held / 2**20}


def accuracies(path: Path, data: str | None = None, epochs: str | None = None, holdout: str | None = None) -> dict[str, list[float]]:
    """Top-1 on the test images of the final runs, by name, of the seeds that all of them have; see `of_one_setting`.

    Raises: ConfigError where that leaves runs that cannot be compared.
    """
    found = dict[str, list[tuple[str, float]]]()
    rows = [r for r in csv_files.read(path, ("phase", "run", "test_top1")) if r["phase"] == "final" and r["test_top1"] and r["run"] in RUNS]
    for row in of_one_setting(path, csv_files.numbers(path, rows, "test_top1"), data, epochs, holdout):
        found.setdefault(row["run"], []).append((row.get("seed", ""), float(row["test_top1"])))
    seeds = set.intersection(*({seed for seed, _ in runs} for runs in found.values())) if found else set()
    if found and not seeds:
        raise ConfigError(f"expected runs with a seed in common in {path}, got none.\n  fix: accuracy.py final --seeds, with one seed for all.")
    return {name: [top1 for seed, top1 in runs if seed in seeds] for name, runs in found.items()}


def table(known: dict[str, list[float]]) -> list[dict[str, Any]]:
    """A row for each run, and what it differs from dense by. `known`: see `accuracies`."""
    rows = [counted(name) for name in RUNS]
    for row in rows:
        tops, dense = known.get(row["run"], []), known.get(RUNS[0], [])
        row["top-1, %"] = statistics.mean(tops) if tops else None
        row["below dense"] = statistics.mean(dense) - statistics.mean(tops) if tops and dense else None
        row["seeds"] = len(tops)
        row["of dense's FLOP, %"] = 100 * row["GFLOP total"] / rows[0]["GFLOP total"]
        row["of dense's MiB, %"] = 100 * row["MiB held"] / rows[0]["MiB held"]
    return rows


def main(argv: list[str] | None = None) -> int:
    args = options(
        __doc__, argv,
        ("--csv", dict(type=Path, default=RESULTS, help="of accuracy.py")),
        ("--data", dict(choices=tuple(DATA_NAMES), help="runs of this data set alone")),
        ("--epochs", dict(help="runs of this length alone")),
        ("--holdout", dict(help="runs with so many images held out alone")),
    )  # fmt: skip
    return exit_code("combination.py", lambda: run(args))


def run(args: argparse.Namespace) -> None:
    """Count, show, write."""
    rows = table(accuracies(args.csv, args.data, args.epochs, args.holdout))
    print(tabulate(rows, headers="keys", floatfmt=".4g", tablefmt="github"))
    if args.out:
        plain = ({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()} for row in rows)
        csv_files.write(args.out / "combination.csv", list(rows[0]), plain, "\n")


if __name__ == "__main__":
    sys.exit(main())
