"""Energy of a step, read from an NVML that is made up, by a clock that only steps and sleeps move."""

import threading
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch

from fxmask.analysis import energy
from fxmask.analysis.energy import measure_energy, measure_on
from fxmask.analysis.nvml import Gpu, Sample, integral
from fxmask.bench import provenance
from fxmask.errors import ConfigError, UnsupportedError

IDLE_W, BUSY_W, STEP_S = 70.0, 400.0, 0.02


class NvmlError(Exception):
    pass


@dataclass
class Board:
    """A GPU whose power depends on whether a step runs; it knows the time."""

    t: float = 0.0
    joules: float = 1e6  # since the driver was loaded
    busy: bool = False
    answers: dict = field(default_factory=dict)
    silent: tuple = ()
    synchronized: int = 0
    NVMLError = NvmlError
    NVML_CLOCK_SM = 1
    NVML_TEMPERATURE_GPU = 0

    def pass_time(self, seconds, power_w):
        self.t += seconds
        self.joules += seconds * power_w

    def step(self):
        self.busy = True  # and stays so: no sample falls between two steps
        self.pass_time(STEP_S, BUSY_W)

    def sleep(self, seconds):
        self.busy = False
        self.pass_time(seconds, IDLE_W)

    def synchronize(self):
        self.synchronized += 1

    def __getattr__(self, name):
        def answer(handle, *_):
            assert handle == "handle"
            if name in self.silent:
                raise NvmlError("not supported")
            known = {
                "nvmlDeviceGetTotalEnergyConsumption": int(1000 * self.joules),
                "nvmlDeviceGetPowerUsage": int(1000 * (BUSY_W if self.busy else IDLE_W)),
                "nvmlDeviceGetClockInfo": 1980 if self.busy else 345,
                "nvmlDeviceGetCurrentClocksEventReasons": 0 if self.busy else 1,
                "nvmlDeviceGetEnforcedPowerLimit": 700_000,
                "nvmlDeviceGetTemperature": 45,
                "nvmlDeviceGetMigMode": [0, 0],
                "nvmlDeviceGetComputeRunningProcesses": [SimpleNamespace(pid=7)],
            } | self.answers
            value = known[name]
            return value(self) if callable(value) else value

        if name == "nvmlDeviceGetCurrentClocksThrottleReasons" and name not in self.answers:
            raise AttributeError(name)  # a later pynvml, which has dropped it
        return answer


def measure(board, seconds=10.0, idle_s=5.0, samples=None, step=None):
    gpu = Gpu(board, "handle", "NVIDIA H200")
    return measure_on(gpu, step or board.step, board.synchronize, seconds=seconds, idle_s=idle_s, samples=samples, now=lambda: board.t, sleep=board.sleep)


COUNTER, POWER = "nvmlDeviceGetTotalEnergyConsumption", "nvmlDeviceGetPowerUsage"


@pytest.mark.parametrize(("silent", "source"), [((), "nvml_counter"), ((POWER,), "nvml_counter"), ((COUNTER,), "power_integral")])
def test_idle_is_subtracted(silent, source):
    board, before = Board(silent=silent), {*threading.enumerate()}
    row = measure(board, samples=32)
    assert row["source"] == source
    assert row["idle_w"] == pytest.approx(IDLE_W)
    assert row["window_s"] == pytest.approx(10, abs=0.2) and row["n_steps"] == pytest.approx(row["window_s"] / STEP_S)
    assert row["energy_j_raw"] == pytest.approx(BUSY_W * row["window_s"])
    assert row["energy_j_net"] == pytest.approx((BUSY_W - IDLE_W) * row["window_s"])
    assert row["j_per_step"] == pytest.approx((BUSY_W - IDLE_W) * STEP_S)
    assert row["j_per_sample"] == pytest.approx(row["j_per_step"] / 32)
    assert (row["gpu"], row["power_limit_w"], row["sm_clock_mhz"], row["temp_c"], row["warnings"]) == ("NVIDIA H200", 700, 1980, 45, "")
    assert board.synchronized > row["window_s"] / 0.11  # never far behind what was launched
    assert {*threading.enumerate()} <= before


@pytest.mark.parametrize("counter", [lambda board: 5, lambda board: int(1e9 - board.joules)], ids=["stuck", "backwards"])
def test_a_counter_that_does_not_count_is_not_used(counter):
    row = measure(Board(answers={COUNTER: counter}))
    assert row["source"] == "power_integral" and row["energy_j_raw"] == pytest.approx(BUSY_W * row["window_s"])


def test_what_is_not_known_is_absent():
    row = measure(Board(silent=("nvmlDeviceGetEnforcedPowerLimit", "nvmlDeviceGetTemperature", "nvmlDeviceGetClockInfo", "nvmlDeviceGetMigMode")))
    assert not {"power_limit_w", "temp_c", "sm_clock_mhz", "j_per_sample"} & set(row)
    assert None not in row.values() and row["warnings"] == ""


def test_a_step_of_no_energy_is_no_zero():
    board = Board()
    row = measure(board, step=lambda: board.sleep(STEP_S))
    assert not {"energy_j_net", "j_per_step"} & set(row)
    assert "no more energy than at rest" in row["warnings"]


@pytest.mark.parametrize(
    ("board", "windows", "warning"),
    [
        (Board(), dict(seconds=2.0), "window of 2.1 s is short: NVML averages over 1 s, take at least 5 s"),
        (Board(), dict(idle_s=1.0), "idle window of 1.0 s is short"),
        (Board(answers={POWER: 150_000}), {}, "counter and integral of power disagree: 4040 J and 1515 J"),
        (Board(answers={"nvmlDeviceGetCurrentClocksEventReasons": 0x4 | 0x20}), {}, "clocks were held down: power limit, software thermal limit"),
        (Board(silent=("nvmlDeviceGetCurrentClocksEventReasons",), answers={"nvmlDeviceGetCurrentClocksThrottleReasons": 0x80}), {}, "held down: power brake"),
        (Board(answers={"nvmlDeviceGetMigMode": [1, 1]}), {}, "MIG is on"),
        (Board(answers={"nvmlDeviceGetComputeRunningProcesses": [SimpleNamespace(pid=p) for p in (7, 8, 9, 9)]}), {}, "2 other processes on the device"),
    ],
    ids=["short", "short-idle", "disagree", "held", "held-old-driver", "mig", "shared"],
)
def test_warnings(board, windows, warning):
    row = measure(board, **windows)
    assert warning in row["warnings"] and row["warnings"].count(";") == 0


def test_a_clock_that_moves_is_warned_of():
    clocks = iter([1980])
    board = Board(answers={"nvmlDeviceGetClockInfo": lambda board: next(clocks, 1500) if board.busy else 345})
    assert measure(board)["warnings"] == "SM clock moved between 1500 and 1980 MHz"  # the window's clock, not that at rest


def test_the_thread_samples(monkeypatch):
    monkeypatch.setattr("fxmask.analysis.nvml.PERIOD_S", 0.001)
    asked = threading.Event()
    board, first = Board(silent=(COUNTER,)), threading.get_ident()

    def step():
        board.step()
        if any(t.name == "fxmask-nvml" for t in threading.enumerate()):
            assert asked.wait(10)  # until a sample came from another thread

    ask = Gpu.sample
    monkeypatch.setattr(Gpu, "sample", lambda self, t: (threading.get_ident() == first or asked.set(), ask(self, t))[1])
    assert measure(board, step=step)["source"] == "power_integral" and asked.is_set()


def test_a_failing_step_leaves_no_thread():
    board, calls, before = Board(), iter([True] * 200), {*threading.enumerate()}

    def step():
        board.step()
        if not next(calls, False):  # the warm-up has 100
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        measure(board, step=step)
    assert {*threading.enumerate()} <= before


@pytest.mark.parametrize("board", [Board(silent=(COUNTER, POWER)), Board(answers={COUNTER: 5}, silent=(POWER,))], ids=["silent", "stuck"])
def test_no_reading_is_an_error(board):
    with pytest.raises(UnsupportedError, match=r"no energy to read: expected an answer of .* above 0, got none.\n  where: NVIDIA H200\n  fix:"):
        measure(board)


def test_the_integral():
    samples = [Sample(t, p, None, 0) for t, p in [(1, 100), (2, 200), (2.5, None), (4, 200)]]
    assert integral(samples, 1, 4) == pytest.approx(150 + 400)
    assert integral(samples, 1.5, 2) == pytest.approx(0.5 * 175)
    assert integral(samples, 0, 5) == pytest.approx(100 + 550 + 200)  # level outside
    assert integral(samples[2:3], 0, 1) is None
    assert integral(samples[:1], 0, 3) == pytest.approx(300)


WITHOUT = ((None, "cuda"), (1, "cuda:1"), ("cpu", "cpu"))


@pytest.mark.parametrize(("usable", "count", "asked"), [(False, 0, WITHOUT), (False, 2, WITHOUT), (True, 1, ((1, "cuda:1"), ("cuda:3", "cuda:3")))])
def test_without_that_gpu(monkeypatch, usable, count, asked):
    """A GPU whose driver is too old for this PyTorch is counted, and cannot be used."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: usable)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    for device, named in asked:
        with pytest.raises(UnsupportedError, match=f"expected a CUDA device that is here, got '{named}'.\n  fix: .* the report has no energy"):
            measure_energy(lambda: None, device=device)


def test_without_nvml(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(provenance, "nvml", lambda: None)
    with pytest.raises(UnsupportedError, match="expected nvidia-ml-py and a driver that answers, got none"):
        measure_energy(lambda: None, device=0)
    board = Board()
    monkeypatch.setattr(provenance, "nvml", lambda: board)

    def refuse(nvml, index):
        raise NvmlError("Insufficient Permissions")

    monkeypatch.setattr(provenance, "nvml_handle", refuse)
    with pytest.raises(UnsupportedError, match=r"NVML does not show this GPU: Insufficient Permissions.\n  where: cuda:0"):
        measure_energy(lambda: None, device=0)


@pytest.mark.parametrize(
    ("silent", "told"),
    [
        ((), ("700", "345", "45")),
        (("nvmlDeviceGetEnforcedPowerLimit",), ("", "345", "45")),
        (("nvmlDeviceGetClockInfo", "nvmlDeviceGetTemperature"), ("700", "", "")),
    ],
)
def test_a_figure_that_is_refused_takes_no_other_with_it(monkeypatch, silent, told):
    monkeypatch.setattr(provenance, "nvml", lambda: Board(silent=silent))
    monkeypatch.setattr(provenance, "nvml_handle", lambda nvml, index: "handle")
    assert tuple(provenance.clocks(torch.device("cuda")).values()) == told
    monkeypatch.setattr(provenance, "nvml_handle", lambda nvml, index: nvml.nothing("handle"))
    assert set(provenance.clocks(torch.device("cuda")).values()) == {""}


def test_it_is_the_gpu_that_torch_means(monkeypatch):
    board = Board()
    monkeypatch.setattr(provenance, "nvml", lambda: board)
    monkeypatch.setattr(provenance, "nvml_handle", lambda nvml, index: "handle" if index == 2 else None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU {index}")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda index: board.synchronize())
    monkeypatch.setattr(energy, "measure_on", lambda gpu, step, sync, **kw: (sync(), measure(gpu.nvml, **kw) | {"gpu": gpu.name, "handle": gpu.handle})[1])
    row = measure_energy(board.step, seconds=6, device="cuda:2")
    assert (row["gpu"], row["handle"]) == ("GPU 2", "handle") and row["j_per_step"] == pytest.approx((BUSY_W - IDLE_W) * STEP_S)


@pytest.mark.parametrize("wrong", [dict(seconds=0), dict(idle_s=-1), dict(samples=0), dict(seconds=float("nan"))])
def test_windows_are_positive(wrong):
    with pytest.raises(ConfigError, match="expected positive seconds, idle_s and samples"):
        measure_energy(lambda: None, **wrong)
