"""What this CPU reaches: a matmul, a copy and small ops, timed; and the size of its last cache."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

MIB = 1 << 20
SIDE, NUMBERS = 1024, 32 * MIB  # of the matmul's factors; of what is copied, in float32
MEASURED = (
    f"fp32 matmul of {SIDE}^3, copy of {4 * NUMBERS // MIB} MiB (bytes read and written, without the line that a store fetches), an op on 8 numbers, "
    "the least time of several"
)


def reached() -> tuple[float, float, float, int | None]:
    """FLOP/s in float32, bytes/s, seconds of a small op; and bytes of the last cache, None where nobody tells. With the current number of threads."""
    with torch.inference_mode():  # constants, so that no generator moves
        a, b, c = (_constants(SIDE, SIDE) for _ in range(3))
        matmul_s = _least(lambda: torch.mm(a, b, out=c), 0.4)
        read, written = (_constants(NUMBERS) for _ in range(2))
        copy_s = _least(lambda: written.copy_(read), 0.3)
        small = _constants(8)
        launch_s = _least(lambda: [small.add_(0) for _ in range(100)], 0.02) / 100
    return 2 * SIDE**3 / matmul_s, 2 * 4 * NUMBERS / copy_s, launch_s, last_cache_bytes()


def _constants(*shape: int) -> torch.Tensor:
    return torch.full(shape, 0.5, dtype=torch.float32, device="cpu")


def _least(call: Callable[[], Any], budget_s: float) -> float:
    """Least seconds of a call, of three at least: what disturbs a time on a shared machine only ever adds to it."""
    call()
    best, repeats, end = float("inf"), 3, time.perf_counter() + budget_s
    while repeats > 0 or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
        repeats -= 1
    return best


def last_cache_bytes(folder: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int | None:
    """Size of the largest cache of CPU 0, as Linux tells it; None where it does not."""
    sizes = []
    for path in folder.glob("index*/size"):
        if match := re.fullmatch(r"(\d+)([KMG]?)", path.read_text().strip()):
            sizes.append(int(match[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[match[2]])
    return max(sizes, default=None)
