"""N:M masks by magnitude in one pass: W is read once; mask and W∘M, in the dtype that the product wants, are written. Bit-equal to `kernels.nm`."""

from __future__ import annotations

import torch
from torch import Tensor

import triton
import triton.language as tl

from . import device

TILE = 4096  # pairs of elements that a program compares


@triton.jit
def nm_mask_kernel(w_ptr, mask_ptr, out_ptr, count, N: tl.constexpr, M: tl.constexpr, GROUPS: tl.constexpr, BITS: tl.constexpr, SIGNLESS: tl.constexpr):
    """mask: the N largest |w| of every M neighbours, ties to the lowest index, NaN above Inf; out = W∘M in its own dtype.

    Grid: (cdiv(count, GROUPS * M),). w, mask (int8) and out have `count` elements, a multiple of M, contiguous. Bit patterns without the sign are compared,
    which order as magnitudes do: an element is kept if fewer than N of its group are larger, or as large and before it.
    """
    at = tl.program_id(0).to(tl.int64) * (GROUPS * M) + tl.arange(0, GROUPS)[:, None] * M + tl.arange(0, M)[None, :]
    inside = at < count
    w = tl.load(w_ptr + at, mask=inside, other=0.0)
    key = w.to(BITS, bitcast=True).to(tl.int32) & SIGNLESS
    place = tl.arange(0, M)
    mine, other = key[:, :, None], key[:, None, :]
    before = (place[None, :] < place[:, None])[None, :, :]
    better = ((other > mine) | ((other == mine) & before)).to(tl.int32)
    kept = tl.sum(better, 2) < N
    tl.store(mask_ptr + at, kept.to(tl.int8), mask=inside)
    tl.store(out_ptr + at, tl.where(kept, w, 0.0).to(out_ptr.dtype.element_ty), mask=inside)


def nm_mask(w: Tensor, n: int, m: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(W∘M in `dtype`, mask bool), contiguous, of a contiguous weight whose rows are multiples of m; m of `kernels.nm.PAIRED`."""
    mask, out = torch.empty(w.shape, dtype=torch.bool, device=w.device), torch.empty(w.shape, dtype=dtype, device=w.device)
    groups = TILE // (m * m)
    bits, signless = (tl.int32, 0x7FFFFFFF) if w.dtype == torch.float32 else (tl.int16, 0x7FFF)
    grid = (triton.cdiv(w.numel(), groups * m),)
    constants = {"N": n, "M": m, "GROUPS": groups, "BITS": bits, "SIGNLESS": signless}
    device.launch(nm_mask_kernel, grid, w, w, mask.view(torch.int8), out, w.numel(), **constants, num_warps=4)
    return out, mask
