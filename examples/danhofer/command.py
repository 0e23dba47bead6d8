"""What the scripts share: the options that name a network and its images, and the csv, which keeps the rows of other networks."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from data import DataMissing
from thesis.side_by_side import Row, save

from danhofer.networks import DIGITS_EPOCHS, LAYERS, NETWORKS, Task, digits, pretrained

OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("--model", dict(default="digits", choices=["digits", *NETWORKS], help="digits: a small network that is trained here, in a minute")),
    ("--checkpoint", dict(type=Path, metavar="FILE", help="torchvision's IMAGENET1K_V1 weights of the model, as a state_dict")),
    ("--data", dict(type=Path, metavar="FOLDER", help="ImageNet: FOLDER/val/<class>/*, and to learn masks FOLDER/train/<class>/*")),
    ("--layers", dict(default="conv", choices=list(LAYERS), help="conv is the source's choice")),
    ("--batch", dict(type=int, default=None, help="images a step; 128, of digits 16")),
    ("--workers", dict(type=int, default=0, help="processes that decode images")),
    ("--limit", dict(type=int, default=None, metavar="N", help="at most N images, for a quick look; not of digits")),
    ("--device", dict(default="cpu", help="of torchvision's networks")),
    ("--seed", dict(type=int, default=0)),
    ("--dense-epochs", dict(type=int, default=DIGITS_EPOCHS, metavar="N", help="of digits: how long the small network is trained")),
]


def task_of(args: argparse.Namespace) -> Task:
    """The network and its images. Raises: DataMissing."""
    if args.model == "digits":
        return digits(args.seed, args.batch or 16, args.dense_epochs)
    if args.checkpoint is None or args.data is None:
        raise DataMissing(f"--model {args.model}: expected --checkpoint FILE and --data FOLDER: nothing is downloaded.")
    batch = args.batch or 128
    return pretrained(args.model, args.checkpoint, args.data, seed=args.seed, batch=batch, workers=args.workers, limit=args.limit, device=args.device)


def merge(out: Path | None, name: str, rows: list[Row], same: Callable[[Row], bool], read: Callable[[Path], list[Row]]) -> None:
    """Write the rows into `out/name.csv` in place of those that are the same run's."""
    before = [] if out is None or not (out / f"{name}.csv").is_file() else [r for r in read(out / f"{name}.csv") if not same(r)]
    save(out, name, [*before, *rows])
