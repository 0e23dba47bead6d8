"""Masked-dense on a CPU: PyTorch's dense products, with W∘M made by few calls and little work.

Arguments and results of `kernels.reference`, to the bit. `reference.masked` takes nine calls, which is most of a small layer's time, and `torch.where` over a
mask of the weight's size, which takes seven times as long for a large weight as a vectorised bitwise and. Here a small weight's mask is spread over its
elements by two gathers, for `torch.where` or for an and, and a larger one's over rows of integers. Weights that are not contiguous are masked as there.
"""

from __future__ import annotations

import math
from functools import lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from .. import reference

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes
FINE = 4  # rows that must share a row of bits: an int32 for each of so many elements is what a bool mask of all of them takes
# weight elements from which an integer `and` repays its three extra calls over `torch.where`, and from which rows of bits repay their views
FEW, MANY = 1 << 13, 1 << 16


@lru_cache(maxsize=256)
def _places(shape: tuple[int, int], block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """The block row of each row of a weight, and the block column of each column: int64 (N), (K)."""
    with torch.inference_mode(False):  # they outlive the call
        rows, cols = (torch.arange(size, device="cpu") // side for size, side in zip(shape, block, strict=True))
    return rows, cols


class Kept(NamedTuple):
    """A mask's elements: bools, or integers for an and, all bits of a kept element and none of another one, by which Inf and NaN are masked to +0, too."""

    elements: Tensor  # [N, K], or 1 in the place of N or K where that is one block

    def cut(self, w: Tensor, out: Tensor | None = None) -> Tensor:
        """W∘M; `out` is not written to."""
        if self.elements.dtype == torch.bool:
            return torch.where(self.elements, w, 0)
        return torch.bitwise_and(w.view(self.elements.dtype), self.elements).view(w.dtype)


class Bits(NamedTuple):
    """A mask's rows, as integers for an and."""

    rows: Tensor  # integers [rows, 1, K], -1 or 0
    height: int  # rows of the weight to one of them; the last one may have fewer

    def cut(self, w: Tensor, out: Tensor | None = None) -> Tensor:
        """W∘M, a new tensor or `out`, which may be `w`; all contiguous."""
        out = torch.empty_like(w) if out is None else out
        (n, k), integer = w.shape, self.rows.dtype
        source, target, count = w.view(integer), out.view(integer), n // self.height
        whole = count * self.height
        if whole == n:
            torch.bitwise_and(source.view(count, self.height, k), self.rows, out=target.view(count, self.height, k))
            return out
        torch.bitwise_and(source[:whole].view(count, self.height, k), self.rows[:count], out=target[:whole].view(count, self.height, k))
        torch.bitwise_and(source[whole:], self.rows[count], out=target[whole:])
        return out


def kept_of(mask: Tensor, shape: tuple[int, ...], block: tuple[int, int]) -> Kept:
    """`mask` (NB, KB), bool or integer, for weights `shape` (N, K)."""
    rows, cols = _places((shape[0], shape[1]), block)
    wide = mask if mask.shape[1] == 1 else mask.index_select(1, cols)
    return Kept(wide if mask.shape[0] == 1 else wide.index_select(0, rows))


def bits_of(mask: Tensor, shape: tuple[int, ...], block: tuple[int, int], integer: torch.dtype) -> Bits:
    """`mask` (NB, KB) for weights `shape` (N, K) whose elements are as wide as an integer dtype."""
    (n, k), tall, width = shape, min(block[0], shape[0]), min(block[1], shape[1])
    height = math.gcd(n, tall)  # what a ragged last row of blocks divides into, too: one call instead of two
    height = height if height >= FINE else tall
    rows = mask.to(integer).neg_().repeat_interleave(width, 1)
    rows = rows if height == tall else rows.repeat_interleave(tall // height, 0)
    return Bits(rows[: -(-n // height), None, :k], height)


def cutter(w: Tensor, mask: Tensor, block: tuple[int, int]) -> Kept | Bits | None:
    """What cuts the masked elements off weights like `w`; None where that is left to the reference."""
    count = w.numel()
    if not (count and w.is_contiguous()):
        return None  # the order of a product's sums depends on strides
    integer = INTEGERS.get(w.element_size())
    if count < FEW or integer is None:  # of a complex dtype that is as wide as no integer
        return kept_of(mask, w.shape, block)
    if count < MANY:
        return kept_of(mask.to(integer).neg_(), w.shape, block)
    return bits_of(mask, w.shape, block, integer)


def masked(w: Tensor, mask: Tensor, block: tuple[int, int]) -> Tensor:
    """W∘M, in the strides of `w`."""
    by = cutter(w, mask, block)
    return reference.masked(w, mask, block) if by is None else by.cut(w)


def _zeroed(dw: Tensor, mask: Tensor, block: tuple[int, int]) -> Tensor:
    """`masked`, in place where that is one call."""
    by = cutter(dw, mask, block)
    return reference.masked(dw, mask, block) if by is None else by.cut(dw, dw)


masked_linear = partial(reference.masked_linear, by=masked)
masked_linear_dx = partial(reference.masked_linear_dx, by=masked)
masked_linear_dw = partial(reference.masked_linear_dw, by=_zeroed)


def masked_linear_backward(gy: Tensor, x: Tensor, w: Tensor, mask: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """dX and dW in mode `masked`: what cuts is made once."""
    by = cutter(w, mask, block)
    if by is None:
        return masked_linear_dx(gy, w, mask, block, "masked"), masked_linear_dw(gy, x, mask, None, block, "masked")
    gy = reference.copied_once(gy)
    dx = reference.product(gy, by.cut(w).t())
    dw = reference.rows(gy).t() @ reference.rows(x)
    return dx, by.cut(dw, dw)  # of the shape and dtype of w: the product with it has raised otherwise
