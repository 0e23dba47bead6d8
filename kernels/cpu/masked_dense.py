"""Masked-dense on a CPU: PyTorch's dense products, with W∘M made by a bitwise and.

Arguments and results of `kernels.reference`, to the bit. `torch.where` over a mask of the weight's size, as there, takes seven times as long for a large weight
and twice as long for a small one: the and is vectorised, and reads one row of bits for a whole row of blocks.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import reference

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes
LEAST = 1 << 14  # weight elements for which the and's views are worth their time


def _cut(w: Tensor, mask: Tensor, block: tuple[int, int], out: Tensor) -> Tensor:
    """W∘M, written to `out`, which may be `w`; both contiguous. All bits of an element are kept or none, so that Inf and NaN are masked like numbers, to +0."""
    (n, k), (nb, kb), integer = w.shape, mask.shape, INTEGERS[w.element_size()]
    height, width = block[0], min(block[1], k)
    bits = mask.to(integer).neg_().unsqueeze(2).expand(nb, kb, width).reshape(nb, 1, kb * width)  # -1 has all bits
    bits = bits[..., :k] if kb * width > k else bits
    source, target = w.view(integer), out.view(integer)
    if n % height == 0:
        torch.bitwise_and(source.view(nb, height, k), bits, out=target.view(nb, height, k))
        return out
    whole = n - n % height
    if whole:
        torch.bitwise_and(source[:whole].view(nb - 1, height, k), bits[:-1], out=target[:whole].view(nb - 1, height, k))
    torch.bitwise_and(source[whole:], bits[-1], out=target[whole:])
    return out


def masked(w: Tensor, mask: Tensor, block: tuple[int, int]) -> Tensor:
    """W∘M, contiguous."""
    if w.numel() < LEAST or not w.is_contiguous():
        return reference.masked(w, mask, block).contiguous()
    return _cut(w, mask, block, torch.empty_like(w))


def masked_linear(x: Tensor, w: Tensor, bias: Tensor | None, mask: Tensor, block: tuple[int, int]) -> Tensor:
    """y = x (W∘M)^T + bias, (..., N), contiguous."""
    return F.linear(x, masked(w, mask, block), bias).contiguous()


def masked_linear_dx(gy: Tensor, w: Tensor, mask: Tensor, block: tuple[int, int]) -> Tensor:
    """dX = dY (W∘M), (..., K), contiguous."""
    return torch.matmul(gy, masked(w, mask, block)).contiguous()


def masked_linear_dw(gy: Tensor, x: Tensor, mask: Tensor, block: tuple[int, int]) -> Tensor:
    """dW = (dY^T X)∘M, (N, K)."""
    dw = reference.rows(gy).t() @ reference.rows(x)
    return _cut(dw, mask, block, dw) if dw.numel() >= LEAST and dw.is_contiguous() else reference.masked(dw, mask, block)


def masked_linear_backward(gy: Tensor, x: Tensor, w: Tensor, mask: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """dX and dW."""
    return masked_linear_dx(gy, w, mask, block), masked_linear_dw(gy, x, mask, block)
