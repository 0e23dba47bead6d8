"""Element-wise kernels: W∘M in one pass, in any dtype; zeros written into what a product left in masked blocks; what lies in masked blocks set aside."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def mask_cast_kernel(w_ptr, mask_ptr, out_ptr, N, K, KB, stride_w, scale, BH: tl.constexpr, BW: tl.constexpr, TN: tl.constexpr, TK: tl.constexpr):
    """out = scale W∘M in out's dtype. Grid: (cdiv(N, TN), cdiv(K, TK)). w [N, K] rows stride_w apart; mask [NB, KB] bool; out [N, K] contiguous.

    A masked element is not loaded; a scale of None is 1. With out = w this masks and scales in place.
    """
    r = tl.program_id(0) * TN + tl.arange(0, TN)
    c = tl.program_id(1) * TK + tl.arange(0, TK)
    inside = (r[:, None] < N) & (c[None, :] < K)
    kept = tl.load(mask_ptr + (r // BH).to(tl.int64)[:, None] * KB + (c // BW)[None, :], mask=inside, other=0) != 0
    w = tl.load(w_ptr + r.to(tl.int64)[:, None] * stride_w + c[None, :], mask=kept, other=0.0)
    if scale is not None:
        w = w.to(tl.float32) * scale
    tl.store(out_ptr + r.to(tl.int64)[:, None] * K + c[None, :], w.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def zero_masked_kernel(out_ptr, mask_ptr, N, K, KB, BH: tl.constexpr, BW: tl.constexpr, TN: tl.constexpr, TK: tl.constexpr):
    """out = out∘M in place, by writes of zeros alone. Grid: (cdiv(N, TN), cdiv(K, TK)). out [N, K] contiguous; mask [NB, KB] bool."""
    r = tl.program_id(0) * TN + tl.arange(0, TN)
    c = tl.program_id(1) * TK + tl.arange(0, TK)
    inside = (r[:, None] < N) & (c[None, :] < K)
    masked = inside & (tl.load(mask_ptr + (r // BH).to(tl.int64)[:, None] * KB + (c // BW)[None, :], mask=inside, other=1) == 0)
    zero = tl.zeros((TN, TK), dtype=out_ptr.dtype.element_ty)
    tl.store(out_ptr + r.to(tl.int64)[:, None] * K + c[None, :], zero, mask=masked)


FIELDS = tl.constexpr(7)  # of a row of the table of `aside`, int64
TENSOR = tl.constexpr(0)  # distance from the first tensor, in units of AT elements
ROWS = tl.constexpr(1)
COLS = tl.constexpr(2)  # in units of KM
GRID_COLS = tl.constexpr(3)  # blocks in a row of blocks
MASK0 = tl.constexpr(4)  # first place of the mask
ASIDE0 = tl.constexpr(5)  # first place in `aside`, in units of ALIGN
TILE0 = tl.constexpr(6)  # first program
ALIGN = tl.constexpr(16)


@triton.jit
def aside_kernel(
    first_ptr, mask_ptr, aside_ptr, table_ptr, owner_ptr, AT: tl.constexpr, KM: tl.constexpr, BACK: tl.constexpr,
    BH: tl.constexpr, BW: tl.constexpr, TN: tl.constexpr, TK: tl.constexpr,
):  # fmt: skip
    """aside = t in masked blocks, or BACK; of the tensors [N, K] of a table, contiguous, of one dtype. Grid: a program for each (TN, TK) tile of each tensor.

    Masks are bool [NB, KB], one behind the other; `aside` has a place for each element, and those of kept blocks are not touched.
    """
    p = tl.program_id(0)
    row = table_ptr + tl.load(owner_ptr + p) * FIELDS
    n, k, kb = tl.load(row + ROWS).to(tl.int32), tl.load(row + COLS).to(tl.int32) * KM, tl.load(row + GRID_COLS).to(tl.int32)
    tile, across = p - tl.load(row + TILE0).to(tl.int32), tl.cdiv(k, TK)
    r = tile // across * TN + tl.arange(0, TN)
    c = tile % across * TK + tl.arange(0, TK)
    inside = (r[:, None] < n) & (c[None, :] < k)
    kept = tl.load(mask_ptr + tl.load(row + MASK0) + (r // BH).to(tl.int64)[:, None] * kb + (c // BW)[None, :], mask=inside, other=1) != 0
    masked = inside & (kept == 0)
    place = r.to(tl.int64)[:, None] * k + c[None, :]
    there = first_ptr + tl.load(row + TENSOR) * AT + place
    here = aside_ptr + tl.load(row + ASIDE0) * ALIGN + place
    if BACK:
        tl.store(there, tl.load(here, mask=masked), mask=masked)
    else:
        tl.store(here, tl.load(there, mask=masked), mask=masked)
