"""Energy of a step on an NVIDIA GPU, from NVML: a row of the table `energy`.

    idle -> warm-up -> window

The board's power without work is measured first, by the means that measures the window, and subtracted. The warm-up brings clocks and averages to where the
window finds them. The window runs the step for some seconds, with the device synchronised at both ends and every tenth of a second between.

NVML counts energy (Volta and newer), or tells power, which is then sampled and integrated. Neither is a fast instrument: power is an average over a second on
Ampere and newer, GA100 excepted (nvmlDeviceGetPowerUsage; ml-energy/zeus issue 45); an A100 or H100 samples 25 % of the time (Yang et al., arXiv:2312.02741);
counter and integral have disagreed by almost a factor of two (zeus issue 181); with MIG, readings are the whole GPU's or fail (zeus issue 109). So windows are
long, both ways are compared where there are both, and what is in doubt stands in `warnings`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from ..bench import provenance
from ..kernels.errors import ConfigError, UnsupportedError, message
from .devices import is_here
from .nvml import PERIOD_S, Gpu, Window, watch

AVERAGE_S = 1.0  # what NVML averages power over
LEAST_S = 5 * AVERAGE_S  # shorter windows are warned of
DISAGREE = 0.1  # of counter and integral, above which it is said
LEAST_NET = 0.01  # of what was read; less above idle is nothing that NVML can tell


def _warnings(gpu: Gpu, idle: Window, busy: Window, net_j: float | None) -> list[str]:
    found = []
    if busy.s < LEAST_S:
        found.append(f"window of {busy.s:.1f} s is short: NVML averages over {AVERAGE_S:g} s, take at least {LEAST_S:g} s")
    if idle.s < 2 * AVERAGE_S:
        found.append(f"idle window of {idle.s:.1f} s is short: take at least {2 * AVERAGE_S:g} s")
    if busy.counter_j and busy.integral_j and abs(busy.counter_j / busy.integral_j - 1) > DISAGREE:
        found.append(f"counter and integral of power disagree: {busy.counter_j:.0f} J and {busy.integral_j:.0f} J")
    if net_j is None:
        found.append("no more energy than at rest: nothing can be said of a step")
    return [*found, *busy.disturbed(), *gpu.shared()]


def measure_on(
    gpu: Gpu,
    step: Callable[[], Any],
    synchronize: Callable[[], None],
    *,
    seconds: float,
    idle_s: float,
    samples: int | None,
    now: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> dict[str, Any]:
    """`measure_energy` on a GPU that is open, by a clock that can be another one."""

    def steps(duration: float, batch: int) -> int:
        end, n = now() + duration, 0
        while n == 0 or now() < end:
            for _ in range(batch):
                step()
            synchronize()  # or a queue of launches runs on long after the end
            n += batch
        return n

    def rest() -> int:
        sleep(idle_s)
        return 0

    steps(0, 1)  # compiles, allocates
    sleep(AVERAGE_S)
    idle = watch(gpu, rest, now)
    start = now()
    warm = steps(2 * AVERAGE_S, 1)
    batch = max(1, int(PERIOD_S * warm / max(now() - start, 1e-9)))
    busy = watch(gpu, lambda: steps(seconds, batch), now)
    return _row(gpu, idle, busy, samples)


def _row(gpu: Gpu, idle: Window, busy: Window, samples: int | None) -> dict[str, Any]:
    """What steps took beyond a GPU at rest."""
    source, idle_j, raw_j = _joules(gpu, idle, busy)
    idle_w = idle_j / idle.s
    above_j = raw_j - idle_w * busy.s
    net_j = above_j if above_j > LEAST_NET * raw_j else None
    clocks = busy.clocks_mhz
    limit = gpu.ask("nvmlDeviceGetEnforcedPowerLimit")
    row = {
        "window_s": busy.s,
        "n_steps": busy.result,
        "energy_j_raw": raw_j,
        "idle_w": idle_w,
        "energy_j_net": net_j,
        "j_per_step": net_j / busy.result if net_j else None,
        "j_per_sample": net_j / busy.result / samples if samples and net_j else None,
        "source": source,
        "gpu": gpu.name,
        "power_limit_w": limit / 1000 if limit else None,
        "sm_clock_mhz": statistics.median(clocks) if clocks else None,
        "temp_c": gpu.ask("nvmlDeviceGetTemperature", gpu.nvml.NVML_TEMPERATURE_GPU),
        "warnings": "; ".join(_warnings(gpu, idle, busy, net_j)),
    }
    return {k: v for k, v in row.items() if v is not None}


def _joules(gpu: Gpu, idle: Window, busy: Window) -> tuple[str, float, float]:
    """Where the figures come from, and those of the two windows: the counter's where there is one. Raises: UnsupportedError."""
    if idle.counter_j and busy.counter_j:
        return "nvml_counter", idle.counter_j, busy.counter_j
    if idle.integral_j and busy.integral_j:
        return "power_integral", idle.integral_j, busy.integral_j
    what = "measure_energy: no energy to read: expected an answer of nvmlDeviceGetTotalEnergyConsumption or nvmlDeviceGetPowerUsage above 0, got none."
    raise UnsupportedError(message(what, gpu.name, "measure where `nvidia-smi -q -d POWER` shows a power draw; without it the report has no energy."))


def measure_energy(
    step: Callable[[], Any], *, seconds: float = 10.0, idle_s: float = 5.0, samples: int | None = None, device: int | str | torch.device | None = None
) -> dict[str, Any]:
    """Energy of `step()` on a GPU, above idle: a row with the fields of the table `energy`.

    Args:
        step: one step; what it launches on the device may still run when it returns.
        seconds: length of the window, after two seconds of warm-up; below five there is a warning.
        idle_s: how long idle power is measured before; the device has to be left alone meanwhile.
        samples: samples in a step, for `j_per_sample`.
        device: a CUDA device, the current one by default.

    Returns:
        window_s, n_steps, energy_j_raw, idle_w, energy_j_net, j_per_step, j_per_sample, source (nvml_counter or power_integral), gpu, power_limit_w,
        sm_clock_mhz (median over the window), temp_c (at its end), warnings (one text, empty if there are none). What was not measured is absent, never 0.

    Raises:
        UnsupportedError: no CUDA device, no NVML, or a GPU that tells neither energy nor power.
        ConfigError: a time or a number of samples that is not positive.
    """
    if not (seconds > 0 and idle_s > 0 and (samples is None or samples > 0)):
        raise ConfigError(f"measure_energy: expected positive seconds, idle_s and samples, got seconds={seconds}, idle_s={idle_s}, samples={samples}.")
    where = torch.device("cuda", device) if isinstance(device, int) else torch.device(device or "cuda")
    fix = "measure on a machine with an NVIDIA GPU and nvidia-ml-py; without one the report has no energy."
    if where.type != "cuda" or not is_here(where.index):
        raise UnsupportedError(message(f"measure_energy: energy is read from an NVIDIA GPU: expected a CUDA device that is here, got {str(where)!r}.", fix=fix))
    if (api := provenance.nvml()) is None:
        raise UnsupportedError(message("measure_energy: energy is read through NVML: expected nvidia-ml-py and a driver that answers, got none.", fix=fix))
    index = torch.cuda.current_device() if where.index is None else where.index
    try:
        gpu = Gpu(api, provenance.nvml_handle(api, index), torch.cuda.get_device_name(index))
    except api.NVMLError as error:
        raise UnsupportedError(message(f"measure_energy: NVML does not show this GPU: {error}.", where=f"cuda:{index}", fix=fix)) from None
    return measure_on(gpu, step, lambda: torch.cuda.synchronize(index), seconds=seconds, idle_s=idle_s, samples=samples)
