"""Masked-dense on a CPU: PyTorch's dense products, with W∘M made by a bitwise and.

Arguments and results of `kernels.reference`, to the bit. `torch.where` over a mask of the weight's size, as there, takes seven times as long for a large weight
and twice as long for a small one: the and is vectorised, and reads one row of bits for a whole row of blocks.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import reference

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes
LEAST = 1 << 16  # weight elements for which the and's small calls are worth their time; a quarter where dX and dW share them


class Bits(NamedTuple):
    """A mask as the and reads it: all bits of a kept element, none of another one, so that Inf and NaN are masked like numbers, to +0."""

    rows: Tensor  # integers [N / height, 1, K], -1 or 0
    height: int  # rows of the weight to one of them: of a block, or what a ragged last one divides it into

    def cut(self, w: Tensor, out: Tensor) -> Tensor:
        """W∘M, written to `out`, which may be `w`; both contiguous."""
        shape = (len(self.rows), self.height, w.shape[1])
        torch.bitwise_and(w.view(self.rows.dtype).view(shape), self.rows, out=out.view(self.rows.dtype).view(shape))
        return out


def bits_of(mask: Tensor, shape: tuple[int, ...], block: tuple[int, int], size: int) -> Bits:
    """`mask` (NB, KB) for weights `shape` (N, K) whose elements have `size` bytes."""
    (n, k), (nb, kb), width = shape, mask.shape, min(block[1], shape[1])
    height = math.gcd(n, block[0])
    per = min(block[0] // height, n // height)
    rows = mask.to(INTEGERS[size]).neg_()[:, None, :, None].expand(nb, per, kb, width).reshape(nb * per, 1, kb * width)
    return Bits(rows[: n // height, :, :k], height)


def masked(w: Tensor, mask: Tensor, block: tuple[int, int]) -> Tensor:
    """W∘M, contiguous."""
    if w.numel() < LEAST or not w.is_contiguous():
        return reference.masked(w, mask, block).contiguous()
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
    return bits_of(mask, dw.shape, block, dw.element_size()).cut(dw, dw) if dw.numel() >= LEAST else reference.masked(dw, mask, block)


def masked_linear_backward(gy: Tensor, x: Tensor, w: Tensor, mask: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """dX and dW."""
    if w.numel() < LEAST // 4 or not w.is_contiguous():
        return masked_linear_dx(gy, w, mask, block), masked_linear_dw(gy, x, mask, block)
    bits = bits_of(mask, w.shape, block, w.element_size())
    dx = torch.matmul(gy, bits.cut(w, torch.empty_like(w))).contiguous()
    dw = reference.rows(gy).t() @ reference.rows(x)
    return dx, bits.cut(dw, dw)
