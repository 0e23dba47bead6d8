"""Sampled matmul (SDD): dW = dY^T X, only the kept blocks; and the kept blocks of block dropout's dX (`kernels.triton.dropped`).

One program computes a tile of BN out_features (a strip of the forward's lists) by Q list entries, gathered: entries of the union list stand side by side, so
that small blocks fill a tile too. It loops over a share of the tokens; shares go to a float32 workspace and are added in order by `sum_splits_kernel`, so that
the result has the same bits in every run.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _kept(e, rn, k, N, K, ROW_BLOCK: tl.constexpr):
    """Which elements of the tile are kept: bits of the entries `e`, one for each column k, by the rows rn."""
    kept = (((e >> 16)[None, :] >> (tl.arange(0, rn.shape[0]) // ROW_BLOCK)[:, None]) & 1) != 0
    return kept & (rn[:, None] < N) & (k[None, :] < K)


@triton.jit(do_not_specialize=["M"])
def sampled_matmul_kernel(
    gy_ptr,
    x_ptr,
    out_ptr,
    entries_ptr,
    counts_ptr,
    order_ptr,
    M,
    N,
    K,
    stride_g,
    stride_x,
    inner,
    batch_g,
    batch_x,
    capacity,
    tiles,
    share,
    split_stride,
    scale,
    NM: tl.constexpr,
    KM: tl.constexpr,
    GM: tl.constexpr,
    XM: tl.constexpr,
    IM: tl.constexpr,
    G_INNER: tl.constexpr,
    X_INNER: tl.constexpr,
    BN: tl.constexpr,
    BT: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
    UNIT_W: tl.constexpr,
    Q: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """out[n, k] = scale * sum over this split's tokens m of gy[m, n] * x[m, k], for kept blocks; nothing else is written. A scale of None is 1.

    Grid:     (strips * tiles, splits); a program beyond its list's end does nothing
    Tensors:  gy [M, N] rows stride_g * GM apart, x [M, K] rows stride_x * XM apart, one dtype; out [splits, N, K] contiguous; lists of the forward
    Sizes:    N and K come in units of NM and KM, see list_matmul_kernel
    INNER:    that operand is [batches, features, inner * IM], strides (its batch stride * IM, its row stride, 1), with batches * inner = M. A batch_g of None:
              there is one batch, and rows of gy past the end repeat the last one
    Tokens:   M * IM; split s takes [s * share, (s + 1) * share); share is a multiple of BT
    """
    BC: tl.constexpr = UNIT_W * Q
    N = N * NM
    K = K * KM
    pid = tl.program_id(0)
    split = tl.program_id(1)
    strip = tl.load(order_ptr + pid // tiles)
    first = (pid % tiles) * Q
    count = tl.load(counts_ptr + strip)
    if first < count:
        rn = strip * BN + tl.arange(0, BN)
        cc = tl.arange(0, BC)
        slot = first + cc // UNIT_W
        e = tl.load(entries_ptr + strip.to(tl.int64) * capacity + slot, mask=slot < count, other=0)
        k = (e & 0xFFFF) * UNIT_W + cc % UNIT_W
        k = tl.max_contiguous(tl.multiple_of(k, UNIT_W), UNIT_W)
        if batch_g is not None:
            kept = _kept(e, rn, k, N, K, ROW_BLOCK)
        tt = tl.arange(0, BT)
        begin = split * share
        M = M * IM
        end = tl.minimum(begin + share, M)
        acc = tl.zeros((BN, BC), tl.float32)
        for t in range(begin, end, BT):
            m = tl.multiple_of(t, 16) + tt
            live = m < M  # a share is whole steps, so that only M cuts one
            rows = m.to(tl.int64)[:, None]
            if G_INNER and batch_g is None:
                g = tl.load(gy_ptr + tl.minimum(rn, N - 1).to(tl.int64)[:, None] * stride_g * GM + m[None, :], mask=live[None, :], other=0.0)
            elif G_INNER:
                lane = ((m // (inner * IM)).to(tl.int64) * batch_g * IM + m % (inner * IM))[None, :]
                across = rn.to(tl.int64)[:, None] * stride_g * GM
                g = tl.load(gy_ptr + across + lane, mask=live[None, :] & (rn[:, None] < N), other=0.0)
            else:
                g = tl.trans(tl.load(gy_ptr + rows * stride_g * GM + rn[None, :], mask=live[:, None] & (rn[None, :] < N), other=0.0))
            if X_INNER:
                lane_x = ((m // (inner * IM)).to(tl.int64) * batch_x * IM + m % (inner * IM))[None, :]
                along = k.to(tl.int64)[:, None] * stride_x * XM
                x = tl.trans(tl.load(x_ptr + along + lane_x, mask=live[None, :] & (k[:, None] < K), other=0.0))
            else:
                x = tl.load(x_ptr + rows * stride_x * XM + k[None, :], mask=live[:, None] & (k[None, :] < K), other=0.0)
            acc = tl.dot(g, x, acc, input_precision=PRECISION)
        if scale is not None:
            acc *= scale
        if batch_g is None:  # here: across the loop it would take more registers than ragged rows leave
            kept = _kept(e, rn, k, N, K, ROW_BLOCK)
        at = out_ptr + split.to(tl.int64) * split_stride + rn.to(tl.int64)[:, None] * K + k[None, :]
        if ACCUMULATE:
            acc += tl.load(at, mask=kept, other=0.0).to(tl.float32)
        tl.store(at, acc.to(out_ptr.dtype.element_ty), mask=kept)


@triton.jit
def sum_splits_kernel(
    parts_ptr,
    out_ptr,
    mask_ptr,
    N,
    K,
    KB,
    split_stride,
    splits,
    BH: tl.constexpr,
    BW: tl.constexpr,
    TN: tl.constexpr,
    TK: tl.constexpr,
    ACCUMULATE: tl.constexpr,
):
    """out[n, k] = sum of parts[s, n, k] over s, in order, for kept blocks.

    Grid: (cdiv(N, TN), cdiv(K, TK)). parts [splits, N, K] fp32, out [N, K], mask [NB, KB] bool in blocks of BH x BW; None: all are kept.
    """
    r = tl.program_id(0) * TN + tl.arange(0, TN)
    c = tl.program_id(1) * TK + tl.arange(0, TK)
    inside = (r[:, None] < N) & (c[None, :] < K)
    if mask_ptr is None:
        kept = inside
    else:
        kept = tl.load(mask_ptr + (r // BH).to(tl.int64)[:, None] * KB + (c // BW)[None, :], mask=inside, other=0) != 0
    at = r.to(tl.int64)[:, None] * K + c[None, :]
    acc = tl.zeros((TN, TK), tl.float32)
    part = parts_ptr + at
    for _ in range(splits):
        acc += tl.load(part, mask=kept, other=0.0)
        part += split_stride
    if ACCUMULATE:
        acc += tl.load(out_ptr + at, mask=kept, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=kept)
