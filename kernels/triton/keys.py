"""Exact block keys on the device, bit-equal to `kernels.score`, for one weight or for a group of them (`kernels.triton.group`).

Compiled without fused multiply-add: the product u * u is rounded before anything is added to it, as in the plain form.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .group import BLOCK0, COLS, FIELDS, ROWS, STRIDE, TILE0, WEIGHT


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
    table_ptr,
    owner_ptr,
    N,
    K,
    stride_w,
    AT: tl.constexpr,
    KM: tl.constexpr,
    WM: tl.constexpr,
    SHIFT: tl.constexpr,
    MANTISSA: tl.constexpr,
    OFFSET: tl.constexpr,
    KEY_NAN: tl.constexpr,
    KEY_INF: tl.constexpr,
    BH: tl.constexpr,
    BW: tl.constexpr,
    TN: tl.constexpr,
    TK: tl.constexpr,
    GROUPED: tl.constexpr,
):
    """Keys of `fro` for blocks whose sides are powers of two. Grid: (tiles of TN x TK of every weight,); TN, TK are multiples of BH, BW.

    w [N, K] any float up to 32 bits; key [NB, KB] int32. SHIFT, MANTISSA, OFFSET and the two keys are those of kernels.score.
    K and the row stride come in units of KM and WM, and a group's weights lie in units of AT elements behind the first: their divisibility is known so.
    """
    tile = tl.program_id(0)
    if GROUPED:
        row = table_ptr + tl.load(owner_ptr + tile).to(tl.int64) * FIELDS
        w_ptr += tl.load(row + WEIGHT) * AT
        key_ptr += tl.load(row + BLOCK0)
        N = tl.load(row + ROWS).to(tl.int32)
        K = tl.load(row + COLS).to(tl.int32)
        stride_w = tl.load(row + STRIDE)
        tile -= tl.load(row + TILE0).to(tl.int32)
    K = K * KM
    KB = (K + BW - 1) // BW
    wide = (K + TK - 1) // TK
    tile_n = tile // wide
    tile_k = tile % wide
    r = tile_n * TN + tl.arange(0, TN)
    c = tile_k * TK + tl.arange(0, TK)
    at = r.to(tl.int64)[:, None] * stride_w * WM + c[None, :]
    w = tl.load(w_ptr + at, mask=(r[:, None] < N) & (c[None, :] < K), other=0.0).to(tl.float32)
    bits = w.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    b = tl.reshape(bits, [TN // BH, BH, TK // BW, BW])
    top = tl.max(tl.max(b, axis=3), axis=1)  # the largest magnitude of each block, as bits
    bad = tl.where(top > 0x7F800000, KEY_NAN, KEY_INF)
    finite = top < 0x7F800000
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
    mantissa = (s >> below) & ((1 << MANTISSA) - 1)  # the largest term alone has more bits
    key = ((lead + 44 - SHIFT + 2 * e + OFFSET) << MANTISSA) | mantissa.to(tl.int32)
    key = tl.where(s == 0, 0, key)
    key = tl.where(finite, key, bad)
    rb = tile_n * (TN // BH) + tl.arange(0, TN // BH)
    cb = tile_k * (TK // BW) + tl.arange(0, TK // BW)
    tl.store(key_ptr + rb[:, None] * KB + cb[None, :], key, mask=(rb[:, None] * BH < N) & (cb[None, :] * BW < K))
