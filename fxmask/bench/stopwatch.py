"""Time of one call on a device, for measurements that take turns: process time on a CPU with one thread, which other processes disturb least, wall time with
more, events on CUDA.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch


class Stopwatch:
    """Called with a call, it runs that and returns its seconds. `name`: process, wall or events."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.name = "events" if device.type == "cuda" else "process" if torch.get_num_threads() == 1 else "wall"

    def __call__(self, call: Callable[[], Any]) -> float:
        if self.name == "events":
            return self._events(call)
        now = time.process_time if self.name == "process" else time.perf_counter
        begin = now()
        call()
        return now() - begin

    def _events(self, call: Callable[[], Any]) -> float:
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(self.device)
        first.record()
        call()
        last.record()
        torch.cuda.synchronize(self.device)
        return float(first.elapsed_time(last)) / 1e3


def medians(rows: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    """The median of each column."""
    return tuple(statistics.median(column) for column in zip(*rows, strict=True))
