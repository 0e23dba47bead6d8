"""What a benchmark is asked for, checked before anything runs: one line and exit code 2 where it cannot be meant."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch

import fxmask


def at_least_one(p: argparse.ArgumentParser, a: argparse.Namespace, *names: str) -> None:
    """Numbers below 1 are errors; None is what was not given."""
    for name in names:
        value = getattr(a, name)
        if value is not None and value < 1:
            p.error(f"--{name.replace('_', '-')}: expected at least 1, got {value}")


def masks(p: argparse.ArgumentParser, block: int, ratios: Sequence[float]) -> None:
    """A block and ratios that no mask can have are errors."""
    try:
        for ratio in ratios:
            fxmask.WeightMask(ratio=ratio, block=(block, block))
    except fxmask.FxMaskError as error:
        p.error(str(error).splitlines()[0])


def device(p: argparse.ArgumentParser, name: str) -> torch.device:
    """A device that is here."""
    try:
        found = torch.device(name)
    except RuntimeError as error:
        p.error(f"--device: expected cpu or cuda, got {name!r}: {str(error).splitlines()[0]}")
    if found.type not in ("cpu", "cuda") or (found.type == "cuda" and not torch.cuda.is_available()):
        p.error(f"--device: expected cpu, or cuda where there is a GPU, got {name!r}")
    return found
