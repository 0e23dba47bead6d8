"""What block masks leave of a ResMLP's hidden layers: groups of hidden units with blocks on both sides, on one side alone, or on none.

    python examples/thesis/hidden_groups.py --runs runs/accuracy      # a row a masked hidden layer of every run that has ended

A group is what one block holds of the hidden units (16 of 256 in 16x16). fc1 writes it by a row of blocks, fc2 reads it by a column. With no block on either
side its units are gone, as in a narrower model; with blocks on one side alone these are kept for nothing: `wasted`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tabulate import tabulate
from torch import Tensor

from fxmask.errors import ConfigError
from thesis import checkpoint, csv_files, lock, run_folder
from thesis.side_by_side import exit_code

RESULTS = Path(__file__).resolve().parents[1] / "results" / "cifar10_hidden_groups.csv"
COLUMNS = ("phase", "run", "layer", "groups", "alive", "gone", "half", "kept", "wasted")


def groups_of(fc1: Tensor, fc2: Tensor) -> dict[str, int]:
    """Counts of one hidden layer. fc1: bool (groups, inputs), fc2: bool (outputs, groups), both True where a block is kept.

    alive, gone, half: groups with blocks on both sides, on none, on one. kept: blocks of both layers; wasted: of them, in groups that are half.
    """
    writes, reads = fc1.sum(1), fc2.sum(0)
    half = (writes > 0) != (reads > 0)
    return {
        "groups": len(writes),
        "alive": int(((writes > 0) & (reads > 0)).sum()),
        "gone": int(((writes == 0) & (reads == 0)).sum()),
        "half": int(half.sum()),
        "kept": int(writes.sum() + reads.sum()),
        "wasted": int((writes + reads)[half].sum()),
    }


def rows_of(folder: Path) -> Iterator[dict[str, Any]]:
    """The rows of one run, none where it has no masked hidden layer, or has not ended."""
    state = checkpoint.load(folder, "cpu")
    if state is None or len(run_folder.log_of(folder)) < state["settings"]["epochs"]:
        return
    masks = {} if not state["masks"] else {name: entry["mask"] for name, entry in state["masks"]["masks"].items()}
    for name, fc1 in masks.items():
        fc2 = masks.get(name.replace("fc1.", "fc2."))
        if ".fc1." in f".{name}" and fc1 is not None and fc2 is not None and fc2.shape[1] == fc1.shape[0]:
            yield {"phase": folder.parent.name, "run": folder.name, "layer": name.removesuffix(".fc1.weight"), **groups_of(fc1, fc2)}


def shares(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A line a run: shares over its layers, in percent."""
    lines = []
    for run in dict.fromkeys((r["phase"], r["run"]) for r in rows):
        mine = [r for r in rows if (r["phase"], r["run"]) == run]
        groups, kept = (sum(r[k] for r in mine) for k in ("groups", "kept"))
        lines.append({
            "phase": run[0], "run": run[1], "groups": groups, **{f"{k}, %": 100 * sum(r[k] for r in mine) / groups for k in ("alive", "half", "gone")},
            "wasted blocks, %": 100 * sum(r["wasted"] for r in mine) / kept,
        })  # fmt: skip
    return lines


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    p.add_argument("--runs", type=Path, default=Path("runs/accuracy"), help="where checkpoints lie, as accuracy.py leaves them")
    p.add_argument("--csv", type=Path, default=RESULTS)
    args = p.parse_args(argv)
    return exit_code("hidden_groups.py", lambda: run(args))


def run(args: argparse.Namespace) -> None:
    """Count, write and show."""
    csv_files.read_own(args.csv, COLUMNS)  # before every checkpoint is read for it
    rows = [row for folder in sorted(args.runs.glob("*/*-seed*")) for row in rows_of(folder)]
    if not rows:
        raise ConfigError(f"expected runs with checkpoints of cached masks in {args.runs}/PHASE/RUN-seedN, got none.\n  fix: --runs.")
    there = {(r["phase"], r["run"]) for r in rows}
    with lock.alone(args.csv):
        others = [r for r in csv_files.read_own(args.csv, COLUMNS) if (r["phase"], r["run"]) not in there]  # of runs in another folder, or on another machine
        csv_files.write(args.csv, COLUMNS, sorted(others + rows, key=lambda r: (r["phase"], r["run"], r["layer"])), "\n")
    print(tabulate(shares(rows), headers="keys", floatfmt=".1f"))
    print(args.csv)


if __name__ == "__main__":
    sys.exit(main())
