"""How much of an input activation pruning keeps: counted from its shape, before anything is computed, and the noise that is drawn for it."""

from __future__ import annotations

import torch
from torch import Tensor

from . import operands, prune
from .errors import message, warn


def plan(x: Tensor, block: int, ratio: float, noise: float, impl: str = "auto") -> tuple[int, bool, Tensor | None] | None:
    """(kept blocks of a sample, whether it is turned, the noise that is drawn) of an input; None where all are kept: x itself is then their smallest form.

    UnsupportedError under torch.func and for nested tensors, ShapeError where x has no axis or no floats. Warns where a ratio rounds to no block.
    """
    operands.check_input(x, "activation pruning", "input of a layer that saves it pruned", impl)
    turned, b, n, kept = _counts(x, block, ratio)
    if kept == n:
        if ratio > 0 and n:
            if torch.compiler.is_compiling():
                from . import while_tracing

                while_tracing.drops_nothing()
            else:
                warn_of_nothing(f"an input {tuple(x.shape)}: {ratio:g} of {n} blocks a sample rounds to none")
        return None
    return kept, turned, None if noise == 0 else torch.exp2(noise * (2 * torch.rand(b, n, device=x.device) - 1))


def warn_of_nothing(what: str) -> None:
    """That pruning drops nothing of an input."""
    fix = "a smaller block, or an input with samples of several rows."
    warn(message(f"activation pruning drops nothing of {what}.", "", fix))


def draw_unused(x: Tensor, block: int, ratio: float) -> None:
    """Draw the noise that `plan` would, for nothing: a checkpoint that forgets its first forward draws in the second one, and both have to end alike."""
    if x.is_nested or operands.is_transformed("auto"):
        return
    _, b, n, kept = _counts(x, block, ratio)
    if kept < n:
        torch.rand(b, n, device=x.device)


def _counts(x: Tensor, block: int, ratio: float) -> tuple[bool, int, int, int]:
    """(whether the samples lie turned, their number, blocks of one, those that are kept) of an input."""
    turned = prune.is_turned(x, block)
    b, r, c = prune.sample_shape(x.shape, turned)
    n = prune.block_count(r, c, block)
    return turned, b, n, n - prune.dropped_count(n, ratio)
