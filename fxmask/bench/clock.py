"""Time of a call: percentiles in milliseconds, with a warm and with a flushed L2 cache on CUDA; wall and process time on a CPU.

On CUDA the call is captured into a graph, several times where it is short, so that launches cost what they cost in a captured training step; where it cannot
be captured, it is launched back to back. Replays are timed by events. For a cold cache a buffer of twice the L2's size is written before each sample, outside
of the events; that write also hides the launch.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

SAMPLES = 100
SHORT_MS = 0.05  # a graph holds as many calls as this takes, at most 20


@dataclass(frozen=True)
class Times:
    """p10, p50, p90 in ms; `how`: graph, launches or wall; cold and cpu where they are measured."""

    warm: tuple[float, float, float]
    how: str
    cold: tuple[float, float, float] | None = None
    cpu: float | None = None


def percentiles(samples: list[float]) -> tuple[float, float, float]:
    """p10, p50, p90, by the nearest sample."""
    s = sorted(samples)
    return (s[round(0.1 * (len(s) - 1))], s[round(0.5 * (len(s) - 1))], s[round(0.9 * (len(s) - 1))])


def load_average() -> float | None:
    """Runnable processes over the last minute; None where the system does not say."""
    try:
        return os.getloadavg()[0]
    except (OSError, AttributeError):
        return None


def time_cpu(call: Callable[[], Any], budget_s: float = 1.0, least: int = 5) -> Times:
    """Wall time of single calls, and the median of their process times."""
    call()
    wall: list[float] = []
    cpu: list[float] = []
    end = time.perf_counter() + budget_s
    while len(wall) < least or (time.perf_counter() < end and len(wall) < SAMPLES):
        w, c = time.perf_counter(), time.process_time()
        call()
        wall.append(1e3 * (time.perf_counter() - w))
        cpu.append(1e3 * (time.process_time() - c))
    return Times(percentiles(wall), "wall", cpu=percentiles(cpu)[1])


# ---- CUDA ------------------------------------------------------------------------------------------------------------------------------------------------


def _capture(call: Callable[[], Any], times: int) -> Callable[[], Any] | None:
    """A replay of `times` calls, or None where the call cannot be captured."""
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            for _ in range(times):
                call()
        graph.replay()
        torch.cuda.synchronize()
    except RuntimeError:  # a host sync or a pageable copy inside
        torch.cuda.synchronize()
        return None
    return graph.replay


def _sample(run: Callable[[], Any], samples: int, before: Callable[[], Any] | None, calls: int) -> tuple[float, float, float]:
    starts = [torch.cuda.Event(enable_timing=True) for _ in range(samples)]
    ends = [torch.cuda.Event(enable_timing=True) for _ in range(samples)]
    for start, end in zip(starts, ends, strict=True):
        if before is not None:
            before()
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return percentiles([s.elapsed_time(e) / calls for s, e in zip(starts, ends, strict=True)])


def flush_buffer(device: torch.device) -> Tensor:
    """Memory of twice the L2's size, at least 128 MB."""
    size = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)
    return torch.empty(max(2 * size, 128 << 20), dtype=torch.int8, device=device)


def time_cuda(call: Callable[[], Any], flush: Tensor, samples: int = SAMPLES) -> Times:
    """Warm and cold times on the current device."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # modules are loaded, libraries have their workspaces, before any capture
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    once = _sample(call, 5, None, 1)[1]
    calls = max(1, min(20, round(SHORT_MS / max(once, 1e-4))))
    many, single, how = _capture(call, calls), _capture(call, 1), "graph"
    if many is None or single is None:
        many, single, how, calls = call, call, "launches", 1
    _sample(many, 3, None, calls)
    warm = _sample(many, samples, None, calls)
    cold = _sample(single, samples, flush.zero_, 1)
    return Times(warm, how, cold=cold)
