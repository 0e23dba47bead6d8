"""The masks of block dropout: the op that draws one, the same bits by every implementation, and what modules draw by. `kernels.dropout.draw` is the oracle."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from . import dropout, operands, reference
from .dispatch import IMPLEMENTATIONS, check_name, triton_ops
from .grid import grid_shape
from .inductor import register_fake


@torch.library.custom_op("fxmask::drop_mask", mutates_args=())
def drop_mask(seed: Tensor, tokens: int, features: int, block_rows: int, block_cols: int, p: float, impl: str = "auto") -> Tensor:
    """The mask of an input (tokens, features), bool, True = kept, see `kernels.dropout.draw`: the same bits by every `impl`.

    seed: 0-d int64 on the device where the mask is wanted. Differentiable: no. Cost: a byte a block, no host sync; by Triton one launch.
    """
    form = dropout
    check_name(impl)
    dropout.check_probability(p)
    if impl == "triton":
        triton_ops().require(seed.new_empty(0, dtype=torch.float32))  # a seed has no floating dtype to object to
        form = triton_ops().dropped
    return form.draw(tokens, features, (block_rows, block_cols), p, seed)


@register_fake(drop_mask)
def _(seed: Tensor, tokens: int, features: int, block_rows: int, block_cols: int, p: float, impl: str = "auto") -> Tensor:
    return seed.new_empty(grid_shape((tokens, features), (block_rows, block_cols)), dtype=torch.bool)


_one_op: tuple[str, ...] = ("triton",)  # the implementations whose masks are drawn by `drop_mask`


@contextmanager
def drawn_by_one_op(impl: str | None) -> Iterator[None]:
    """For whoever counts: inside, masks of layers that `impl` stands for (None: of all but reference) are drawn by the op that its kernel is, not by aten's."""
    global _one_op
    before, chosen = _one_op, {None: ("triton", "auto", "cpu"), "triton": IMPLEMENTATIONS}.get(impl, _one_op)
    _one_op = chosen
    try:
        yield
    finally:
        _one_op = before


def mask(x: Tensor, block: tuple[int, int], p: float, impl: str = "auto") -> Tensor:
    """A new mask for an input (..., K), from the generator of its device: one number is drawn, the blocks' are hashes of it."""
    operands.check_input(x, "block dropout", "input of block dropout")
    seed = torch.randint(2**62, (), device=x.device)
    if impl in _one_op:
        return drop_mask(seed, reference.tokens(x), x.shape[-1], *block, p, impl)
    return dropout.draw(reference.tokens(x), x.shape[-1], block, p, seed)  # aten ops, which a compiler fuses
