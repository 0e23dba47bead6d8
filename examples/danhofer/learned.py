"""Learned 2:4 masks (Danhofer 2024) of a trained network, beside the same network dense, by magnitude and permuted; no weight changes.

    python examples/danhofer/learned.py --out examples/results/nm                                        # digits, two minutes
    python examples/danhofer/learned.py --model resnet18 --checkpoint FILE --data FOLDER --state run.pt --workers 8 --device cuda --out DIR

The recipe is the source's (`learning.py`). The same command goes on where it was stopped, if there is a `--state`; digits need none.
Ends with 1 where learned masks are less accurate than one of the others, or a weight or an evaluation is not what it was.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # beside the other examples, from whatever folder it is started

import torch
from data import DataMissing
from plots import read_csv
from thesis.side_by_side import options, show
from torch import nn

import fxmask
from danhofer.command import OPTIONS, merge, task_of
from danhofer.learning import EPOCHS, FOR_DIGITS, RECIPE, learn
from danhofer.networks import accuracy, fail, masked
from danhofer.tables_3_4 import share_lines

MORE = [
    ("--epochs", dict(type=int, default=EPOCHS)),
    ("--lr", dict(type=float, default=None, help="of the first 3 epochs; 1.0 is the source's, of digits 0.3 is the default")),
    ("--tau", dict(type=float, default=0.1, help="temperature of the draw")),
    ("--soft", dict(action="store_true", help="multiply by mixtures of patterns in training (the source's equation 3), not by drawn ones")),
    ("--init", dict(default=None, choices=["glorot", "magnitude"], help="of the logits; glorot is the source's, of digits magnitude is the default")),
    ("--state", dict(type=Path, metavar="FILE", help="written after every epoch; taken up where it is there")),
]


def untouched(before: nn.Module, after: nn.Module) -> bool:
    """Whether every parameter and buffer has the bits that it had; logits are none of the network's."""
    now = after.state_dict()
    return all(torch.equal(t, now[name]) for name, t in before.state_dict().items())


def main(argv: Sequence[str] | None = None) -> int:
    args = options(__doc__, argv, *OPTIONS, *MORE)
    recipe = FOR_DIGITS if args.model == "digits" else RECIPE
    lr, init = recipe["lr"] if args.lr is None else args.lr, args.init or recipe["init"]
    try:
        task = task_of(args)
        if args.epochs > task.epochs / 10:
            print(f"{args.epochs} epochs are more than the source's 10 % of the {task.epochs} that the network was trained for", file=sys.stderr)
        model = learn(task, args.layers, args.epochs, args.seed, lr, args.state, tau=args.tau, soft=args.soft, init=init)
        found = {"dense": accuracy(task.model, task.test())}
        for mode in ("magnitude", "permuted"):
            found[mode] = accuracy(masked(task, args.layers, mode=mode), task.test())
        found["learned"], again = accuracy(model, task.test()), accuracy(model, task.test())
    except DataMissing as error:
        return fail(error)
    kept, same = untouched(task.model, model), again == found["learned"]
    two = all(bool((m.reshape(-1, 4).sum(1) == 2).all()) for m in fxmask.masks(model).values())
    run = {"model": task.name, "layers": args.layers, "seed": args.seed, "epochs": args.epochs, "lr": lr, "tau": args.tau, "soft": int(args.soft), "init": init}
    rows = [{**run, "form": form, **{top: f"{value:.2f}" for top, value in tops.items()}} for form, tops in found.items()]
    notes = [f"weights and buffers bit-identical: {kept}; two evaluations the same: {same}; 2 of every 4 kept: {two}"]
    show(f"Learned 2:4 masks: {task.name}, accuracy in %", rows, [*share_lines(task, args.layers), *notes])
    if args.limit is None:
        merge(args.out, "danhofer_learned", rows, lambda r: all(r[key] == str(value) for key, value in run.items()), read_csv)
    better = found["learned"]["top1"] >= max(found["magnitude"]["top1"], found["permuted"]["top1"])
    print(f"learned top-1 {'at least as high as' if better else 'below one of'} magnitude's and permuted's")
    return 0 if kept and same and two and better else 1


if __name__ == "__main__":
    sys.exit(main())
