"""Strip lists on the device, both directions at once: bit-equal to `kernels.lists.packed`. For one weight or a group (`kernels.triton.group`)."""

from __future__ import annotations

import triton
import triton.language as tl

from .group import BLOCK0, COLS, FIELDS, LIST0, ROWS, STRIP0


@triton.jit
def _up(n, TO: tl.constexpr):
    return (n + TO - 1) // TO * TO


@triton.jit
def _direction(rows, cols, ROW_BLOCK: tl.constexpr, COL_BLOCK: tl.constexpr, STRIP: tl.constexpr, STEP: tl.constexpr):
    """(units, strips, capacity) of `kernels.lists.Layout`, and where the counts, the order and the end lie behind the entries."""
    UNIT: tl.constexpr = COL_BLOCK if COL_BLOCK < STEP else STEP  # noqa: FURB136  (min is no constant in a kernel)
    units = cols * (COL_BLOCK // UNIT)
    strips = tl.cdiv(rows * ROW_BLOCK, STRIP)
    capacity = _up(units, STEP // UNIT) + STEP // UNIT
    counts = _up(strips * capacity, 4)
    order = counts + _up(strips, 4)
    return units, strips, capacity, counts, order, order + _up(strips, 4)


@triton.jit
def _place(
    table_ptr, owner_ptr, N, K, KM: tl.constexpr, BH: tl.constexpr, BW: tl.constexpr, STRIP_F: tl.constexpr, STRIP_T: tl.constexpr, STEP: tl.constexpr,
    GROUPED: tl.constexpr,
):  # fmt: skip
    """Of a program: its mask's first block and lists' first place, NB and KB, whether it is of the transposed lists, its strip, and its direction's sizes."""
    pid = tl.program_id(0)
    mask_at = pid.to(tl.int64) * 0
    lists_at = mask_at
    if GROUPED:
        row = table_ptr + tl.load(owner_ptr + pid).to(tl.int64) * FIELDS
        mask_at = tl.load(row + BLOCK0)
        lists_at = tl.load(row + LIST0)
        N = tl.load(row + ROWS).to(tl.int32)
        K = tl.load(row + COLS).to(tl.int32)
        pid -= tl.load(row + STRIP0).to(tl.int32)
    nb = tl.cdiv(N, BH)
    kb = tl.cdiv(K * KM, BW)
    units_f, strips_f, capacity_f, counts_f, order_f, end_f = _direction(nb, kb, BH, BW, STRIP_F, STEP)
    units_t, strips_t, capacity_t, counts_t, order_t, _ = _direction(kb, nb, BW, BH, STRIP_T, STEP)
    turned = pid >= strips_f
    return (
        mask_at, lists_at + tl.where(turned, end_f, 0), nb, kb, turned, tl.where(turned, pid - strips_f, pid), tl.where(turned, units_t, units_f),
        tl.where(turned, strips_t, strips_f), tl.where(turned, capacity_t, capacity_f), tl.where(turned, counts_t, counts_f),
        tl.where(turned, order_t, order_f),
    )  # fmt: skip


@triton.jit
def strip_lists_kernel(
    mask_ptr,
    lists_ptr,
    table_ptr,
    owner_ptr,
    N,
    K,
    KM: tl.constexpr,
    BH: tl.constexpr,
    BW: tl.constexpr,
    STRIP_F: tl.constexpr,
    STRIP_T: tl.constexpr,
    STEP: tl.constexpr,
    CH: tl.constexpr,
    GROUPED: tl.constexpr,
):
    """Entries and counts. mask bool [NB, KB] of a weight [N, K * KM]; lists packed int32.

    Grid: (strips of STRIP_F features of the forward, then of STRIP_T features of the transposed lists,).

    Two passes in chunks of CH units: what is kept, one place after the other, then the zero tail. One chunk as long as the list would spill.
    """
    mask_at, lists_at, nb, kb, turned, strip, units, _, capacity, counts, _ = _place(table_ptr, owner_ptr, N, K, KM, BH, BW, STRIP_F, STRIP_T, STEP, GROUPED)
    wide = tl.where(turned, (BH + STEP - 1) // STEP, (BW + STEP - 1) // STEP)  # units of a block
    rows = tl.where(turned, kb, nb)
    stride_row = tl.where(turned, 1, kb)
    stride_unit = tl.where(turned, kb, 1)
    first = tl.where(turned, strip * STRIP_T // BW, strip * STRIP_F // BH)
    group = tl.where(turned, STRIP_T // BW, STRIP_F // BH)  # blocks of a strip; 0 where a block is wider, and then it has one
    GROUP: tl.constexpr = STRIP_F // BH if STRIP_F // BH > STRIP_T // BW else STRIP_T // BW  # noqa: FURB136
    entries = lists_ptr + lists_at + strip.to(tl.int64) * capacity
    count = tl.full((), 0, tl.int32)
    for start in range(0, units, CH):
        j = start + tl.arange(0, CH)
        at = (j // wide).to(tl.int64) * stride_unit
        bits = tl.zeros((CH,), tl.int32)
        for g in tl.static_range(GROUP if GROUP > 1 else 1):  # noqa: FURB136
            there = (j < units) & (first + g < rows) & ((g == 0) | (g < group))
            kept = tl.load(mask_ptr + mask_at + (first + g).to(tl.int64) * stride_row + at, mask=there, other=0)
            bits = bits | ((kept != 0).to(tl.int32) << g)
        one = (bits != 0).to(tl.int32)
        tl.store(entries + count + tl.cumsum(one, 0) - one, bits << 16 | j, mask=bits != 0)
        count += tl.sum(one)
    for start in range(0, capacity, CH):
        j = start + tl.arange(0, CH)
        tl.store(entries + j, tl.zeros((CH,), tl.int32), mask=(j >= count) & (j < capacity))
    tl.store(lists_ptr + lists_at + counts + strip, count)


@triton.jit
def order_kernel(
    lists_ptr,
    table_ptr,
    owner_ptr,
    N,
    K,
    KM: tl.constexpr,
    BH: tl.constexpr,
    BW: tl.constexpr,
    STRIP_F: tl.constexpr,
    STRIP_T: tl.constexpr,
    STEP: tl.constexpr,
    CH: tl.constexpr,
    GROUPED: tl.constexpr,
):
    """The order: strips by falling count, ties to the lower index. Grid as of `strip_lists_kernel`; each program finds the rank of its strip."""
    _, lists_at, _, _, _, strip, _, strips, _, counts, order = _place(table_ptr, owner_ptr, N, K, KM, BH, BW, STRIP_F, STRIP_T, STEP, GROUPED)
    counts_ptr = lists_ptr + lists_at + counts
    mine = tl.load(counts_ptr + strip)
    before = tl.zeros((CH,), tl.int32)
    for start in range(0, strips, CH):
        j = start + tl.arange(0, CH)
        other = tl.load(counts_ptr + j, mask=j < strips, other=-1)
        before += ((other > mine) | ((other == mine) & (j < strip))).to(tl.int32)
    tl.store(lists_ptr + lists_at + order + tl.sum(before), strip)
