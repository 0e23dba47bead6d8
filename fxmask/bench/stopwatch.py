"""Time of one call on a device, for measurements that take turns: process time on a CPU with one thread, which other processes disturb least, wall time with
more, events on CUDA.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from .clock import SAMPLES


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


def turns(names: Sequence[str], seconds: float, least: int) -> Iterator[tuple[int, str]]:
    """(turn, name), every name once a turn; at least so many turns, then more until the time is spent.

    In changing order: what ran before decides a fifth of a short op's time.
    """
    end, turn = time.perf_counter() + seconds, 0
    while turn < least or (time.perf_counter() < end and turn < SAMPLES):
        for name in random.Random(turn).sample(names, len(names)):
            yield turn, name
        turn += 1


def medians(rows: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    """The median of each column."""
    return tuple(statistics.median(column) for column in zip(*rows, strict=True))
