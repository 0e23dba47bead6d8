"""dW from a pruned input: dW = dY^T X_s, from the kept blocks of X as they were saved.

A strip of dW is the `b` features of one block. Of the reduction axis, the rows of X, a program takes those whose block of its strip was kept, named by a
list (`kernels.prune.strip_rows`): it gathers rows of dY and, side by side with them, the saved blocks, so that the tensor cores multiply kept blocks alone.
Strips do not share their rows, so a tile is one strip wide, on the N side of the instruction, where 16 features cost no more than their width.

Under a weight mask the other axis is gathered, too: a tile's out_features are those of the transposed list (`kernels.lists`) of its strip, so that what runs
is the product of both densities. Shares of the rows go to a float32 workspace and are added in order by `sum_splits_kernel`: the same bits in every run.

The rules of `list_matmul` hold: no dot under a branch, and a step's rows and blocks are named by what the step before has loaded.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def pruned_matmul_kernel(
    gy_ptr,
    values_ptr,
    out_ptr,
    rows_ptr,
    slots_ptr,
    begins_ptr,
    entries_ptr,
    counts_ptr,
    N,
    K,
    stride_g,
    capacity,
    strips,
    splits,
    split_stride,
    NM: tl.constexpr,
    GM: tl.constexpr,
    BN: tl.constexpr,
    BT: tl.constexpr,
    B: tl.constexpr,
    MASKED: tl.constexpr,
    COL_BLOCK: tl.constexpr,
    UNIT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """out[n, s B + j] = sum over this share's entries of strip s of gy[row, n] * values[slot, j]; with a mask, for its kept blocks alone.

    Grid:     (tiles * strips, splits): strips next to one another read the same columns of dY
    Tensors:  gy [M, N] rows stride_g * GM apart, values [E, B] contiguous, one dtype; out [splits, N, K] contiguous
              rows, slots [E] i32, a strip's from begins[strip] on; begins [strips + 1] i32
    MASKED:   entries [strips, capacity] i32, counts [strips] i32: of the mask's transposed lists in strips of B; blocks are COL_BLOCK wide, entries UNIT high
    Sizes:    N comes in units of NM, see list_matmul_kernel
    Shares:   whole steps of BT entries, as even as they go; those of a strip without kept blocks are zeros
    """
    N = N * NM
    strip = tl.program_id(0) % strips
    tile = tl.program_id(0) // strips
    begin = tl.load(begins_ptr + strip)
    end = tl.load(begins_ptr + strip + 1)
    share = tl.cdiv(tl.cdiv(end - begin, BT), splits) * BT
    begin += tl.program_id(1) * share
    end = tl.minimum(begin + share, end)
    nn = tl.arange(0, BN)
    jj = tl.arange(0, B)
    k = strip * B + jj
    if MASKED:
        count = tl.load(counts_ptr + strip)
        place = tile * (BN // UNIT) + nn // UNIT
        e = tl.load(entries_ptr + strip.to(tl.int64) * capacity + place, mask=place < count, other=0xFFFF)  # no blocks, of a unit that is none
        rn = (e & 0xFFFF) * UNIT + nn % UNIT
        rn = tl.max_contiguous(tl.multiple_of(rn, UNIT), UNIT)
        end = tl.where(tile * (BN // UNIT) < count, end, begin)
    else:
        rn = tile * BN + nn
    inside = rn < N
    tt = tl.arange(0, BT)
    row = tl.load(rows_ptr + begin + tt, mask=begin + tt < end, other=0)
    slot = tl.load(slots_ptr + begin + tt, mask=begin + tt < end, other=0)
    acc = tl.zeros((BN, B), tl.float32)
    for t in range(begin, end, BT):
        live = t + tt < end
        g = tl.load(gy_ptr + row.to(tl.int64)[:, None] * stride_g * GM + rn[None, :], mask=live[:, None] & inside[None, :], other=0.0)
        x = tl.load(values_ptr + slot.to(tl.int64)[:, None] * B + jj[None, :], mask=live[:, None], other=0.0)
        acc = tl.dot(tl.trans(g), x, acc, input_precision=PRECISION)
        after = t + BT + tt
        row = tl.load(rows_ptr + after, mask=after < end, other=0)
        slot = tl.load(slots_ptr + after, mask=after < end, other=0)
    at = out_ptr + tl.program_id(1).to(tl.int64) * split_stride + rn.to(tl.int64)[:, None] * K + k[None, :]
    kept = inside[:, None] & (k < K)[None, :]
    if MASKED:
        kept = kept & ((((e >> 16)[:, None] >> (jj // COL_BLOCK)[None, :]) & 1) != 0)
    tl.store(at, acc.to(out_ptr.dtype.element_ty), mask=kept)
