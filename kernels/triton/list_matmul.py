"""List matmul (DSD): y = x (W∘M)^T + bias, and dX = dY (W∘M) over the transposed lists, from W as it lies in memory. Block dropout's forward and dW are this
product with the roles of x and w exchanged (`kernels.triton.dropped`).

One program computes a tile of [BM tokens, BN features]. Tokens are on the M side of the tensor-core instruction, so that blocks of 16 and 32 rows cost no more
than their width. The program walks its strip's list (`kernels.lists`): a step takes STEP features of the reduction axis, from as many list entries as that
are; a block that is not kept is never loaded, by the load's predicate.

Two rules keep the software pipeline at full depth: the dot is never under a branch, and the list entries are carried from the step before, since an index that
is loaded in the loop consumes its stages.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _activate(v, ACT: tl.constexpr):
    if ACT == "relu":
        v = tl.maximum(v, 0.0)
    elif ACT == "silu":
        v = v * tl.sigmoid(v)
    elif ACT == "gelu":
        v = 0.5 * v * (1.0 + tl.erf(v * 0.7071067811865476))
    return v


@triton.jit(do_not_specialize=["M", "tiles_m"])  # a batch of another size compiles nothing anew
def list_matmul_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    y_ptr,
    entries_ptr,
    counts_ptr,
    order_ptr,
    M,
    N,
    K,
    stride_x,
    stride_w,
    inner,
    stride_batch,
    capacity,
    strips,
    tiles_m,
    scale,
    split_stride,
    NM: tl.constexpr,
    KM: tl.constexpr,
    XM: tl.constexpr,
    WM: tl.constexpr,
    IM: tl.constexpr,
    X_INNER: tl.constexpr,
    Y_INNER: tl.constexpr,
    TMA: tl.constexpr,
    W_ROWS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    STEP: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
    UNIT_W: tl.constexpr,
    BITS: tl.constexpr,
    RAGGED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BIAS_M: tl.constexpr,
    ACT: tl.constexpr,
    GROUP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """y[m, n] = act(scale * sum over listed k of x[m, k] * w[n, k] + bias[n]).

    Grid:     (tiles_m * strips, splits): groups of GROUP token tiles; within a group strips by falling length, then token tiles
    Tensors:  x [M, K] rows stride_x * XM apart; y [M, N] contiguous; all of one dtype (fp16, bf16, fp32), bias [N];
              w: W_ROWS: [N, K], rows (the strip axis) stride_w * WM apart (forward); else [K, N], rows (the reduction axis) stride_w * WM apart (dX)
              entries [strips, capacity] i32, counts [strips] i32, order [strips] i32
    X_INNER:  x is [M, K, inner * IM] with M the batches, strides (stride_batch, stride_x * XM, 1): tokens lie side by side
    Y_INNER:  y is [M, N, inner * IM], contiguous; with either of the two M counts batches, and the rows of x and y are M * inner * IM
    BIAS_M:   bias [M * inner * IM], one for each row of x
    scale:    None: 1. split_stride: None: one split; else each split takes a share of every list's steps, and y is [splits, split_stride] of partial sums
    TMA:      x and w are tensor descriptors in boxes of a tile; BITS must be off, and UNIT_W at least STEP
    Sizes:    N, K and the row strides come in units of NM, KM, XM and WM, so that their divisibility is known where 16 does not divide them; behind a mask
              or an address of unknown divisibility, elements would be loaded one by one, without the pipeline
    Accumulates in fp32. N and K may be ragged (RAGGED: K), M any. An empty list stores bias or zeros.
    """
    P: tl.constexpr = STEP // UNIT_W if STEP > UNIT_W else 1  # entries a step
    SUB: tl.constexpr = UNIT_W // STEP if UNIT_W > STEP else 1  # steps an entry
    N = N * NM
    K = K * KM
    inner = inner * IM
    if X_INNER or Y_INNER:
        M = M * inner
    pid = tl.program_id(0)
    per_group = GROUP * strips
    group = pid // per_group
    inside = pid % per_group
    size = tl.minimum(tiles_m - group * GROUP, GROUP)
    strip = tl.load(order_ptr + inside // size)
    tile = group * GROUP + inside % size

    rm = tile * BM + tl.arange(0, BM)
    rn = strip * BN + tl.arange(0, BN)
    kk = tl.arange(0, STEP)
    if not TMA:
        if X_INNER:
            x_rows = x_ptr + ((rm // inner).to(tl.int64) * stride_batch * IM + rm % inner)[:, None]
        else:
            x_rows = x_ptr + tl.where(rm < M, rm, 0).to(tl.int64)[:, None] * stride_x * XM
        rnc = tl.minimum(rn, N - 1)  # rows past the end repeat the last one, which is in the same block
        if W_ROWS:
            w_base = w_ptr + rnc.to(tl.int64)[None, :] * stride_w * WM
        else:
            w_base = w_ptr + rn[None, :]
    sub = tl.arange(0, BN) // ROW_BLOCK
    which = kk // UNIT_W
    within = kk % UNIT_W

    count = tl.load(counts_ptr + strip)
    steps = (count + P - 1) // P * SUB
    at = entries_ptr + strip.to(tl.int64) * capacity
    begin_t = 0
    head = at
    if split_stride is not None:
        share = tl.cdiv(steps, tl.num_programs(1))
        begin_t = tl.minimum(tl.program_id(1) * share, steps)
        steps = tl.minimum(begin_t + share, steps)
        head = at + begin_t // SUB * P
        y_ptr += tl.program_id(1).to(tl.int64) * split_stride
    e0 = tl.load(head)
    e1 = e0
    e2 = e0
    e3 = e0
    if P >= 2:
        e1 = tl.load(head + 1)
    if P == 4:
        e2 = tl.load(head + 2)
        e3 = tl.load(head + 3)
    acc = tl.zeros((BM, BN), tl.float32)
    for t in range(begin_t, steps):
        if TMA:
            begin = (e0 & 0xFFFF) * UNIT_W + (t % SUB) * STEP
            x = x_ptr.load([tile * BM, begin])
            if W_ROWS:
                w = w_ptr.load([strip * BN, begin]).T
            else:
                w = w_ptr.load([begin, strip * BN])
        else:
            if P == 1:
                e = tl.full((STEP,), 0, tl.int32) + e0
            elif P == 2:
                e = tl.where(which == 0, e0, e1)
            else:
                e = tl.where(which < 2, tl.where(which == 0, e0, e1), tl.where(which == 2, e2, e3))
            k = (e & 0xFFFF) * UNIT_W + (t % SUB) * STEP + within
            k = tl.max_contiguous(tl.multiple_of(k, STEP // P), STEP // P)
            if W_ROWS:
                w_at = w_base + k[:, None]
            else:
                w_at = w_base + k.to(tl.int64)[:, None] * stride_w * WM
            bits = e >> 16
            if X_INNER:
                x_at = x_rows + k.to(tl.int64)[None, :] * stride_x * XM
                live = rm < M
                if RAGGED:
                    x = tl.load(x_at, mask=live[:, None] & (k < K)[None, :], other=0.0)
                else:
                    x = tl.load(x_at, mask=live[:, None], other=0.0)
            elif RAGGED:
                x = tl.load(x_rows + k[None, :], mask=k[None, :] < K, other=0.0)
            else:
                x = tl.load(x_rows + k[None, :])
            if BITS:
                kept = ((bits[:, None] >> sub[None, :]) & 1) != 0
                if RAGGED:
                    kept = kept & (k[:, None] < K)
                if not W_ROWS:
                    kept = kept & (rn[None, :] < N)
                w = tl.load(w_at, mask=kept, other=0.0)
            elif RAGGED:
                if W_ROWS:
                    w = tl.load(w_at, mask=k[:, None] < K, other=0.0)
                else:
                    w = tl.load(w_at, mask=(k[:, None] < K) & (rn[None, :] < N), other=0.0)
            elif W_ROWS:
                w = tl.load(w_at)
            else:
                w = tl.load(w_at, mask=rn[None, :] < N, other=0.0)
        acc = tl.dot(x, w, acc, input_precision=PRECISION)
        nxt = at + (t + 1) // SUB * P
        e0 = tl.load(nxt)
        if P >= 2:
            e1 = tl.load(nxt + 1)
        if P == 4:
            e2 = tl.load(nxt + 2)
            e3 = tl.load(nxt + 3)
    if scale is not None:
        acc *= scale
    if HAS_BIAS and BIAS_M:
        acc += tl.load(bias_ptr + rm, mask=rm < M, other=0.0).to(tl.float32)[:, None]
    elif HAS_BIAS:
        acc += tl.load(bias_ptr + rn, mask=rn < N, other=0.0).to(tl.float32)[None, :]
    acc = _activate(acc, ACT)
    if Y_INNER:
        y_at = y_ptr + ((rm // inner).to(tl.int64) * N * inner + rm % inner)[:, None] + rn.to(tl.int64)[None, :] * inner
    else:
        y_at = y_ptr + rm.to(tl.int64)[:, None] * N + rn[None, :]
    tl.store(y_at, acc.to(y_ptr.dtype.element_ty), mask=(rm[:, None] < M) & (rn[None, :] < N))
