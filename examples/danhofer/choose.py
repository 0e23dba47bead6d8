"""Which recipe learns the best 2:4 masks of a small network, by images that are held out of training; no test image is read.

    python examples/danhofer/choose.py --out examples/results/nm                             # digits
    python examples/danhofer/choose.py --model cifar10 --data FOLDER --seed 10 --out DIR

The networks are others than those of the tables: seeds 10, 11, 12 by default. A row is one network under one recipe; the recipe with the highest mean top-1 on
held-out images is the chosen one (the first of equals), which `learning.RECIPES` names and `learned.py` takes. Its masks are in the order that W has.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # beside the other examples, from whatever folder it is started

from data import DataMissing
from thesis.side_by_side import Row, exit_code, options, show

from danhofer.command import OPTIONS, batch_of, merge, rows_of_others, settings, task_of
from danhofer.learning import RECIPES, SOURCE, Recipe, learn
from danhofer.networks import accuracy, masked
from danhofer.small import SMALL

OURS: Recipe = SOURCE | {"init": "magnitude", "keep": True}
TRIED: list[Recipe] = [
    SOURCE,
    OURS | {"lr": 0.3},
    *(OURS | {"lr": lr, "tau": tau} for lr, tau in product((0.1, 0.3, 1.0), (1.0, 3.0))),
    *(OURS | {"lr": 0.3, "tau": tau, "loss": "dense"} for tau in (1.0, 3.0)),
]


def tried(args: argparse.Namespace, seed: int) -> list[Row]:
    """A row for each recipe, and those of what is not learned before them."""
    task, layers, epochs = task_of(args, seed), args.layers, RECIPES[args.model]["epochs"] if args.epochs is None else args.epochs
    assert task.held is not None  # a small network
    of = settings(args, task, seed) | {"batch": batch_of(args), "held_out": SMALL[task.name].held}
    plain = {"dense": task.model, **{mode: masked(task, layers, mode=mode) for mode in ("magnitude", "permuted")}}
    rows = [{**of, "form": form, "top1": accuracy(model, task.held())["top1"]} for form, model in plain.items()]
    for recipe in [r | {"epochs": epochs} for r in TRIED]:
        rows.append({**of, "form": "learned", "top1": accuracy(learn(task, layers, seed, recipe), task.held())["top1"], **recipe})
        print(f"seed {seed}, {recipe}: {rows[-1]['top1']:.2f} of held-out images", flush=True)
    return rows


def chosen(rows: list[Row]) -> dict[str, Any]:
    """The recipe with the highest mean over the seeds, the first of equals."""
    found: dict[tuple[Any, ...], list[float]] = {}
    for r in rows:
        if r["form"] == "learned":
            found.setdefault(tuple(r[key] for key in SOURCE), []).append(r["top1"])
    return dict(zip(SOURCE, max(found, key=lambda recipe: fmean(found[recipe])), strict=True))


def main(argv: Sequence[str] | None = None) -> int:
    args = options(__doc__, argv, *OPTIONS, ("--seed", dict(type=int, nargs="+", default=[10, 11, 12])), ("--epochs", dict(type=int, default=None)))
    return exit_code("danhofer/choose.py", lambda: run(args))


def run(args: argparse.Namespace) -> None:
    """Try, show, write."""
    if args.model not in SMALL:
        raise DataMissing(f"--model {args.model}: expected {' or '.join(SMALL)}, which hold images out.\n  fix: learned.py takes the source's recipe.")
    rows_of_others(args, "danhofer_choice")
    rows = [row for seed in dict.fromkeys(args.seed) for row in tried(args, seed)]
    best = chosen(rows)
    for r in rows:
        is_best = r["form"] == "learned" and all(r[key] == v for key, v in best.items())
        r.update(chosen=int(is_best), top1=f"{r['top1']:.2f}", **{key: int(r[key]) for key in ("soft", "keep") if key in r})
    show(f"Recipes: {args.model}, top-1 in % of held-out images", rows, [f"chosen: {best}"])
    merge(args, "danhofer_choice", rows, ("model", "layers", "dense_epochs", "batch"))  # of all seeds together, as one of their recipes is chosen


if __name__ == "__main__":
    sys.exit(main())
