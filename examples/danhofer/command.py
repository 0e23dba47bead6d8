"""What the scripts share: the options that name a network and its images, and the csv, which keeps the rows of other networks."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from data import DataMissing
from thesis.side_by_side import Row, save

from danhofer.networks import LAYERS, NETWORKS, Task, pretrained
from danhofer.small import SMALL, trained

OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("--model", dict(default="digits", choices=[*SMALL, *NETWORKS], help="digits and cifar10: small networks that are trained here, in a minute")),
    ("--checkpoint", dict(type=Path, metavar="FILE", help="torchvision's IMAGENET1K_V1 weights of the model, as a state_dict")),
    ("--data", dict(type=Path, metavar="FOLDER", help="FOLDER/val/<class>/*, and to learn masks FOLDER/train/<class>/*; of CIFAR-10 both, or binary files")),
    ("--layers", dict(default="conv", choices=list(LAYERS), help="conv is the source's choice")),
    ("--batch", dict(type=int, default=None, help="images a step of mask learning; 128, of digits 16")),
    ("--workers", dict(type=int, default=0, help="processes that decode images")),
    ("--limit", dict(type=int, default=None, metavar="N", help="at most N images, for a quick look at torchvision's networks")),
    ("--device", dict(default="cpu", help="of torchvision's networks")),
    ("--dense-epochs", dict(type=int, default=None, metavar="N", help="how long a small network is trained; 100 of digits, 8 of CIFAR-10")),
]


def task_of(args: argparse.Namespace, seed: int) -> Task:
    """The network and its images. Raises: DataMissing."""
    if args.model in SMALL:
        return trained(args.model, seed, args.data, args.batch, args.dense_epochs)
    if args.checkpoint is None or args.data is None:
        raise DataMissing(f"--model {args.model}: expected --checkpoint FILE and --data FOLDER: nothing is downloaded.")
    batch = args.batch or 128
    return pretrained(args.model, args.checkpoint, args.data, seed=seed, batch=batch, workers=args.workers, limit=args.limit, device=args.device)


def merge(out: Path | None, name: str, rows: list[Row], same: Callable[[Row], bool], read: Callable[[Path], list[Row]]) -> None:
    """Write the rows into `out/name.csv` in place of those that are the same run's."""
    before = [] if out is None or not (out / f"{name}.csv").is_file() else [r for r in read(out / f"{name}.csv") if not same(r)]
    save(out, name, [*before, *rows])
