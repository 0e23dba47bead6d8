"""Stages `bandwidth` and `tensorcore`: what a device gives to a kernel that does one thing only. They are the bounds that a missed goal is printed beside.

bandwidth: bytes a second that programs load into shared memory, from a set that stays in L2 and from one that does not fit there; in pieces of rows as wide as
blocks of 64, 32 and 16, by TMA and by pointers (cp.async). tensorcore: FLOP a second of instructions 16 to 128 wide, operands in shared memory (before
sm_90: of products that wide, operands in registers).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .part import Part, Prepared
from .provenance import source_hash

TILE_ROWS, TILE_WIDTH = 128, 64  # what a step loads: tokens and features of a step of the list matmul
FEATURES = 1024
L2_ROWS, HBM_ROWS = 10_240, 655_360  # 20 MB, which both halves of an H200's L2 can hold, and 1.3 GB, in 16 bits
L2_PASSES = 64
MMA_M, MMA_K, MMA_STEPS = 64, 128, 2048
TINY = torch.float16  # the interpreter multiplies bfloat16 wrongly


class Load(NamedTuple):
    """`by`: tma or pointer; a tile of 128 rows comes in pieces of `row_bytes`; `stages` of Triton's pipeline, one more than it has buffers."""

    level: str
    by: str
    row_bytes: int
    stages: int
    programs_per_sm: int


class Multiply(NamedTuple):
    """One m64 x n x k16 instruction after the other, by `programs_per_sm` programs of 4 warps."""

    n: int
    programs_per_sm: int


@dataclass(frozen=True)
class Launch:
    """A launch that is not made yet."""

    kernel: Any
    programs: int
    args: tuple[Any, ...]
    constants: dict[str, Any]

    def __call__(self) -> None:
        from ..kernels.triton import device

        self.kernel[(self.programs,)](*self.args, **device.OPTIONS, **self.constants)


@cache
def probe_hash() -> str:
    """Hash of what the probes time: their kernels, and how they are launched."""
    h = hashlib.sha256()
    triton_folder = Path(str(import_module("..kernels.triton", __package__).__file__)).parent
    for path in (triton_folder / "probe_kernels.py", Path(__file__)):
        h.update(path.read_bytes())
    return h.hexdigest()[: len(source_hash())]


def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


# ---- loads -----------------------------------------------------------------------------------------------------------------------------------------------


def load_cells(device: torch.device, quick: bool) -> list[Load]:
    """L2 before memory, wide rows before narrow ones; TMA where the device has it."""
    ways = ("tma", "pointer") if device.type != "cuda" or torch.cuda.get_device_capability(device) >= (9, 0) else ("pointer",)
    counts = (4,) if quick or device.type != "cuda" else (4, 2, 1)
    return [Load(level, by, row, 4, c) for level in ("L2", "HBM") for c in counts for row in (128, 64, 32) for by in ways]


def load_launch(cell: Load, x: Tensor, sums: Tensor, limit: float, passes: int) -> Launch:
    """The launch over `x` [rows, FEATURES], its tiles loaded `passes` times in all; a few of the first once more, so that every program has as many."""
    from ..kernels.triton import probe_kernels as k

    unit, tiles, programs = cell.row_bytes // x.element_size(), x.numel() // (TILE_ROWS * TILE_WIDTH), sums.numel()
    constants = {"ROWS": TILE_ROWS, "WIDTH": TILE_WIDTH, "COLS": x.shape[1] // TILE_WIDTH, "UNIT": unit, "STAGES": cell.stages, "num_warps": 4}
    args = (sums, limit, -(-passes * tiles // programs), tiles)
    if cell.by == "tma":
        return Launch(k.load_boxes_kernel, programs, (k.TensorDescriptor.from_tensor(x, [TILE_ROWS, unit]), *args), constants)
    return Launch(k.load_rows_kernel, programs, (x, *args), constants)


def expected_sums(x: Tensor, unit: int, programs: int, steps: int) -> Tensor:
    """What each program adds up. Exact: the values are small integers."""
    cols = x.shape[1] // TILE_WIDTH
    tiles = x.view(-1, TILE_ROWS, TILE_WIDTH // unit, cols, unit).sum((1, 2, 4), dtype=torch.float32).flatten()
    first = torch.arange(programs, device=x.device)
    return sum((tiles[(first + i * programs) % tiles.numel()] for i in range(steps)), torch.zeros(programs, device=x.device))


@cache
def _small_integers(rows: int, features: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    g = torch.Generator(device=device).manual_seed(0)
    return torch.randint(-8, 9, (rows, features), generator=g, dtype=torch.int8, device=device).to(dtype)


def prepare_load(cell: Load, device: torch.device) -> Prepared:
    if device.type == "cuda":
        rows, features, dtype, passes = (L2_ROWS if cell.level == "L2" else HBM_ROWS), FEATURES, torch.bfloat16, L2_PASSES if cell.level == "L2" else 1
    else:
        rows, features, dtype, passes = 3 * TILE_ROWS, 2 * TILE_WIDTH, TINY, 2
    x = _small_integers(rows, features, dtype, device)
    sums = torch.full((cell.programs_per_sm * _multiprocessors(device),), float("nan"), device=device)
    timed = load_launch(cell, x, sums, float("inf"), passes)
    steps = timed.args[3]

    def check() -> tuple[float, str]:
        load_launch(cell, x, sums, float("-inf"), passes)()
        wrong = (sums - expected_sums(x, cell.row_bytes // x.element_size(), sums.numel(), steps)).abs().nan_to_num(float("inf")).max()
        return float(wrong), "" if wrong == 0 else f"a program's sum is {float(wrong):g} off: not all was loaded"

    size = sums.numel() * steps * TILE_ROWS * TILE_WIDTH * x.element_size()
    return Prepared(timed, check, lambda ms: {"set_bytes": x.numel() * x.element_size(), "bytes": size, "tb_per_s": size / ms / 1e9})


# ---- tensor cores ----------------------------------------------------------------------------------------------------------------------------------------


def multiply_cells(device: torch.device, quick: bool) -> list[Multiply]:
    return [Multiply(n, c) for c in ((4,) if quick or device.type != "cuda" else (4, 2, 1)) for n in (128, 64, 32, 16)]


def multiply_launch(a: Tensor, b: Tensor, out: Tensor, steps: int) -> Launch:
    """The launch for a [MMA_M, K] and b [n, K]; out [programs, MMA_M, n]."""
    from ..kernels.triton import probe_kernels as k

    return Launch(k.multiply_kernel, out.shape[0], (a, b, out, steps), {"BM": a.shape[0], "BN": b.shape[0], "BK": a.shape[1], "num_warps": 4})


def prepare_multiply(cell: Multiply, device: torch.device) -> Prepared:
    dtype, steps = (torch.bfloat16, MMA_STEPS) if device.type == "cuda" else (TINY, 3)
    g = torch.Generator(device=device).manual_seed(0)
    a, b = (torch.randn(rows, MMA_K, generator=g, device=device).to(dtype) for rows in (MMA_M, cell.n))
    out = torch.full((cell.programs_per_sm * _multiprocessors(device), MMA_M, cell.n), float("nan"), device=device)
    launch = multiply_launch(a, b, out, steps)

    def check() -> tuple[float, str]:
        launch()
        want = steps * (a.double() @ b.double().t())
        wrong = float((out.double() - want).abs().nan_to_num(float("inf")).max() / want.abs().max())
        return wrong, "" if wrong < 0.01 else f"a product is off by {wrong:.3g} of the largest"  # sums of thousands of terms, each rounded

    flop = 2 * out.numel() * MMA_K * steps
    return Prepared(launch, check, lambda ms: {"flop": flop, "tflop_per_s": flop / ms / 1e9})


BANDWIDTH = Part("bandwidth", Load, ("set_bytes", "bytes", "tb_per_s"), load_cells, prepare_load, probe_hash)
TENSORCORE = Part("tensorcore", Multiply, ("flop", "tflop_per_s"), multiply_cells, prepare_multiply, probe_hash)
