"""Masks and lists on the device: exact block keys, the k best, strip lists. Bit-equal to `kernels.score`, `kernels.select` and `kernels.lists`.

Compiled without fused multiply-add: the product u * u is rounded before anything is added to it, as in the plain form.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _power_of_two(e):
    """2 ** e in float32, for e in the normal range."""
    return ((e + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _leading_bit(v):
    """Position of the leading one of a positive int64; 0 for 0."""
    p = tl.zeros_like(v).to(tl.int32)
    for i in tl.static_range(6):
        high = (v >> (32 >> i)) != 0
        p = tl.where(high, p + (32 >> i), p)
        v = tl.where(high, v >> (32 >> i), v)
    return p


@triton.jit
def block_keys_kernel(
    w_ptr,
    key_ptr,
    N,
    K,
    KB,
    stride_w,
    SHIFT: tl.constexpr,
    MANTISSA: tl.constexpr,
    OFFSET: tl.constexpr,
    KEY_NAN: tl.constexpr,
    KEY_INF: tl.constexpr,
    BH: tl.constexpr,
    BW: tl.constexpr,
    TN: tl.constexpr,
    TK: tl.constexpr,
):
    """Keys of `fro` for blocks whose sides are powers of two. Grid: (cdiv(N, TN), cdiv(K, TK)); TN, TK are multiples of BH, BW.

    w [N, K] any float up to 32 bits; key [NB, KB] int32. SHIFT, MANTISSA, OFFSET and the two keys are those of kernels.score.
    """
    r = tl.program_id(0) * TN + tl.arange(0, TN)
    c = tl.program_id(1) * TK + tl.arange(0, TK)
    w = tl.load(w_ptr + r.to(tl.int64)[:, None] * stride_w + c[None, :], mask=(r[:, None] < N) & (c[None, :] < K), other=0.0).to(tl.float32)
    bits = w.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    b = tl.reshape(bits, [TN // BH, BH, TK // BW, BW])
    top = tl.max(tl.max(b, axis=3), axis=1)  # the largest magnitude of each block, as bits
    bad = tl.where(top > 0x7F800000, KEY_NAN, KEY_INF)
    finite = top < 0x7F800000
    top = tl.where(finite, top, 0)
    # frexp: the exponent e with magnitude = m * 2^e, m in [0.5, 1); a denormal's bits are an integer times 2^-149
    sub = (top.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127 - 148
    e = tl.where(top == 0, 0, tl.where(top < 0x00800000, sub, (top >> 23) - 126))
    half = (-e) >> 1
    rest = -e - half
    ok = tl.reshape(tl.broadcast_to(finite[:, None, :, None], [TN // BH, BH, TK // BW, BW]), [TN, TK])
    half = tl.reshape(tl.broadcast_to(half[:, None, :, None], [TN // BH, BH, TK // BW, BW]), [TN, TK])
    rest = tl.reshape(tl.broadcast_to(rest[:, None, :, None], [TN // BH, BH, TK // BW, BW]), [TN, TK])
    u = tl.where(ok, w, 0.0) * _power_of_two(half) * _power_of_two(rest)
    q = u * u
    term = (q * (1 << SHIFT)).to(tl.int64)
    s = tl.sum(tl.sum(tl.reshape(term, [TN // BH, BH, TK // BW, BW]), axis=3), axis=1)
    lead = _leading_bit(s)
    below = tl.maximum(lead - MANTISSA, 0)
    above = tl.maximum(MANTISSA - lead, 0)
    mantissa = ((s >> below) << above) & ((1 << MANTISSA) - 1)
    key = ((lead + 44 - SHIFT + 2 * e + OFFSET) << MANTISSA) | mantissa.to(tl.int32)
    key = tl.where(s == 0, 0, key)
    key = tl.where(finite, key, bad)
    rb = tl.program_id(0) * (TN // BH) + tl.arange(0, TN // BH)
    cb = tl.program_id(1) * (TK // BW) + tl.arange(0, TK // BW)
    tl.store(key_ptr + rb[:, None] * KB + cb[None, :], key, mask=(rb[:, None] * BH < N) & (cb[None, :] * BW < K))


@triton.jit
def select_kernel(key_ptr, keep_ptr, mask_ptr, n, CH: tl.constexpr, INDEX_BITS: tl.constexpr):
    """mask[i] = whether block i is among the `keep` best, ties to the lowest index. One program; key [n] int32 >= 0, n <= CH, all keys in registers.

    Bisection on the bits of the threshold key, then on the index among its ties.
    """
    i = tl.arange(0, CH)
    key = tl.load(key_ptr + i, mask=i < n, other=-1)
    keep = tl.load(keep_ptr).to(tl.int32)
    threshold = tl.full((), 0, tl.int32)
    for p in tl.range(0, 31):
        t = threshold | (1 << (30 - p))
        threshold = tl.where(tl.sum((key >= t).to(tl.int32)) >= keep, t, threshold)
    left = keep - tl.sum((key > threshold).to(tl.int32))  # ties to keep
    tie = key == threshold
    last = tl.full((), 0, tl.int32)  # index of the last tie that is kept
    for p in tl.range(0, INDEX_BITS):
        j = last | (1 << (INDEX_BITS - 1 - p))
        last = tl.where(tl.sum((tie & (i < j)).to(tl.int32)) < left, j, last)
    kept = (key > threshold) | (tie & (i <= last))
    tl.store(mask_ptr + i, kept.to(tl.int8), mask=i < n)


@triton.jit
def strip_lists_kernel(
    mask_ptr,
    entries_ptr,
    counts_ptr,
    rows,
    units,
    stride_row,
    stride_col,
    capacity,
    STRIP: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
    G: tl.constexpr,
    CH: tl.constexpr,
):
    """Lists of one direction, see kernels.lists. Grid: (strips,). mask bool, block (i, j) at i * stride_row + j * stride_col.

    CH >= capacity, a power of two.
    """
    strip = tl.program_id(0)
    j = tl.arange(0, CH)
    bits = tl.zeros((CH,), tl.int32)
    for g in tl.static_range(G):
        row = strip * STRIP // ROW_BLOCK + g
        kept = tl.load(mask_ptr + row * stride_row + (j // WIDE) * stride_col, mask=(j < units) & (row < rows), other=0)
        bits = bits | ((kept != 0).to(tl.int32) << g)
    kept = bits != 0
    one = kept.to(tl.int32)
    place = tl.cumsum(one, 0) - one
    count = tl.sum(one)
    at = entries_ptr + strip.to(tl.int64) * capacity
    tl.store(at + place, bits << 16 | j, mask=kept)
    tl.store(at + j, tl.zeros((CH,), tl.int32), mask=(j >= count) & (j < capacity))
    tl.store(counts_ptr + strip, count)


@triton.jit
def order_kernel(counts_ptr, order_ptr, strips, CH: tl.constexpr, STEP: tl.constexpr):
    """Strips by falling count, ties to the lower index. One program a chunk of CH strips; each ranks its strips against all."""
    i = tl.program_id(0) * CH + tl.arange(0, CH)
    mine = tl.load(counts_ptr + i, mask=i < strips, other=-1)
    rank = tl.zeros((CH,), tl.int32)
    for start in range(0, strips, STEP):
        j = start + tl.arange(0, STEP)
        other = tl.load(counts_ptr + j, mask=j < strips, other=-1)
        before = (other[None, :] > mine[:, None]) | ((other[None, :] == mine[:, None]) & (j[None, :] < i[:, None]))
        rank += tl.sum((before & (j[None, :] < strips)).to(tl.int32), axis=1)
    tl.store(order_ptr + rank, i, mask=i < strips)
