"""A first table of what backward mode, optimiser and guard do to accuracy: the thesis' CIFAR model, 32x32 blocks at 80 %, few epochs, one seed.

    python examples/thesis/cifar10_modes.py --data folder --root DIR      # or --data cifar10

One run after another by examples/thesis/train.py; stopped and started again, it goes on where it was. After every run the csv is written anew from the runs'
own logs; rows of other lengths, seeds and data stay. Not the thesis' 200 epochs: warm-up over one epoch, a cosine over the rest, no MixUp and no CutMix (short
runs lose by them), masks from the first step. Differences below one point say nothing: one seed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from checked_arguments import check_numbers

from thesis import csv_files, lock, run_folder, train
from thesis.accuracy_table import DATA_NAMES
from thesis.recipes import COMMON as SHORT
from thesis.recipes import LR
from thesis.side_by_side import GOES_ON, exit_code

HERE = Path(__file__).resolve().parent
MASKED, STE, UNMASKED = ("--backward", "masked"), ("--backward", "ste"), ("--backward", "unmasked")
RUNS: dict[str, tuple[str, ...]] = {
    "dense-adam": ("--dense", "--opt", "adam"),
    "masked-adam-free": (*MASKED, "--opt", "adam", "--guard", "free"),
    "masked-adamw-freeze": (*MASKED, "--opt", "adamw", "--guard", "freeze"),
    "unmasked-adam-free": (*UNMASKED, "--opt", "adam", "--guard", "free"),
    "ste-adam-free": (*STE, "--opt", "adam", "--guard", "free"),
    "masked-adam-freeze": (*MASKED, "--opt", "adam", "--guard", "freeze"),
    "dense-adamw": ("--dense", "--opt", "adamw"),
    "ste-adamw-free": (*STE, "--opt", "adamw", "--guard", "free"),
    "unmasked-adamw-free": (*UNMASKED, "--opt", "adamw", "--guard", "free"),
    "masked-adamw-free": (*MASKED, "--opt", "adamw", "--guard", "free"),
    "masked-adam-decay": (*MASKED, "--opt", "adam", "--guard", "decay"),
    "masked-adam-free-spectral": (*MASKED, "--opt", "adam", "--guard", "free", "--criterion", "spectral"),
    "masked-adamw-freeze-cubic": (*MASKED, "--opt", "adamw", "--guard", "freeze", "--schedule", "cubic:3ep"),
}
COMMON = (*SHORT, *LR)
COLUMNS = (
    "run", "mode", "optimiser", "guard", "criterion", "schedule", "epochs", "seed", "top1", "top5", "train_acc", "val_loss", "target_ratio", "ratio_achieved",
    "flips", "train_tflop", "train_seconds", "threads", "torch", "data", "command",
)  # fmt: skip


def row_of(name: str, out: Path) -> dict[str, Any] | None:
    """A run's row: accuracy of its last epoch, sums over all of them; None while it has not ended."""
    facts, log = run_folder.facts_of(out), run_folder.log_of(out)
    if facts is None or len(log) < facts["epochs"]:
        return None
    last, dense = log[-1], facts["dense"]
    how = f"--data {facts['data']} --root DIR --epochs {facts['epochs']} --seed {facts['seed']}"
    return {
        "run": name,
        "mode": "dense" if dense else facts["backward"],
        "optimiser": facts["opt"],
        "guard": "" if dense else facts["guard"],
        "criterion": "" if dense else facts["criterion"],
        "schedule": "" if dense else facts["schedule"] or "constant",
        "epochs": len(log),
        "seed": facts["seed"],
        **{k: f"{float(last[k]):.2f}" for k in ("top1", "top5", "train_acc")},
        "val_loss": f"{float(last['val_loss']):.4f}",
        "target_ratio": 0 if dense else 0.8,
        "ratio_achieved": f"{float(last['ratio_achieved']):.4f}",
        **run_folder.sums_of(log),
        "threads": facts["threads"],
        "torch": facts["torch"],
        "data": DATA_NAMES[facts["data"]],
        "command": " ".join(["python examples/thesis/train.py", how, *COMMON, *RUNS[name]]),
    }


def key_of(row: dict[str, Any]) -> tuple[str, ...]:
    """What makes a row one run's."""
    return tuple(str(row[column]) for column in ("run", "epochs", "seed", "data"))


def write(runs: Path, path: Path) -> None:
    """The table of all runs in the folder that have come to their end. Rows whose run lies in another folder, or on another machine, stay in it."""
    with lock.alone(path):  # from before it is read: rows that others add meanwhile would be lost
        ended = [row for row in (row_of(name, runs / name) for name in RUNS) if row]
        rows = {key_of(row): row for row in [*csv_files.read_own(path, COLUMNS), *ended]}
        csv_files.write(path, COLUMNS, sorted(rows.values(), key=lambda row: [*RUNS, row["run"]].index(row["run"])))


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    p.add_argument("--data", choices=("cifar10", "folder"), default="cifar10")
    p.add_argument("--root", type=Path, required=True)
    p.add_argument("--epochs", type=int, default=5)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--threads", type=int, default=1)
    p.add_argument("--runs", type=Path, default=Path("runs/cifar10_modes"), help="where checkpoints and logs lie")
    p.add_argument("--csv", type=Path, default=HERE.parent / "results" / "cifar10_modes.csv")
    p.add_argument("--only", nargs="+", choices=tuple(RUNS), default=list(RUNS))
    args = p.parse_args(argv)
    check_numbers(p, args)
    return exit_code("cifar10_modes.py", lambda: run(args), GOES_ON)


def run(args: argparse.Namespace) -> int:
    """One run after another; 1 where one fails."""
    csv_files.read_own(args.csv, COLUMNS)  # before anything is trained for it
    for name in args.only:
        out = args.runs / name
        words = ["--data", args.data, "--root", str(args.root), "--epochs", str(args.epochs), *COMMON, "--seed", str(args.seed), *RUNS[name]]
        facts = run_folder.facts_of(out)
        if facts is not None:
            run_folder.same_settings(vars(train.arguments(words)), facts, out, "this command says", "another --runs folder")
        command = [sys.executable, str(HERE / "train.py"), *words, "--threads", str(args.threads), "--out", str(out)]
        print(f"== {name}", flush=True)
        if subprocess.run(command, check=False).returncode:
            return 1
        write(args.runs, args.csv)
    print(args.csv)
    return 0


if __name__ == "__main__":
    sys.exit(main())
