"""What `fxmask.advise` expects of the models of train_step.py, from its layers' times and from its trial, beside what train_step.py measured.

    OF="--model mlp --block 64 --ratio 0.8 --threads 1 --csv CSV"
    python examples/benchmarks/train_step.py $OF --refresh 10 --contenders dense_eager fxmask_eager      # first, into a new csv; --batch 16 for resmlp-s12
    python examples/benchmarks/advice.py $OF

One directly after the other: an hour later a shared host is another one. Times as fast as the dense step in eager mode, which is what `advise` times. Exit
status 1: what is expected is more than 15 % off, or advised is what loses.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # beside the other examples, from whatever folder it is started

import torch
from checked_arguments import check_numbers
from tabulate import tabulate
from thesis.csv_files import numbers, read
from thesis.side_by_side import exit_code

import fxmask
from benchmarks import checked, step_models
from fxmask.advice.advice import Advice
from fxmask.bench.provenance import provenance

NEAR = 0.15
BATCH = {"resmlp-s12": 16}  # where train_step.py's default is not the batch that was measured
ASKED = {"dtype": "fp32", "optimizer": "adamw", "masked_step": "on", "refresh": "10"}  # as train_step.py's defaults are, and `advise` answers for
CSV = Path(__file__).resolve().parents[1] / "results" / "epyc" / "train_step.csv"


def measured(rows: list[dict[str, str]], model: str, batch: int, block: int, ratio: float, threads: int) -> float | None:
    """Dense eager over fxmask eager as `ASKED`; None where the csv has no such row of this machine and this setting of its allocator. The latest counts."""
    found: dict[str, float] = {}
    here = (model, str(batch), str(threads), provenance(torch.device("cpu"))["device"])
    for row in rows:
        if (row["model"], row["batch"], row["threads"], row["device"]) == here and row["contender"] in ("dense_eager", "fxmask_eager"):
            ours = row["contender"] == "fxmask_eager"
            same = all(row[k] == v for k, v in ASKED.items() if ours or k in ("dtype", "optimizer"))
            if float(row["ratio"]) == ratio and row["block"] == str(block) and same:
                found[row["contender"]] = float(row["ms_p50"])
    return found["dense_eager"] / found["fxmask_eager"] if len(found) == 2 else None


def asked(name: str, batch: int, block: int, ratio: float, seconds: float) -> Advice:
    """`advise` for one of the models, on noise."""
    spec = step_models.Spec(name, torch.device("cpu"), batch)
    model, (inputs, _) = step_models.build(spec), step_models.data(spec)
    return fxmask.advise(model, inputs, ratios=[ratio], blocks=[block], refresh=10, seconds=seconds)


def row_of(name: str, block: int, ratio: float, threads: int, advice: Advice, real: float | None) -> dict[str, Any]:
    """A model's row. Where nothing is advised the prediction is 1, of the dense step."""
    off = None if real is None or not advice.plan else 100 * (advice.gain / real - 1)
    wrong = "" if real is None else "loses" if advice.plan and real < 1 else "off" if off is not None and abs(off) > 100 * NEAR else "ok"
    return {
        "model": name, "block": block, "ratio": ratio, "threads": threads, "linears": len(advice.plan.blocks) if advice.plan else 0, "expected": advice.gain,
        "measured": real, "by layers": advice.plan.gain if advice.plan else None, "tried": advice.tried, "off, %": off, "verdict": wrong,
    }  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    p.add_argument("--model", nargs="+", choices=tuple(step_models.MODELS), default=["mlp"])
    p.add_argument("--block", type=int, default=64)
    p.add_argument("--ratio", type=float, nargs="+", default=[0.8])
    p.add_argument("--threads", type=int, default=torch.get_num_threads())
    p.add_argument("--seconds", type=float, default=60.0, help="of advise")
    p.add_argument("--csv", type=Path, default=CSV, help="of train_step.py, where it is there")
    args = p.parse_args(argv)
    check_numbers(p, args)
    return exit_code("advice.py", lambda: run(args))


def run(args: argparse.Namespace) -> int:
    """Ask, compare, show; 1 where what is expected is off, or loses."""
    checked.masks(args.block, args.ratio)
    torch.set_num_threads(args.threads)
    known = read(args.csv, ("model", "batch", "threads", "device", "contender", "ratio", "block", *ASKED, "ms_p50"))
    numbers(args.csv, numbers(args.csv, known, "ratio"), "ms_p50", above=0)
    rows = []
    for name in args.model:
        for ratio in args.ratio:
            batch = BATCH.get(name, step_models.MODELS[name].batches[1])
            advice = asked(name, batch, args.block, ratio, args.seconds)
            rows.append(row_of(name, args.block, ratio, args.threads, advice, measured(known, name, batch, args.block, ratio, args.threads)))
            print(advice.summary["advice"], flush=True)
    print(tabulate(rows, headers="keys", floatfmt=".3g", tablefmt="github"))
    return 1 if any(row["verdict"] in ("off", "loses") for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
