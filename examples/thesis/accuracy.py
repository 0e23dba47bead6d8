"""Which recipe keeps the accuracy at which block and ratio: the thesis' CIFAR model, searched on held-out images, judged once on the test images.

    python examples/thesis/accuracy.py search --data folder --root DIR      # or --data cifar10; one seed, few epochs, 5,000 training images held out
    python examples/thesis/accuracy.py final --data folder --root DIR       # two seeds, 20 epochs, of what the search has chosen
    python examples/thesis/accuracy.py isoflop --data folder --root DIR     # dense widths and wider masked models, 8 epochs; isoflop.py draws them
    python examples/thesis/accuracy.py table                                # the csv anew from the runs that have ended

Two single-threaded runs at once by examples/thesis/train.py; stopped and started again, it goes on where it was, and the csv is written anew after every run.
Every configuration that was tried is in the table. No MixUp and no CutMix, which short runs lose by. A ratio reaches its end at half of the steps.
"""

from __future__ import annotations

import argparse
import csv
import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from thesis.recipes import COMMON, FINAL, ISOFLOP, SEARCH, arguments_of

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parent / "results" / "cifar10_accuracy.csv"
RUNS = Path("runs/accuracy")
COLUMNS = (
    "phase", "run", "block", "target_ratio", "ratio_achieved", "epochs", "seed", "held_top1", "test_top1", "test_top5", "train_acc", "train_loss", "flips",
    "train_tflop", "loaded_weights_g", "train_seconds", "threads", "torch", "data", "command",
)  # fmt: skip
PHASES = {"search": (SEARCH, 6, (0,)), "final": (FINAL, 20, (0, 1)), "isoflop": (ISOFLOP, 8, (0, 1))}
DATA_NAMES = {"folder": "CIFAR-10 as JPEG, quality 75", "cifar10": "CIFAR-10", "digits": "digits"}


def jobs(phase: str, epochs: int, seeds: tuple[int, ...], only: list[str] | None = None, runs: Path = RUNS) -> Iterator[tuple[str, int, list[str]]]:
    """(name of the run, seed, arguments of train.py but for data and folder), seeds paired: all runs of a seed see the same batches."""
    for seed in seeds:
        for name in PHASES[phase][0]:
            if only is None or name in only:
                yield name, seed, ["--epochs", str(epochs), "--seed", str(seed), *COMMON, *arguments_of(name, epochs, seed, runs)]


def folder_of(runs: Path, phase: str, name: str, seed: int) -> Path:
    return runs / phase / f"{name}-seed{seed}"


def read(path: Path) -> list[dict[str, str]]:
    """The rows of a csv, none where there is no file."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def read_log(out: Path) -> list[dict[str, str]]:
    """The rows of a run so far."""
    return read(out / "log.csv")


def row_of(phase: str, name: str, seed: int, out: Path) -> dict[str, Any] | None:
    """A run's row, None while it has not ended."""
    log = read_log(out)
    facts = json.loads((out / "run.json").read_text()) if (out / "run.json").exists() else {}
    if not facts or len(log) < facts["epochs"] or (phase != "search" and not (out / "test.json").exists()):
        return None
    last, test = log[-1], json.loads((out / "test.json").read_text()) if phase != "search" else {}
    args = ["--epochs", str(facts["epochs"]), "--seed", str(seed), *COMMON, *arguments_of(name, facts["epochs"], seed)]
    return {
        "phase": phase,
        "run": name,
        "block": "" if facts["dense"] else block_of(args),
        "target_ratio": "0" if facts["dense"] else ratio_of(args),
        "ratio_achieved": f"{float(last['ratio_achieved']):.4f}",
        "epochs": facts["epochs"],
        "seed": seed,
        "held_top1": f"{float(last['top1']):.2f}",
        "test_top1": f"{test['top1']:.2f}" if test else "",
        "test_top5": f"{test['top5']:.2f}" if test else "",
        "train_acc": f"{float(last['train_acc']):.2f}",
        "train_loss": f"{float(last['train_loss']):.4f}",
        "flips": sum(int(r["flips"]) for r in log),
        "train_tflop": f"{sum(float(r['flop']) for r in log) / 1e12:.2f}",
        "loaded_weights_g": f"{sum(float(r['loaded']) for r in log) / 1e9:.3f}",
        "train_seconds": f"{sum(float(r['seconds']) for r in log):.0f}",
        "threads": facts["threads"],
        "torch": facts["torch"],
        "data": DATA_NAMES[facts["data"]],
        "command": shlex.join(["python", "examples/thesis/train.py", "--data", facts["data"], "--root", "DIR", "--holdout", str(facts["holdout"]), *args]),
    }


def block_of(args: list[str]) -> str:
    """ "32x32" of the configuration string."""
    text = args[args.index("--config") + 1]
    return text.split("(")[1].split(")")[0].replace(", ", "x")


def ratio_of(args: list[str]) -> str:
    """The ratio, or of layers that differ all of them."""
    return "/".join(dict.fromkeys(part.split(" ")[0] for part in args[args.index("--config") + 1].split("masked ")[1:]))


def key_of(row: dict[str, Any]) -> tuple[str, ...]:
    """What makes a row one run's."""
    return tuple(str(row[column]) for column in ("phase", "run", "seed", "epochs", "data"))


def place_of(key: tuple[str, ...]) -> tuple[Any, ...]:
    """The table's order: phases and runs as the recipes name them, recipes of another day last, then the seeds."""
    phase, name, seed, *rest = key
    phases, names = list(PHASES), list(PHASES[phase][0]) if phase in PHASES else []
    return phases.index(phase) if phase in phases else len(phases), names.index(name) if name in names else len(names), name, int(seed), rest


def write(runs: Path, path: Path) -> int:
    """The table of all runs that have ended; returns how many. Rows whose run lies in another folder, or on another machine, stay in it."""
    rows = {key_of(row): row for row in read(path)}
    for phase, (recipes, _, _) in PHASES.items():
        for name in recipes:
            for out in runs.glob(f"{phase}/{name}-seed*"):
                row = row_of(phase, name, int(out.name.rpartition("seed")[2]), out)
                rows.update({key_of(row): row} if row else {})
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        out_file = csv.DictWriter(file, COLUMNS)
        out_file.writeheader()
        out_file.writerows(rows[key] for key in sorted(rows, key=place_of))
    return len(rows)


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    p.add_argument("phase", choices=(*PHASES, "table"))
    p.add_argument("--data", choices=tuple(DATA_NAMES), default="cifar10")
    p.add_argument("--root", type=Path)
    p.add_argument("--epochs", type=int, help="default: 6 for search, 20 for final, 8 for isoflop")
    p.add_argument("--seeds", type=int, nargs="+")
    p.add_argument("--holdout", type=int, default=5000)
    p.add_argument("--at-once", type=int, default=2)
    p.add_argument("--only", nargs="+")
    p.add_argument("--runs", type=Path, default=RUNS, help="where checkpoints and logs lie")
    p.add_argument("--csv", type=Path, default=RESULTS)
    args = p.parse_args(argv)
    failed = 0
    if args.phase != "table":
        recipes, epochs, seeds = PHASES[args.phase]
        unknown = sorted(set(args.only or ()) - set(recipes))
        if unknown:
            p.error(f"--only: expected names among {', '.join(recipes)}, got {', '.join(unknown)}")

        def one(job: tuple[str, int, list[str]]) -> int:
            name, seed, arguments = job
            out = folder_of(args.runs, args.phase, name, seed)
            if row_of(args.phase, name, seed, out):
                return 0
            root = ["--root", str(args.root)] if args.root else []
            command = [sys.executable, str(HERE / "train.py"), "--data", args.data, *root, "--threads", "1", "--holdout", str(args.holdout), "--out", str(out)]
            out.mkdir(parents=True, exist_ok=True)
            if args.phase != "search":  # the search must not look at the test images
                command.append("--read-test")
            with (out / "output.txt").open("a") as file:
                code = subprocess.run([*command, *arguments], stdout=file, stderr=subprocess.STDOUT, check=False).returncode
            print(f"{out}: {'ended' if code == 0 else f'exit {code}, see output.txt'}", flush=True)
            write(args.runs, args.csv)
            return code

        todo = list(jobs(args.phase, args.epochs or epochs, tuple(args.seeds or seeds), args.only, args.runs))
        taught = [job for job in todo if "--teacher" in job[2]]  # after their teachers
        with ThreadPoolExecutor(args.at_once) as pool:
            for part in ([job for job in todo if job not in taught], taught):
                failed += sum(map(bool, pool.map(one, part)))
    print(f"{write(args.runs, args.csv)} runs in {args.csv}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
