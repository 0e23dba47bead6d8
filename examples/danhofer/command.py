"""What the scripts share: the options that name a network and its images, and the csv, which keeps the rows of other networks."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.checked import device_here
from data import DataMissing
from thesis import csv_files, lock
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


def batch_of(args: argparse.Namespace) -> int:
    """Images a step of mask learning."""
    default = SMALL[args.model].learning_batch if args.model in SMALL else 128
    return default if args.batch is None else args.batch


def task_of(args: argparse.Namespace, seed: int) -> Task:
    """The network and its images. Raises: DataMissing, for options that the network does not have, too."""
    of = (
        ("--batch", args.batch, [*SMALL, *NETWORKS]),
        ("--limit", args.limit, [*NETWORKS]),
        ("--dense-epochs", args.dense_epochs, [*SMALL]),
        ("--checkpoint", args.checkpoint, [*NETWORKS]),
    )
    for option, value, networks in of:
        if value is not None and args.model not in networks:
            raise DataMissing(f"{option}: expected --model {' or '.join(networks)}, got {args.model}.\n  fix: leave {option} out.")
    if args.model in SMALL:
        return trained(args.model, seed, args.data, batch_of(args), args.dense_epochs)
    if args.checkpoint is None or args.data is None:
        raise DataMissing(f"--model {args.model}: expected --checkpoint FILE and --data FOLDER: nothing is downloaded.")
    how = {"batch": batch_of(args), "workers": args.workers, "limit": args.limit, "device": args.device}
    return pretrained(args.model, args.checkpoint, args.data, seed=seed, **how)


def settings(args: argparse.Namespace, task: Task, seed: int) -> Row:
    """The first columns of a row: which network, how long it was trained, and what of it is masked."""
    return {"model": task.name, "layers": args.layers, "seed": seed, "dense_epochs": task.epochs}


def rows_of_others(args: argparse.Namespace, name: str) -> list[Row]:
    """The rows of the csv `name` of `--out` so far; asked for before anything is trained. Raises: ConfigError where it is no csv, or the device not here."""
    device_here(args.device)
    return [] if args.out is None else csv_files.read(args.out / f"{name}.csv")


def merge(args: argparse.Namespace, name: str, rows: list[Row], keys: Sequence[str]) -> None:
    """Write the rows into the csv `name` of `--out`, in the place of those with the same `keys`; older files lack some of these, and their rows stay."""
    if args.out is not None and args.limit is not None:
        print(f"--out: no {name}.csv is written: with --limit nothing is comparable", file=sys.stderr)
    elif args.out is not None:
        ran = {tuple(str(r[key]) for key in keys) for r in rows}
        with lock.alone(args.out / f"{name}.csv"):  # another process may have added rows meanwhile
            before = [r for r in rows_of_others(args, name) if tuple(r.get(key, "") for key in keys) not in ran]
            save(args.out, name, [*before, *rows])
