"""What NVML tells of a GPU while something runs: energy by its counter, power and clocks by samples."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

PERIOD_S = 0.1  # between two samples
CLOCK_MOVED = 0.05  # relative, above which it is said
# what holds clocks down, by the bits of nvmlClocksEventReason*
HELD_BY = {0x04: "power limit", 0x08: "hardware slowdown", 0x20: "software thermal limit", 0x40: "hardware thermal limit", 0x80: "power brake"}


class Sample(NamedTuple):
    """Power in W and SM clock in MHz at time t in s; what NVML does not tell is None."""

    t: float
    power_w: float | None
    clock_mhz: float | None
    reasons: int


@dataclass(frozen=True)
class Gpu:
    """A GPU as NVML shows it. What this GPU, driver or container does not tell is None."""

    nvml: Any
    handle: Any
    name: str

    def ask(self, question: str, *args: Any) -> Any:
        try:
            return getattr(self.nvml, question)(self.handle, *args)
        except (AttributeError, self.nvml.NVMLError):  # older than this pynvml or this driver; not supported; not permitted
            return None

    def energy_j(self) -> float | None:
        mj = self.ask("nvmlDeviceGetTotalEnergyConsumption")
        return None if mj is None else mj / 1000

    def sample(self, t: float) -> Sample:
        mw, clock = self.ask("nvmlDeviceGetPowerUsage"), self.ask("nvmlDeviceGetClockInfo", self.nvml.NVML_CLOCK_SM)
        reasons = self.ask("nvmlDeviceGetCurrentClocksEventReasons") or self.ask("nvmlDeviceGetCurrentClocksThrottleReasons") or 0
        return Sample(t, None if mw is None else mw / 1000, clock, reasons)

    def shared(self) -> list[str]:
        """Why readings may not be this process's alone."""
        found = []
        if (self.ask("nvmlDeviceGetMigMode") or [0])[0]:
            found.append("MIG is on: NVML reads the whole GPU, not a slice")
        # the numbers of processes mean nothing inside a container, but this process is one of them
        others = len({p.pid for p in self.ask("nvmlDeviceGetComputeRunningProcesses") or []}) - 1
        if others > 0:
            found.append(f"{others} other process{'es' if others > 1 else ''} on the device")
        return found


class _Sampler:
    """Samples in a thread while the block runs, one at each end whatever the thread does."""

    def __init__(self, gpu: Gpu, now: Callable[[], float]) -> None:
        self.gpu, self.now = gpu, now
        self.samples: list[Sample] = []
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True, name="fxmask-nvml")

    def _run(self) -> None:
        while not self.stop.wait(PERIOD_S):
            self.samples.append(self.gpu.sample(self.now()))

    def __enter__(self) -> _Sampler:
        self.samples.append(self.gpu.sample(self.now()))
        self.thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop.set()
        self.thread.join()
        self.samples.append(self.gpu.sample(self.now()))


@dataclass(frozen=True)
class Window:
    """What was read while something ran: seconds, what it returned, joules by the counter and by the samples' integral."""

    s: float
    result: int
    counter_j: float | None
    integral_j: float | None
    samples: list[Sample]

    @property
    def clocks_mhz(self) -> list[float]:
        return [s.clock_mhz for s in self.samples if s.clock_mhz]

    def disturbed(self) -> list[str]:
        """What clocks did that another run may not see."""
        found, clocks = [], self.clocks_mhz
        if clocks and max(clocks) - min(clocks) > CLOCK_MOVED * max(clocks):
            found.append(f"SM clock moved between {min(clocks):g} and {max(clocks):g} MHz")
        if held := [why for bit, why in HELD_BY.items() if any(s.reasons & bit for s in self.samples)]:
            found.append(f"clocks were held down: {', '.join(held)}")
        return found


def integral(samples: list[Sample], start: float, end: float) -> float | None:
    """Joules from start to end: power, linear between samples and level outside of them; None without a reading."""
    points = [(s.t, s.power_w) for s in samples if s.power_w is not None]
    if not points:
        return None
    points = [(min(start, points[0][0]), points[0][1]), *points, (max(end, points[-1][0]), points[-1][1])]
    joules = 0.0
    for (t0, p0), (t1, p1) in pairwise(points):
        a, b = max(t0, start), min(t1, end)
        if a < b:
            joules += (b - a) * (p0 + (p1 - p0) * ((a + b) / 2 - t0) / (t1 - t0))
    return joules


def watch(gpu: Gpu, run: Callable[[], int], now: Callable[[], float]) -> Window:
    """What the GPU reads while `run()` runs."""
    with _Sampler(gpu, now) as sampler:
        first, start = gpu.energy_j(), now()
        result = run()
        end, last = now(), gpu.energy_j()
    counted = None if first is None or last is None or last <= first else last - first
    return Window(end - start, result, counted, integral(sampler.samples, start, end), sampler.samples)
