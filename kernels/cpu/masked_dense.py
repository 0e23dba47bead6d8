"""Masked-dense on a CPU: PyTorch's dense products, with W∘M made by a bitwise and.

Arguments and results of `kernels.reference`, to the bit. `torch.where` over a mask of the weight's size, as there, takes seven times as long for a large
weight: the and is vectorised, and reads one row of bits for a whole row of blocks. Weights that are small or not contiguous are masked as there.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import reference

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes
FINE = 4  # rows that must share a row of bits: an int32 for each of so many elements is what a bool mask of all of them takes
LEAST = 1 << 16  # weight elements for which the and's small calls are worth their time; a quarter where dX and dW share them


class Bits(NamedTuple):
    """A mask as the and reads it: all bits of a kept element, none of another one, so that Inf and NaN are masked like numbers, to +0."""

    rows: Tensor  # integers [rows, 1, K], -1 or 0
    height: int  # rows of the weight to one of them; the last one may have fewer

    def cut(self, w: Tensor, out: Tensor) -> Tensor:
        """W∘M, written to `out`, which may be `w`; both contiguous."""
        (n, k), integer = w.shape, self.rows.dtype
        source, target, count = w.view(integer), out.view(integer), n // self.height
        whole = count * self.height
        if whole == n:
            torch.bitwise_and(source.view(count, self.height, k), self.rows, out=target.view(count, self.height, k))
            return out
        if count:
            torch.bitwise_and(source[:whole].view(count, self.height, k), self.rows[:count], out=target[:whole].view(count, self.height, k))
        torch.bitwise_and(source[whole:], self.rows[count], out=target[whole:])
        return out


def bits_of(mask: Tensor, shape: tuple[int, ...], block: tuple[int, int], size: int) -> Bits:
    """`mask` (NB, KB) for weights `shape` (N, K) whose elements have `size` bytes."""
    (n, k), (nb, kb) = shape, mask.shape
    (tall, width), integer = (min(block[0], n), min(block[1], k)), INTEGERS[size]
    height = math.gcd(n, tall)  # what a ragged last row of blocks divides into, too: one call instead of two
    height = height if height >= FINE else tall
    per = tall // height
    rows = mask.to(integer).neg_()[:, None, :, None].expand(nb, per, kb, width).reshape(nb * per, 1, kb * width)
    return Bits(rows[: -(-n // height), :, :k], height)


def takes(w: Tensor, least: int) -> bool:
    """Whether the and is for `w`: not if it is small, not contiguous, or complex and as wide as no integer."""
    return w.numel() >= least and w.is_contiguous() and w.element_size() in INTEGERS


def masked(w: Tensor, mask: Tensor, block: tuple[int, int]) -> Tensor:
    """W∘M, in the strides of `w`, on which the order of a product's sums depends."""
    if not takes(w, LEAST):
        return reference.masked(w, mask, block)
    return bits_of(mask, w.shape, block, w.element_size()).cut(w, torch.empty_like(w))


def masked_linear(x: Tensor, w: Tensor, bias: Tensor | None, mask: Tensor, block: tuple[int, int]) -> Tensor:
    """y = x (W∘M)^T + bias, (..., N), contiguous."""
    return F.linear(x, masked(w, mask, block), bias).contiguous()


def masked_linear_dx(gy: Tensor, w: Tensor, mask: Tensor, block: tuple[int, int]) -> Tensor:
    """dX = dY (W∘M), (..., K), contiguous."""
    return torch.matmul(gy, masked(w, mask, block)).contiguous()


def masked_linear_dw(gy: Tensor, x: Tensor, mask: Tensor, block: tuple[int, int]) -> Tensor:
    """dW = (dY^T X)∘M, (N, K)."""
    dw = reference.rows(gy).t() @ reference.rows(x)
    return bits_of(mask, dw.shape, block, dw.element_size()).cut(dw, dw) if takes(dw, LEAST) else reference.masked(dw, mask, block)


def masked_linear_backward(gy: Tensor, x: Tensor, w: Tensor, mask: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """dX and dW."""
    if not takes(w, LEAST // 4):
        return masked_linear_dx(gy, w, mask, block), masked_linear_dw(gy, x, mask, block)
    bits = bits_of(mask, w.shape, block, w.element_size())
    dx = torch.matmul(gy, bits.cut(w, torch.empty_like(w))).contiguous()
    dw = reference.rows(gy).t() @ reference.rows(x)
    return dx, bits.cut(dw, dw)  # of the dtype of w: the product with it has raised otherwise
