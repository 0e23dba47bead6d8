"""Numbers, a device and a model with which nothing, or something else than was meant, would be trained: said in one line, before anything runs."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from math import inf

import torch
from resmlp import PRESETS

from fxmask import FxMaskError

SIDES = {"digits": 8, "cifar10": 32}  # of the images, in pixels; those of a folder are brought to the model's
COUNTS = (
    "epochs", "dense_epochs", "stop", "batch", "batches", "limit", "image", "patch", "dim", "depth", "expansion", "hidden", "width", "sequence", "samples",
    "tokens", "features", "widths", "layers", "turns", "steps", "repeats", "warm_up", "threads", "jobs", "at_once", "in_turns",
)  # fmt: skip
LENGTHS = ("weight_decay", "min_lr", "warmup", "cooldown", "mixup", "cutmix", "masks_from", "refresh", "save_every", "workers", "holdout")
RANGES: dict[str, tuple[Callable[[float], bool], tuple[str, ...]]] = {  # of options, where a script has them
    "at least 1": (lambda x: 1 <= x < inf, COUNTS),
    "0 or more": (lambda x: 0 <= x < inf, LENGTHS),
    "a number above 0": (lambda x: 0 < x < inf, ("lr", "memory")),
    f"a number from 0 to {2**40}": (lambda x: 0 <= x <= 2**40, ("seed", "seeds")),  # generators take 64 bits of what is made of a seed and an epoch or a step
    "a number from 0 to 1": (lambda x: 0 <= x <= 1, ("mix_prob", "mix_switch", "smoothing")),
}


def check_numbers(p: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Every number lies in its range, and those of a list; words and None, which was not given, are no numbers, and nan lies in no range."""
    for expected, (fits, names) in RANGES.items():
        for name in names:
            given = getattr(args, name, None)
            for value in given if isinstance(given, list) else [given]:
                if isinstance(value, int | float) and not fits(value):
                    p.error(f"--{name.replace('_', '-')}: expected {expected}, got {value}")
    if hasattr(args, "warmup_lr"):  # what torch's schedulers multiply the rate by is at most 1
        if args.warmup and not 0 < args.warmup_lr <= args.lr:
            p.error(f"--warmup-lr: expected a number above 0 and at most --lr, {args.lr}, to which the warm-up rises, got {args.warmup_lr}")
        if args.cooldown and args.min_lr > args.lr:
            p.error(f"--min-lr: expected at most --lr, {args.lr}, got {args.min_lr}")
        if args.mix_prob and (args.mixup or args.cutmix) and not args.mixup * (1 - args.mix_switch) + args.cutmix * args.mix_switch:
            one, share = ("MixUp", "below 1") if args.mixup else ("CutMix", "above 0")
            p.error(f"--mix-switch: expected a share {share}, since {one} alone is on, got {args.mix_switch}; --mix-prob 0 mixes nothing")


def check_device(p: argparse.ArgumentParser, name: str) -> None:
    """The device is here."""
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        p.error(f"--device: expected cpu, or cuda where there is a GPU, got {name!r}: {str(error).splitlines()[0]}")


def check_model(model: str, data: str) -> None:
    """The model takes images of this data set. Raises: FxMaskError."""
    takes = PRESETS[model].image
    if SIDES.get(data, takes) != takes:
        raise FxMaskError(f"--model {model} takes images of {takes} pixels, --data {data} has {SIDES[data]}.")
