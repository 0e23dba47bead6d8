"""What the CPU implementation may do for one op, and what each choice would cost: closed forms that rank the candidates, before any of them is timed.

Times are seconds of one core of the machine that the constants were fitted on (Ice Lake at 2.8 GHz, MKL, float32; the cases of
`fxmask bench --device cpu --dispatch 200`, on which the median estimate is 20 % off); elsewhere the ranking is a guess, and `kernels.tune` times what may win.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..layer_cost import useful_flop

DENSE = 130e9  # FLOP a second of a large matmul
MASK = 0.3e-9  # seconds a weight element of W∘M: a seventh of what torch.where took there, as on an EPYC, where both were timed
FIXED = 0.66e-3  # seconds of an op before it multiplies
STRIP = 25e-6  # seconds to make a strip's list and weights
CALL = 3.2e-6  # seconds of a PyTorch call
PIECE = 0.67e-9  # seconds to copy one piece of a gather
BYTE = 0.093e-9  # and for each byte of it
MOVE = 2.0e-9  # seconds a float32 of a transposing copy
TOUCH = 0.29e-9  # seconds a float32 that is read or written the first time
AGAIN = 0.33e-9  # seconds a float32 of the output that a further run adds to
ROWS, RUNS, COLUMNS, OUTER = 0.64, 0.71, 0.68, 0.54  # share of their best that matmuls reach: over rows, runs, columns, and those of dW


class Plan(NamedTuple):
    """How an op runs: `masked_dense` (PyTorch, over the masked weight), or in strips, by `rows` or `runs`, and backward
    by `rows` or `columns`.

    Strips take `chunk` tokens at a time; `group` neighbours count as one strip.
    """

    layout: str
    chunk: int = 0
    group: int = 1

    def __str__(self) -> str:
        return f"{self.layout}-{self.chunk}" + (f"x{self.group}" if self.group > 1 else "") if self.chunk else self.layout


class Case(NamedTuple):
    """What the time of an op depends on. A block row keeps `density` of its blocks."""

    op: str  # forward, dx, dw, or backward for dX and dW together
    tokens: int
    shape: tuple[int, int]  # (N, K)
    block: tuple[int, int]
    density: float
    dtype: torch.dtype
    together: int = 1  # tokens of one sample


MASKED_DENSE = Plan("masked_dense")
ROWS_512, ROWS_512X3, RUNS_2048, COLUMNS_512 = Plan("rows", 512), Plan("rows", 512, 3), Plan("runs", 2048), Plan("columns", 512)
BY_NAME = {str(p): p for p in (MASKED_DENSE, ROWS_512, ROWS_512X3, RUNS_2048, COLUMNS_512)}
NARROW = 32  # features of a strip: below it neighbours are multiplied together


def plans(case: Case) -> tuple[Plan, Plan]:
    """The two plans in strips that an op can have.

    More of them gain little: of 14 and 6 that were measured over 200 cases, the faster of these two is 2 % behind the fastest of all on average.
    """
    if case.op in ("dw", "backward"):
        return ROWS_512, COLUMNS_512
    width = case.block[0] if case.op == "forward" else case.block[1]
    return ROWS_512, ROWS_512X3 if width < NARROW else RUNS_2048


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that strips are multiplied and summed in: 16-bit operands in float32, where their products are exact, and rounded once."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def _native(dtype: torch.dtype) -> bool:
    """Whether the processor multiplies a 16-bit dtype by instructions of its own, as masked-dense does then."""
    return dtype == torch.bfloat16 and (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def _flops(width: int) -> float:
    """FLOP a second of a tall matmul into `width` features: MKL takes 48 at a time, and what is left at half the speed or less."""
    whole, left = divmod(width, 48)
    return width / (whole * 48 / 162e9 + (left / (min(left, 38) * 4.2e9) if left else 0))


def seconds(plan: Plan, case: Case) -> float:
    """Estimated time of an op by a plan, on one core."""
    (n, k), m = case.shape, case.tokens
    casts = MOVE * m * (n + k) if case.dtype in (torch.bfloat16, torch.float16) else 0.0
    if plan == MASKED_DENSE:
        slow = 1.0 if not casts else 0.3 if _native(case.dtype) else 4.5
        return (2 if case.op == "backward" else 1) * (slow * 2 * m * n * k / DENSE + MASK * n * k)
    across, along, width, unit = (n, k, *case.block) if case.op == "forward" else (k, n, *case.block[::-1])
    strips, chunks = -(-across // (width * plan.group)), -(-m // plan.chunk)
    kept = 1 - (1 - case.density) ** plan.group
    width, unit = min(width * plan.group, across), min(unit, along)
    flop, moved = useful_flop(m, n * k * kept), m * strips * along * kept  # elements gathered
    time = FIXED + strips * STRIP + TOUCH * m * (along + across) + casts
    if plan.layout == "runs":
        runs = strips * max(1.0, along / unit * kept * (1 - kept))
        return time + flop / (RUNS * _flops(width)) + AGAIN * m * (runs - strips) * width + runs * (chunks * CALL + STRIP)
    pieces, products = moved / unit, case.op != "dw"
    gather = pieces * PIECE + 4 * moved * BYTE
    if plan.layout == "rows":
        time += gather + chunks * strips * CALL * 2
        time += flop / (ROWS * _flops(width)) if products else 0
    elif products:
        time += MOVE * m * (along + across) + 4 * moved * BYTE + chunks * strips * CALL * 2 + flop / (COLUMNS * 155e9)
    if case.op in ("dw", "backward"):
        time += flop / (OUTER * (150e9 if width >= 32 else 110e9)) + chunks * strips * CALL
        time += gather + (0 if products else MOVE * m * along) + chunks * strips * CALL if plan.layout == "columns" else 0
    return time
