"""Time of a step, measured: columns beside the predicted ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..bench.clock import flush_buffer, time_cpu, time_cuda
from ..errors import ConfigError, UnsupportedError


def time_step(step: Callable[[], Any], device: str | torch.device = "cpu") -> dict[str, Any]:
    """Times of `step()` in us; see `fxmask.bench.clock` for how they are taken.

    Returns:
        t_meas_us, t_p10_us, t_p90_us: median and percentiles, on CUDA after the L2 was flushed, on a CPU wall time; how: graph (a captured step), launches or
        wall; t_warm_us: the median without a flush (CUDA); t_cpu_us: process time of the median step (CPU). What was not measured is absent.

    Raises:
        UnsupportedError: a CUDA device that is not here.   ConfigError: a device that is neither CUDA nor a CPU.
    """
    where = torch.device(device)
    if where.type == "cpu":
        times = time_cpu(step)
        (p10, p50, p90), other = times.warm, {"t_cpu_us": None if times.cpu is None else 1e3 * times.cpu}
    elif where.type == "cuda":
        if not torch.cuda.is_available():
            raise UnsupportedError(
                f"time_step: expected a CUDA device that is here, got {str(device)!r}.\n  fix: time the step on 'cpu', or on a machine with a GPU."
            )
        with torch.cuda.device(where):
            times = time_cuda(step, flush_buffer(where))
        assert times.cold is not None
        (p10, p50, p90), other = times.cold, {"t_warm_us": 1e3 * times.warm[1]}
    else:
        raise ConfigError(f"time_step: expected a CUDA device or 'cpu', got {str(device)!r}.")
    row = {"t_meas_us": 1e3 * p50, "t_p10_us": 1e3 * p10, "t_p90_us": 1e3 * p90, "how": times.how, **other}
    return {k: v for k, v in row.items() if v is not None}
