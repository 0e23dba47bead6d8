"""The k best of a weight's keys, exactly, ties to the lowest index: bit-equal to `kernels.select`. For one weight or a group (`kernels.triton.group`).

Up to 16,384 blocks one program holds all keys in registers and bisects the threshold (`select_kernel`), and before it that of scores, where blocks have any,
whose ties the keys decide. Above, a radix select over many programs: three
histograms of 11, 10 and 10 bits find the threshold (`histogram_kernel`), `write_mask_kernel` writes the mask.
The histograms add up by integer atomics, whose order cannot change a bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .group import BLOCK0, CHUNK0, COLS, FIELDS, KEEP, ROWS, SCORE

BINS = tl.constexpr(2048)  # of a histogram; every weight has three


@triton.jit
def _ordered(score):
    """int32 in the order of float32: NaN highest, both zeros equal; as `kernels.select.ordered`."""
    bits = score.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    bits = tl.where(size == 0, 0, bits ^ ((bits >> 31) & 0x7FFFFFFF))
    return tl.where(size > 0x7F800000, 0x7FFFFFFF, bits)


@triton.jit
def select_kernel(
    key_ptr,
    score_ptr,
    keep_ptr,
    mask_ptr,
    table_ptr,
    n,
    SCORED: tl.constexpr,
    CH: tl.constexpr,
    INDEX_BITS: tl.constexpr,
    KM: tl.constexpr,
    BH: tl.constexpr,
    BW: tl.constexpr,
    GROUPED: tl.constexpr,
):
    """mask[i] = whether block i is among the `keep` best, ties to the lowest index. Grid: (weights,). key [n] int32 >= 0, n <= CH.

    Bisection on the bits of the threshold key, then on the index among its ties. SCORED: before it on those of score [n] float32, and keys are of its ties.
    """
    if GROUPED:
        row = table_ptr + tl.program_id(0).to(tl.int64) * FIELDS
        keep_ptr += tl.load(row + KEEP)
        key_ptr += tl.load(row + BLOCK0)
        mask_ptr += tl.load(row + BLOCK0)
        n = tl.cdiv(tl.load(row + ROWS).to(tl.int32), BH) * tl.cdiv(tl.load(row + COLS).to(tl.int32) * KM, BW)
        if SCORED:
            score_ptr += tl.load(row + SCORE)
    i = tl.arange(0, CH)
    keep = tl.load(keep_ptr).to(tl.int32)
    wanted = i < n
    better = i < 0
    if SCORED:
        score = _ordered(tl.load(score_ptr + i, mask=i < n, other=0.0))
        least = tl.where(tl.sum(((i < n) & (score >= 0)).to(tl.int32)) >= keep, 0, -2147483648)  # the sign; the other bits count upwards from either
        for p in tl.range(0, 31):
            t = least | (1 << (30 - p))
            least = tl.where(tl.sum(((i < n) & (score >= t)).to(tl.int32)) >= keep, t, least)
        better = wanted & (score > least)
        wanted = wanted & (score == least)
        keep -= tl.sum(better.to(tl.int32))
    key = tl.load(key_ptr + i, mask=wanted, other=-1)
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
    kept = better | (key > threshold) | (tie & (i <= last))
    tl.store(mask_ptr + i, kept.to(tl.int8), mask=i < n)


@triton.jit
def _place(table_ptr, owner_ptr, n, KM: tl.constexpr, BH: tl.constexpr, BW: tl.constexpr, GROUPED: tl.constexpr):
    """Of a program: (weight, its number of keys, first key, chunk within the weight, distance of its `keep`)."""
    chunk = tl.program_id(0)
    weight = chunk * 0
    start = chunk.to(tl.int64) * 0
    keep = start
    if GROUPED:
        weight = tl.load(owner_ptr + chunk)
        row = table_ptr + weight.to(tl.int64) * FIELDS
        start = tl.load(row + BLOCK0)
        keep = tl.load(row + KEEP)
        chunk -= tl.load(row + CHUNK0).to(tl.int32)
        n = tl.cdiv(tl.load(row + ROWS).to(tl.int32), BH) * tl.cdiv(tl.load(row + COLS).to(tl.int32) * KM, BW)
    return weight, n, start, chunk, keep


@triton.jit
def _threshold(bins_ptr, keep, DIGITS: tl.constexpr):
    """(bits of the threshold key that the first DIGITS histograms decide, how many to keep among the keys that begin with them, how many those are)."""
    b = tl.arange(0, BINS)
    prefix = tl.full((), 0, tl.int32)
    total = tl.full((), 0, tl.int32)
    for d in tl.static_range(DIGITS):
        h = tl.load(bins_ptr + d * BINS + b)
        reach = tl.cumsum(h, 0, reverse=True)  # keys with this digit or a higher one
        digit = tl.sum((reach >= keep).to(tl.int32)) - 1
        keep -= tl.sum(tl.where(b > digit, h, 0))
        total = tl.sum(tl.where(b == digit, h, 0))
        prefix = (prefix << (11 if d == 0 else 10)) | digit
    return prefix, keep, total


@triton.jit
def histogram_kernel(
    key_ptr,
    keep_ptr,
    bins_ptr,
    table_ptr,
    owner_ptr,
    n,
    DIGIT: tl.constexpr,
    CH: tl.constexpr,
    KM: tl.constexpr,
    BH: tl.constexpr,
    BW: tl.constexpr,
    GROUPED: tl.constexpr,
):
    """Adds this chunk's histogram of digit DIGIT, over the keys whose higher digits are the threshold's. Grid: (chunks of CH keys,).

    bins [weights, 3, BINS] int32, zeros at the start; key [n] int32 >= 0.
    """
    weight, n, start, chunk, keep_at = _place(table_ptr, owner_ptr, n, KM, BH, BW, GROUPED)
    bins = bins_ptr + weight.to(tl.int64) * (3 * BINS)
    prefix, _, _ = _threshold(bins, tl.load(keep_ptr + keep_at).to(tl.int32), DIGIT)
    i = chunk * CH + tl.arange(0, CH)
    key = tl.load(key_ptr + start + i, mask=i < n, other=-1)
    counted = i < n
    if DIGIT > 0:
        counted = counted & ((key >> (30 - 10 * DIGIT)) == prefix)
    digit = (key >> (20 - 10 * DIGIT)) & (2047 if DIGIT == 0 else 1023)
    h = tl.histogram(digit, BINS, mask=counted)
    tl.atomic_add(bins + DIGIT * BINS + tl.arange(0, BINS), h, sem="relaxed")


@triton.jit
def write_mask_kernel(
    key_ptr,
    keep_ptr,
    bins_ptr,
    mask_ptr,
    table_ptr,
    owner_ptr,
    n,
    CH: tl.constexpr,
    KM: tl.constexpr,
    BH: tl.constexpr,
    BW: tl.constexpr,
    GROUPED: tl.constexpr,
):
    """mask[i] = whether block i is among the `keep` best. Grid: (chunks,). mask [n] bool.

    Where only some of the keys that equal the threshold are kept, a program reads the keys before its own too, and counts.
    """
    weight, n, start, chunk, keep_at = _place(table_ptr, owner_ptr, n, KM, BH, BW, GROUPED)
    threshold, left, ties = _threshold(bins_ptr + weight.to(tl.int64) * (3 * BINS), tl.load(keep_ptr + keep_at).to(tl.int32), 3)
    before = tl.zeros((CH,), tl.int32)
    for first in range(0, tl.where(left < ties, chunk * CH, 0), CH):
        before += (tl.load(key_ptr + start + first + tl.arange(0, CH)) == threshold).to(tl.int32)
    i = chunk * CH + tl.arange(0, CH)
    key = tl.load(key_ptr + start + i, mask=i < n, other=-1)
    tie = (key == threshold).to(tl.int32)
    kept = (key > threshold) | ((tie != 0) & (tl.sum(before) + tl.cumsum(tie, 0) <= left))
    tl.store(mask_ptr + start + i, kept.to(tl.int8), mask=i < n)
