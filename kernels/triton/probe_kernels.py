"""Kernels that ask a device for its limits, one at a time: loads from L2 or from memory, and tensor-core instructions.

For `fxmask.bench` alone, which imports them when a probe is asked for: no op uses them.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor as TensorDescriptor


@triton.jit
def load_boxes_kernel(
    x, sums_ptr, limit, steps, tiles, ROWS: tl.constexpr, WIDTH: tl.constexpr, COLS: tl.constexpr, UNIT: tl.constexpr, STAGES: tl.constexpr
):
    """Loads only: a step takes a tile of ROWS x WIDTH as WIDTH / UNIT boxes [ROWS, UNIT] by TMA, COLS * UNIT features apart.

    Grid:     (programs,); step i of program p takes tile p + i * programs, around the end
    Tensors:  x a host descriptor of [tiles / COLS * ROWS, COLS * WIDTH] with boxes [ROWS, UNIT]; sums [programs] fp32
    All that was loaded is added up, and the sum is stored where it exceeds `limit`: infinity when time is taken, minus infinity when the sum is checked.
    """
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    acc = tl.zeros((ROWS, UNIT), tl.float32)
    for i in tl.range(0, steps, num_stages=STAGES):
        tile = (pid + i * programs) % tiles
        row = tile // COLS * ROWS
        col = tile % COLS * UNIT
        for b in tl.static_range(WIDTH // UNIT):
            acc += x.load([row, col + b * (COLS * UNIT)]).to(tl.float32)
    total = tl.sum(acc)
    if total > limit:
        tl.store(sums_ptr + pid, total)


@triton.jit
def load_rows_kernel(
    x_ptr, sums_ptr, limit, steps, tiles, ROWS: tl.constexpr, WIDTH: tl.constexpr, COLS: tl.constexpr, UNIT: tl.constexpr, STAGES: tl.constexpr
):
    """The same tiles by pointers: ROWS rows of WIDTH / UNIT pieces of UNIT features, as the list matmul gathers them. x [tiles / COLS * ROWS, COLS * WIDTH]."""
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    kk = tl.arange(0, WIDTH)
    cols = kk // UNIT * (COLS * UNIT) + kk % UNIT
    cols = tl.max_contiguous(tl.multiple_of(cols, UNIT), UNIT)
    at = tl.arange(0, ROWS)[:, None] * (COLS * WIDTH) + cols[None, :]
    acc = tl.zeros((ROWS, WIDTH), tl.float32)
    for i in tl.range(0, steps, num_stages=STAGES):
        tile = (pid + i * programs) % tiles
        first = (tile // COLS).to(tl.int64) * (ROWS * COLS * WIDTH) + tile % COLS * UNIT
        acc += tl.load(x_ptr + first + at).to(tl.float32)
    total = tl.sum(acc)
    if total > limit:
        tl.store(sums_ptr + pid, total)


@triton.jit
def multiply_kernel(a_ptr, b_ptr, out_ptr, steps, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """out[p] = steps * a b^T: one pair of tiles, loaded once, is multiplied again and again from shared memory.

    Grid: (programs,). a [BM, BK], b [BN, BK], out [programs, BM, BN] fp32, all contiguous. Accumulates in fp32.
    """
    m = tl.arange(0, BM)
    n = tl.arange(0, BN)
    k = tl.arange(0, BK)
    a = tl.load(a_ptr + m[:, None] * BK + k[None, :])
    b = tl.load(b_ptr + n[None, :] * BK + k[:, None])
    acc = tl.zeros((BM, BN), tl.float32)
    for _ in range(steps):
        acc = tl.dot(a, b, acc)
    tl.store(out_ptr + tl.program_id(0).to(tl.int64) * (BM * BN) + m[:, None] * BN + n[None, :], acc)
