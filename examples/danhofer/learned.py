"""Learned 2:4 masks (Danhofer 2024) of a trained network, beside the same network dense, by magnitude and permuted; no weight changes.

    python examples/danhofer/learned.py --seed 0 1 2 --out examples/results/nm                           # digits, some minutes
    python examples/danhofer/learned.py --model cifar10 --data FOLDER --seed 0 1 2 --out DIR
    python examples/danhofer/learned.py --model resnet18 --checkpoint FILE --data FOLDER --state run.pt --workers 8 --device cuda --out DIR

`learning.py` has the recipes: the source's, and for the small networks those that `choose.py` chose without a test image. Test images are read once, when all
masks are there. Permuted masks keep 2 of 4 in an order of columns of their own, `learned` ones in the order that W has, `learned_permuted` ones in that of
the permuted. The same command goes on where it was stopped, if there is a `--state`; small networks need none.
Ends with 1 where learned masks are less accurate than those by magnitude or permuted, or a weight or an evaluation is not what it was.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # beside the other examples, from whatever folder it is started

import torch
from data import DataMissing
from thesis.side_by_side import Row, exit_code, options, show
from torch import nn

import fxmask
from danhofer.command import OPTIONS, batch_of, merge, rows_of_others, settings, task_of
from danhofer.learning import RECIPES, SOURCE, Recipe, learn
from danhofer.networks import Task, accuracy, masked
from danhofer.small import SMALL
from danhofer.tables_3_4 import share_lines

MORE: list[tuple[str, dict[str, Any]]] = [
    ("--seed", dict(type=int, nargs="+", default=[0])),
    ("--epochs", dict(type=int, default=None, help="9; of CIFAR-10 3")),
    ("--lr", dict(type=float, default=None, help="of the first third; 1.0 is the source's")),
    ("--tau", dict(type=float, default=None, help="temperature of the draw; 0.1 is the source's")),
    ("--soft", dict(action="store_true", default=None, help="multiply by mixtures of patterns in training (the source's equation 3), not by drawn ones")),
    ("--init", dict(default=None, choices=["glorot", "magnitude"], help="of the logits; glorot is the source's")),
    ("--loss", dict(default=None, choices=["labels", "dense"], help="against labels as in the source, or against the dense network's predictions")),
    ("--keep", dict(action=argparse.BooleanOptionalAction, default=None, help="the best masks of all epochs on training images, or the last ones")),
    ("--state", dict(type=Path, metavar="FILE", help="written after every epoch; taken up where it is there")),
]


def untouched(before: nn.Module, after: nn.Module) -> bool:
    """Whether every parameter and buffer has the bits that it had; logits are none of the network's."""
    now = after.state_dict()
    return all(torch.equal(t, now[name]) for name, t in before.state_dict().items())


def exactly_two(model: nn.Module) -> bool:
    """Whether every group of every mask keeps 2 of 4, in the order that it was made in."""
    kept = []
    for name, mask in fxmask.masks(model).items():
        rows, order = mask.flatten(1), model.get_submodule(name.removesuffix(".weight")).nm_permutation
        kept.append((rows if order is None else rows[:, order]).reshape(-1, 4).sum(1))
    return all(bool((k == 2).all()) for k in kept)


@torch.no_grad()
def repeats(model: nn.Module, task: Task) -> bool:
    """Whether two evaluations of training images have the same bits."""
    x = next(iter(task.train(0)))[0].to(task.example.device)
    return torch.equal(model(x), model(x))


def forms(task: Task, layers: str, seed: int, recipe: Recipe, state: Path | None) -> dict[str, nn.Module]:
    """The network in each form. Masks in permuted order are learned of the small networks alone."""
    learned = {"learned": learn(task, layers, seed, recipe, state)}  # first: a state that does not fit is told before permutations are searched
    if task.name in SMALL:
        learned["learned_permuted"] = learn(task, layers, seed, {**recipe, "permute": True})
    return {"dense": task.model, **{mode: masked(task, layers, mode=mode) for mode in ("magnitude", "permuted")}, **learned}


def run(args: argparse.Namespace, task: Task, seed: int, recipe: Recipe) -> tuple[list[Row], bool, list[str]]:
    """A row for each form; whether all is as it should be; what is said of it."""
    models = forms(task, args.layers, seed, recipe, args.state)
    learned = {form: m for form, m in models.items() if form.startswith("learned")}
    sound = {
        "weights and buffers bit-identical": all(untouched(task.model, m) for m in learned.values()),
        "two evaluations the same": all(repeats(m, task) for m in learned.values()),
        "2 of every 4 kept": all(exactly_two(m) for m in learned.values()),
    }
    found = {form: accuracy(m, task.test()) for form, m in models.items()}
    held = SMALL[task.name].held if task.name in SMALL else 0
    of = settings(args, task, seed) | {"batch": batch_of(args), "held_out": held} | {k: int(v) if isinstance(v, bool) else v for k, v in recipe.items()}
    rows = [{**of, "form": form, **{top: f"{value:.2f}" for top, value in tops.items()}} for form, tops in found.items()]
    ahead = {form: found[form]["top1"] >= max(found["magnitude"]["top1"], found["permuted"]["top1"]) for form in learned}
    lines = ["; ".join(f"{what}: {holds}" for what, holds in sound.items())]
    lines += [f"{form} top-1 {'at least as high as' if best else 'below one of'} magnitude's and permuted's" for form, best in ahead.items()]
    return rows, all(sound.values()) and all(ahead.values()), [f"seed {seed}: {line}" for line in lines]


def main(argv: Sequence[str] | None = None) -> int:
    args = options(__doc__, argv, *OPTIONS, *MORE)
    return exit_code("danhofer/learned.py", lambda: run_all(args))


def run_all(args: argparse.Namespace) -> int:
    """Learn, evaluate, show, write; 1 where something is not as it should be."""
    recipe = {key: v if (given := getattr(args, key)) is None else given for key, v in RECIPES.get(args.model, SOURCE).items()}
    rows, lines, good = [], [], True
    if args.state is not None and (len(args.seed) > 1 or args.model in SMALL):
        raise DataMissing(f"--state: expected one seed of a network of torchvision, got {args.model} and seeds {args.seed}.\n  fix: leave it out.")
    rows_of_others(args, "danhofer_learned")
    for seed in dict.fromkeys(args.seed):
        task = task_of(args, seed)
        if recipe["epochs"] > task.epochs / 10:
            print(f"{recipe['epochs']} epochs are more than the source's 10 % of the {task.epochs} that the network was trained for", file=sys.stderr)
        more, well, said = run(args, task, seed, recipe)
        rows, lines, good = [*rows, *more], [*lines, *said], good and well
    show(f"Learned 2:4 masks: {args.model}, accuracy in %", rows, [*share_lines(task, args.layers), *lines])
    merge(args, "danhofer_learned", rows, [key for key in rows[0] if key not in ("form", "top1", "top5")])
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
