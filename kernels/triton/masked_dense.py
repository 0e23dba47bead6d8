"""Masked-dense on a GPU: PyTorch's dense products with W∘M, which one kernel makes in one pass over W; in dW it writes zeros, and touches no kept element.

What `auto` runs where kernels that skip blocks do not pay, and `triton` where they do not take the case. Arguments and results of `kernels.reference`, to the
bit of the same product; that form writes a mask of the weight's size, and reads it and all of W again. Float64 is masked as there.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

import triton

from .. import reference
from ..errors import ShapeError
from ..reference import block_index as block_index
from ..reference import strip_lists as strip_lists
from . import device
from .elementwise import mask_cast_kernel, zero_masked_kernel

ROWS, COLUMNS = 16, 128  # of a program


def _grid(shape: tuple[int, ...]) -> tuple[int, int]:
    return triton.cdiv(shape[0], ROWS), triton.cdiv(shape[1], COLUMNS)


def mask_cast(
    w: Tensor, mask: Tensor, block: tuple[int, int], dtype: torch.dtype, out: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """scale W∘M in `dtype`, in one pass over W; any block. In place where `out` is `w`."""
    w, mask = device.rows_of(w), mask.contiguous()
    if out is not None and not out.is_contiguous():
        raise ShapeError(f"mask_cast writes contiguous rows: expected a contiguous `out`, got strides {out.stride()}.")
    result = torch.empty(w.shape, dtype=dtype, device=w.device) if out is None else out
    sizes = (*w.shape, mask.shape[1], w.stride(0))
    device.launch(mask_cast_kernel, _grid(w.shape), w, w, mask.view(torch.int8), result, *sizes, scale, BH=block[0], BW=block[1], TN=ROWS, TK=COLUMNS)
    return result


def zero_masked(t: Tensor, mask: Tensor, block: tuple[int, int]) -> Tensor:
    """`t` [N, K] contiguous with zeros in its masked blocks, in place; any block."""
    if not t.is_contiguous():
        raise ShapeError(f"zero_masked writes contiguous rows: expected a contiguous tensor, got strides {t.stride()}.")
    mask = mask.contiguous()
    device.launch(zero_masked_kernel, _grid(t.shape), t, t, mask.view(torch.int8), *t.shape, mask.shape[1], BH=block[0], BW=block[1], TN=ROWS, TK=COLUMNS)
    return t


def masked(w: Tensor, mask: Tensor, block: tuple[int, int]) -> Tensor:
    """W∘M in the dtype of W. A weight whose columns are contiguous stays so: a matmul reads it as it is."""
    if device.why_not(w):
        return reference.masked(w, mask, block)
    if w.stride(0) == 1 and w.stride(1) != 1:
        return mask_cast(w.t(), mask.t(), (block[1], block[0]), w.dtype).t()
    return mask_cast(w, mask, block, w.dtype)


def _zeroed(dw: Tensor, mask: Tensor, block: tuple[int, int]) -> Tensor:
    return reference.masked(dw, mask, block) if device.why_not(dw) else zero_masked(dw, mask, block)


masked_linear = partial(reference.masked_linear, by=masked)
masked_linear_dx = partial(reference.masked_linear_dx, by=masked)
masked_linear_dw = partial(reference.masked_linear_dw, by=_zeroed)
