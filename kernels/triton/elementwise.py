"""Element-wise kernels of masked-dense: W∘M in one pass, in any dtype, and zeros written into what a product left in masked blocks."""

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
    kept = tl.load(mask_ptr + (r // BH)[:, None] * KB + (c // BW)[None, :], mask=inside, other=0) != 0
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
    masked = inside & (tl.load(mask_ptr + (r // BH)[:, None] * KB + (c // BW)[None, :], mask=inside, other=1) == 0)
    zero = tl.zeros((TN, TK), dtype=out_ptr.dtype.element_ty)
    tl.store(out_ptr + r.to(tl.int64)[:, None] * K + c[None, :], zero, mask=masked)
