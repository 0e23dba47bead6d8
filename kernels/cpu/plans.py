"""What the CPU implementation may do for one op, and what each choice would cost: closed forms that rank the candidates, before any of them is timed.

Times are seconds of one core of the machine that the constants were fitted on (Ice Lake, 2.8 GHz, MKL, float32); elsewhere the ranking is a guess, and
`kernels.tune` times the first few.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

DENSE = 150e9  # FLOP a second of a large matmul
PIECE = 4.5e-9  # seconds to copy one piece of a gather
BYTE = 0.045e-9  # and for each byte of it
MOVE = 0.32e-9  # seconds a float32 of a transposing copy
MASK = 1.5e-9  # seconds a weight element of W∘M
CALL = 3.5e-6  # seconds of a PyTorch call
STRIP = 12e-6  # seconds to make a strip's list and weights


class Plan(NamedTuple):
    """How an op runs: `masked_dense` (PyTorch, over the masked weight), or strips by `rows`, `runs` or `columns`, `chunk` tokens at a time; `group` neighbours are one."""

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


MASKED_DENSE = Plan("masked_dense")
ROWS = tuple(Plan("rows", c, g) for c in (256, 512) for g in (1, 2, 3))
PRODUCTS = (*ROWS, Plan("runs", 512), Plan("runs", 1024), Plan("columns", 256), Plan("columns", 512))
BACKWARDS = (*(Plan("rows", c) for c in (128, 256, 512)), Plan("columns", 256), Plan("columns", 512))

BY_NAME = {str(p): p for p in (MASKED_DENSE, *PRODUCTS, *BACKWARDS)}


def plans(op: str) -> tuple[Plan, ...]:
    """The plans in strips for an op."""
    return PRODUCTS if op in ("forward", "dx") else BACKWARDS


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that strips are multiplied in: float32 where the processor has no instructions for a 16-bit one (products are exact there, too)."""
    if dtype == torch.bfloat16 and not (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()):
        return torch.float32
    return torch.float32 if dtype == torch.float16 else dtype


def _flops(width: int) -> float:
    """FLOP a second of a tall matmul into `width` features: MKL takes 48 at a time, and what is left at half the speed or less."""
    whole, left = divmod(width, 48)
    rate = 4.2e9 * left if left <= 32 else 160e9
    return width / (whole * 48 / 162e9 + (left / rate if left else 0))


def seconds(plan: Plan, case: Case) -> float:
    """Estimated time of an op by a plan, on one core."""
    (n, k), m = case.shape, case.tokens
    half = case.dtype in (torch.bfloat16, torch.float16)
    products = 2 if case.op == "backward" else 1
    if plan == MASKED_DENSE:
        rate = DENSE / 4.5 if half and compute_dtype(case.dtype) != case.dtype else DENSE
        return products * (2 * m * n * k / rate + MASK * n * k)
    across, along, width, unit = (n, k, *case.block) if case.op == "forward" else (k, n, *case.block[::-1])
    strips = -(-across // (width * plan.group))
    kept = 1 - (1 - case.density) ** plan.group
    width, chunks = min(width * plan.group, across), -(-m // plan.chunk)
    flop, gathered = 2 * m * n * k * kept, m * strips * along * kept  # elements
    if plan.layout == "runs":
        calls = strips * max(1.0, -(-along // unit) * kept * (1 - kept))
        return flop / (0.88 * _flops(width)) + m * calls * width * 0.25e-9 + calls * (chunks * CALL + STRIP) + (MOVE / 2 * m * (across + along) if half else 0)
    piece = min(unit, along) if plan.layout == "rows" else min(plan.chunk, m) * min(unit, along)
    gather = gathered / piece * PIECE + 4 * gathered * BYTE * (1 if plan.layout == "rows" else 0.8)
    time = gather + strips * STRIP + chunks * strips * CALL * 2
    if plan.layout == "rows":
        time += flop / _flops(width) if case.op != "dw" else 0
        time += flop / (125e9 if width >= 32 else 90e9) + chunks * strips * CALL if case.op in ("dw", "backward") else 0
    else:
        time += MOVE * m * (along + (across if case.op != "dw" else 0))
        time += flop / 135e9 if case.op != "dw" else 0
        time += 2 * gather + flop / 110e9 + chunks * strips * CALL * 2 if case.op in ("dw", "backward") else 0
    return time + (MOVE / 2 * m * (across + along) if half else 0)
