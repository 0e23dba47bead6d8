"""Accuracy at equal cost: dense ResMLPs of several widths draw a frontier, wider masked ones lie above it or below.

    python examples/thesis/accuracy.py isoflop --data folder --root DIR     # the runs: recipes.ISOFLOP, 8 epochs, two seeds
    python examples/thesis/isoflop.py time                                  # seconds of a training step of each, one thread, turn by turn in one process
    python examples/thesis/isoflop.py plot                                  # the table, and accuracy against training FLOP and against measured time

Training FLOP are those that PyTorch's counter saw over the whole run, the ramp included; a step's time is the median at the final ratio. A masked recipe is
called above the frontier where its mean accuracy exceeds the dense one, interpolated over log FLOP between the two neighbouring widths, by more than the
spread of the seeds of the three. Sparse-IFT (Thangarasa et al. 2024, arXiv:2303.11525) asks this of unstructured masks.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from checked_arguments import check_numbers
from plots import new_figure, save
from tabulate import tabulate
from train import flushed_denormals

from fxmask.errors import ConfigError
from thesis import csv_files, lock
from thesis.accuracy_table import DATA_NAMES, of_one_setting, setting_of
from thesis.accuracy_table import RESULTS as ACCURACY
from thesis.recipes import COMMON, ISOFLOP, arguments_of
from thesis.side_by_side import exit_code

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TIMES = ACCURACY.with_name("cifar10_isoflop_time.csv")
TIME_COLUMNS = ("run", "step_ms", "step_ms_low", "step_ms_high", "turns", "threads", "load", "torch")
NEEDED = ("phase", "run", "target_ratio", "train_tflop")  # of the csv of accuracy.py, besides the accuracies


def is_width(row: dict[str, str]) -> bool:
    """Whether a run is of the frontier: dense, and narrower as a whole; one with fewer hidden units alone ("dense-d64-e2") is judged by it."""
    return str(row["target_ratio"]) == "0" and "-e" not in row["run"].removeprefix("dense")


def points(rows: list[dict[str, str]], column: str = "test_top1") -> list[dict[str, Any]]:
    """A point a recipe and setting: mean accuracy over its seeds, their spread (highest less lowest), mean training TFLOP."""
    found, groups = [], dict[tuple[str, ...], list[dict[str, str]]]()
    for r in rows:
        if r["phase"] == "isoflop":
            groups.setdefault((r["run"], *setting_of(r)), []).append(r)
    for (name, data, epochs, holdout), runs in groups.items():
        accuracies, flop = [float(r[column]) for r in runs], [float(r["train_tflop"]) for r in runs]
        found.append({
            "run": name, "dense": is_width(runs[0]), "accuracy": statistics.mean(accuracies), "spread": max(accuracies) - min(accuracies),
            "tflop": statistics.mean(flop), "seeds": len(runs), "data": data, "epochs": epochs, "holdout": holdout,
        })  # fmt: skip
    return found


def frontier_at(dense: list[dict[str, Any]], cost: str, at: float) -> tuple[float, float] | None:
    """(accuracy, largest spread) of the dense frontier at a cost, straight between two widths over the logarithm of the cost; None outside of them."""
    line = sorted(dense, key=lambda p: p[cost])
    for a, b in pairwise(line):
        if a[cost] <= at <= b[cost]:
            share = (math.log(at) - math.log(a[cost])) / (math.log(b[cost]) - math.log(a[cost])) if b[cost] > a[cost] else 0.0
            return a["accuracy"] + share * (b["accuracy"] - a["accuracy"]), max(a["spread"], b["spread"])
    return None


def verdicts(found: list[dict[str, Any]], cost: str) -> list[dict[str, Any]]:
    """Each other recipe against the frontier at its own cost."""
    dense, rows = [p for p in found if p["dense"] and cost in p], []
    for p in found:
        if p["dense"] or cost not in p:
            continue
        at = frontier_at([d for d in dense if setting_of(d) == setting_of(p)], cost, p[cost])
        row = {"run": p["run"], cost: p[cost], "accuracy": p["accuracy"], "seeds": p["seeds"], "spread": p["spread"]}
        if at is None:
            rows.append({**row, "dense there": None, "difference": None, "verdict": "outside of the dense widths"})
            continue
        gap, spread = p["accuracy"] - at[0], max(p["spread"], at[1])
        verdict = "above" if gap > spread else "below" if gap < -spread else "within the spread"
        rows.append({**row, "dense there": at[0], "difference": gap, "verdict": verdict if p["seeds"] > 1 else f"{verdict} (one seed)"})
    return rows


def figure(found: list[dict[str, Any]]) -> Figure:
    """Accuracy against training FLOP, and where it was measured against the time of a step."""
    costs = [("tflop", "training TFLOP, ramp included")] + [("step_ms", "step at the final ratio, ms")] * any("step_ms" in p for p in found)
    # ten colours, then the next marker
    looks = {p["run"]: {"color": f"C{i % 10}", "marker": "sD^v"[i // 10 % 4]} for i, p in enumerate(p for p in found if not p["dense"])}
    picture = new_figure(6.0 * len(costs), 4.2)
    for axes, (cost, label) in zip(picture.subplots(1, len(costs), squeeze=False)[0], costs, strict=True):
        dense = sorted((p for p in found if p["dense"] and cost in p), key=lambda p: p[cost])
        axes.errorbar([p[cost] for p in dense], [p["accuracy"] for p in dense], [p["spread"] / 2 for p in dense], marker="o", color="black", label="dense")
        for p in (p for p in found if not p["dense"] and cost in p):
            axes.errorbar([p[cost]], [p["accuracy"]], [p["spread"] / 2], linestyle="", label=p["run"], **looks[p["run"]])
        axes.set(xscale="log", xlabel=label, ylabel="top-1 on the test images, %")
        axes.minorticks_off()
        axes.set_xticks([p[cost] for p in dense], [f"{p[cost]:.3g}" for p in dense])
        axes.legend(fontsize=6, loc="lower right")
    return picture


@flushed_denormals()
def measure(turns: int, batch: int, names: list[str]) -> list[dict[str, Any]]:
    """Times of training steps, one after another in changing order, so that a busy minute hits all alike."""
    from thesis import masked_model, train

    torch.set_num_threads(1)
    runs: dict[str, Any] = {}
    images, labels = torch.randn(batch, 3, 32, 32), torch.randint(0, 10, (batch,))
    for name in names:
        words = ["--data", "cifar10", "--epochs", "8", *COMMON, *arguments_of(name, 8)]
        runs[name] = masked_model.bare(train.arguments(words), steps_per_epoch=391)
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(turns + 1):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            began = time.perf_counter()
            runs[name](images, labels)
            times[name].append(time.perf_counter() - began)
    load = os.getloadavg()[0]
    rows = []
    for name, seconds in times.items():
        ms = sorted(1e3 * t for t in seconds[1:])
        rows.append({
            "run": name, "step_ms": round(statistics.median(ms), 2), "step_ms_low": round(ms[len(ms) // 4], 2), "step_ms_high": round(ms[3 * len(ms) // 4], 2),
            "turns": turns, "threads": 1, "load": round(load, 2), "torch": torch.__version__,
        })  # fmt: skip
    return rows


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    p.add_argument("what", choices=("time", "plot"))
    p.add_argument("--csv", type=Path, default=ACCURACY)
    p.add_argument("--times", type=Path, default=TIMES)
    p.add_argument("--out", type=Path, default=ACCURACY.with_name("cifar10_isoflop.png"))
    p.add_argument("--data", choices=tuple(DATA_NAMES), help="plot: runs of this data set alone")
    p.add_argument("--epochs", help="plot: runs of this length alone")
    p.add_argument("--holdout", help="plot: runs with so many images held out alone")
    p.add_argument("--column", choices=("test_top1", "held_top1"), default="test_top1")
    p.add_argument("--turns", type=int, default=15)
    p.add_argument("--batch", type=int, default=128)
    p.add_argument("--only", nargs="+", choices=tuple(ISOFLOP), default=list(ISOFLOP))
    args = p.parse_args(argv)
    check_numbers(p, args)
    return exit_code("isoflop.py", lambda: run(args))


def run(args: argparse.Namespace) -> None:
    """Times, or table and figure."""
    if args.what == "time":
        csv_files.read_own(args.times, TIME_COLUMNS)  # before it is measured for minutes
        rows = measure(args.turns, args.batch, args.only)
        with lock.alone(args.times):
            times = {r["run"]: r for r in [*csv_files.read_own(args.times, TIME_COLUMNS), *rows]}  # what --only leaves out keeps its row
            csv_files.write(args.times, TIME_COLUMNS, times.values(), "\n")
        print(tabulate(rows, headers="keys"))
        return
    rows = [r for r in csv_files.read(args.csv, (*NEEDED, args.column)) if r["phase"] == "isoflop"]
    csv_files.numbers(args.csv, rows, args.column)
    csv_files.numbers(args.csv, rows, "train_tflop", above=0)
    found = of_one_setting(args.csv, points(rows, args.column), args.data, args.epochs, args.holdout)
    if not found:
        raise ConfigError(f"expected rows of phase isoflop in {args.csv}, got none.\n  fix: run accuracy.py isoflop first.")
    timed = csv_files.numbers(args.times, csv_files.read(args.times, ("run", "step_ms")), "step_ms", above=0)
    times = {r["run"]: float(r["step_ms"]) for r in timed}
    for point in found:
        if point["run"] in times:
            point["step_ms"] = times[point["run"]]
    print(tabulate([{k: v for k, v in point.items() if k not in ("dense", "data", "epochs", "holdout")} for point in found], headers="keys", floatfmt=".2f"))
    for cost in ("tflop", "step_ms"):
        print(f"\nagainst the dense frontier at equal {cost}:")
        print(tabulate(verdicts(found, cost), headers="keys", floatfmt=".2f"))
    print(save(figure(found), args.out))


if __name__ == "__main__":
    sys.exit(main())
