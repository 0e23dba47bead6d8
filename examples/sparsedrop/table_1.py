"""SparseDrop's table 1: what dropout and block dropout gain on held-out data, each at its best p, beside what the source prints.

    python examples/sparsedrop/table_1.py --size small                                   # digits and a character GPT: minutes on two cores
    python examples/sparsedrop/table_1.py --size small --tasks cifar10 --root DIR
    python examples/sparsedrop/table_1.py --tasks mnist fashion cifar10 gpt --root DIR   # the published settings: a GPU

A row of the csv is a run that has ended; started again, it goes on with the others. Every run is in the csv, the losing ones too. p is chosen by accuracy, of
the GPT by loss. The source trains in blocks of 128 by 128; `--size small` takes 32, as its networks are narrower.
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
from thesis import csv_files, lock
from thesis.side_by_side import GOES_ON, exit_code, published
from train import flushed_denormals

from sparsedrop.tasks import TASKS, Loaded, load
from sparsedrop.train import METHODS, check, train

RATES = {"full": (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7), "small": (0.1, 0.3, 0.5)}
RESULTS = Path(__file__).resolve().parents[1] / "results" / "sparsedrop" / "table_1.csv"
KEY = ("task", "size", "method", "p", "block", "seed", "device")
OF_A_ROW = tuple(k for k in KEY if k not in ("p", "seed"))  # of the table
COLUMNS = (*KEY, "val_accuracy", "val_loss", "best_step", "steps", "ended", "train_seconds", "seconds", "train_n", "held_n", "threads", "torch")


def read(path: Path) -> list[dict[str, str]]:
    """Runs that have ended; a last line that was cut off is none."""
    return csv_files.numbers(path, csv_files.read_own(path, COLUMNS, cut_off=True), "val_accuracy", "val_loss", "seconds")


def append(path: Path, row: dict[str, Any]) -> None:
    """Add one run, in the place of an older one of the same settings. The table is put in place at once, so that a killed run leaves whole rows."""
    key = [str(row[k]) for k in KEY]
    with lock.alone(path):  # another process may have added rows meanwhile, this one among them
        others = [r for r in read(path) if [r[k] for k in KEY] != key]
        csv_files.write(path, COLUMNS, [*others, row], end="\n")


def jobs(a: argparse.Namespace) -> list[dict[str, str]]:
    """The runs that were asked for."""
    rates = a.rates or RATES[a.size]
    return [
        dict(zip(KEY, (task, a.size, method, f"{p:g}", str(a.block) if method == "sparsedrop" else "", str(seed), a.device), strict=True))
        for task in a.tasks
        for seed in a.seeds
        for method in METHODS
        for p in ((0.0,) if method == "dense" else rates)
    ]


def side_by_side(rows: list[dict[str, str]]) -> list[dict[str, Any]]:
    """Of every task, size, method, block and device the best p over its runs, the mean of its seeds, and the published row."""
    known = {(r["task"], r["method"]): r for r in published("sparsedrop_table_1")}
    groups, table = dict[tuple[str, ...], list[dict[str, str]]](), []
    for r in rows:
        groups.setdefault(tuple(r[k] for k in OF_A_ROW), []).append(r)
    for one, found in groups.items():
        of = dict(zip(OF_A_ROW, one, strict=True))
        mean = {
            p: [sum(float(r[c]) for r in found if r["p"] == p) / sum(r["p"] == p for r in found) for c in ("val_accuracy", "val_loss", "seconds")]
            for p in dict.fromkeys(r["p"] for r in found)
        }
        best = min(mean, key=lambda p: mean[p][1] if of["task"] == "gpt" else -mean[p][0])
        accuracy, loss, seconds = mean[best]
        said = known.get((of["task"], of["method"]), {})
        ours = {"best p": best, "accuracy, %": accuracy, "loss": loss, "minutes": seconds / 60, "seeds": len({r["seed"] for r in found if r["p"] == best})}
        theirs = {f"published {k}": said.get(k, "") for k in ("best_p", "val_accuracy", "val_loss")}
        table.append({**of, **ours, **theirs})
    return table


@flushed_denormals()
def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--tasks", nargs="+", choices=tuple(TASKS["full"]), default=["digits", "gpt"])
    p.add_argument("--size", choices=tuple(TASKS), default="full")
    p.add_argument("--root", type=Path)
    p.add_argument("--rates", type=float, nargs="+")
    p.add_argument("--block", type=int, help="side of a block; default: 128, of --size small 32")
    p.add_argument("--seeds", type=int, nargs="+", default=[0])
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--csv", type=Path, default=RESULTS)
    a = p.parse_args(argv)
    check_numbers(p, a)
    a.block = {"full": 128, "small": 32}[a.size] if a.block is None else a.block
    return exit_code("table_1.py", lambda: run(a), GOES_ON)


def run(a: argparse.Namespace) -> None:
    """Train what the csv lacks, and show the table."""
    check(a)
    read(a.csv)  # before anything is trained for it
    loaded: dict[str, Loaded] = {}
    for job in jobs(a):
        if any(all(row[k] == job[k] for k in KEY) for row in read(a.csv)):
            continue
        task = TASKS[a.size][job["task"]]
        if task.name not in loaded:
            loaded = {task.name: load(task, a.root)}  # of one task at a time
        got = train(task, loaded[task.name], job["method"], float(job["p"]), a.block, int(job["seed"]), a.device)
        sizes = {"train_n": len(loaded[task.name].train[1]), "held_n": len(loaded[task.name].held[1])}
        row = {**job, **{k: f"{v:.5g}" if isinstance(v, float) else v for k, v in got.items()}, **sizes}
        append(a.csv, {**row, "threads": torch.get_num_threads(), "torch": torch.__version__})
        print(" ".join(f"{k}={row[k]}" for k in ("task", "method", "p", "val_accuracy", "val_loss", "steps", "seconds")), flush=True)
    print(tabulate(side_by_side([r for r in read(a.csv) if r["task"] in a.tasks and r["size"] == a.size]), headers="keys", floatfmt=".4g"))


if __name__ == "__main__":
    sys.exit(main())
