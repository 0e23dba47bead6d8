"""Time of one call on a device: process time on a CPU with one thread, which other processes disturb least, wall time with more, events on CUDA."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch


def stopwatch(device: torch.device) -> Callable[[Callable[[], Any]], float]:
    """A function that runs a call and returns its seconds."""
    if device.type == "cuda":
        return _cuda
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter

    def on_cpu(call: Callable[[], Any]) -> float:
        begin = clock()
        call()
        return clock() - begin

    return on_cpu


def _cuda(call: Callable[[], Any]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def medians(rows: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    """The median of each column."""
    return tuple(statistics.median(column) for column in zip(*rows, strict=True))
