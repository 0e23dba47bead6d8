"""The clocks of `fxmask bench`: percentiles, a CPU's times, and a GPU's by events that a test makes up; when a run ends."""

import contextlib
import os
import time
from types import SimpleNamespace

import pytest
import torch

from fxmask.bench import clock, session, stopwatch, table


def test_percentiles():
    assert clock.percentiles([float(n) for n in range(101)]) == (10, 50, 90)


def test_the_clock_of_a_cpu_tells_sleep_from_work():
    calls = []
    times = clock.time_cpu(lambda: calls.append(time.sleep(0.004)), 60.0)
    assert 4 <= times.warm[0] <= times.warm[1] <= times.warm[2] and len(calls) == 1 + clock.SAMPLES
    assert times.cpu < 0.8 * times.warm[1] and times.how == "wall" and times.cold is None


def test_a_cpu_is_sampled_a_few_times_though_no_time_is_left():
    calls = []
    clock.time_cpu(lambda: calls.append(0), 0.0, 3)
    assert len(calls) == 4


def test_more_load_than_cores_is_a_busy_machine(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    assert [table.verdict_of(load) for load in (None, 4.0, 4.1)] == ["ok", "ok", "none: load 4.1 on 4 cores"]


@pytest.mark.parametrize(("threads", "name", "took"), [(1, "process", 0.25), (2, "wall", 0.5)])
def test_a_stopwatch_of_a_cpu_looks_at_process_time_on_one_thread_alone(monkeypatch, threads, name, took):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    clocks = {"process_time": iter((1.0, 1.25)).__next__, "perf_counter": iter((1.0, 1.5)).__next__}
    monkeypatch.setattr(stopwatch, "time", SimpleNamespace(**clocks))
    watch = stopwatch.Stopwatch(torch.device("cpu"))
    assert (watch.name, watch(lambda: None)) == (name, took)


def test_a_stopwatch_of_a_gpu_gives_seconds(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: SimpleNamespace(record=lambda: None, elapsed_time=lambda end: 250.0))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    assert stopwatch.Stopwatch(torch.device("cuda"))(lambda: None) == 0.25


def test_turns_come_in_changing_order_until_the_time_is_spent():
    found = list(stopwatch.turns("ab", 0.0, 8))
    pairs = [found[i][1] + found[i + 1][1] for i in range(0, 16, 2)]
    assert [turn for turn, _ in found] == [t for t in range(8) for _ in "ab"] and set(pairs) == {"ab", "ba"}
    assert len(list(stopwatch.turns("a", 60.0, 1))) == clock.SAMPLES


def test_a_cell_is_as_long_as_the_longest_of_late(monkeypatch):
    now, said = [0.0], []
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    begun = []
    for cell in session.within("abcde", 20.05, said.append):
        begun.append(cell)
        now[0] += 10 if cell == "a" else 1
    assert begun == ["a", "b", "c"] and said == ["stopped by the time limit of 20.05 s with 2 cells left; the same command goes on from here"]


def test_a_device_that_answers_no_more_ends_the_run(monkeypatch, tmp_path):
    said, done = [], []
    run = session.Session(torch.device("cpu"), tmp_path, say=said.append)
    monkeypatch.setattr(run, "alive", lambda: False)  # asked where a cell has no verdict
    assert run.over(["ok", "ok", "none: AcceleratorError", "ok", "ok"], lambda cell: {"verdict": cell}, lambda cell, row: done.append(cell)) == 2
    assert done == ["ok", "ok", "none: AcceleratorError"] and said[0].startswith("the device answers no more, with 2 cells left")


@pytest.mark.parametrize("captured", [True, False])
def test_the_clock_of_a_gpu_tells_a_call_of_a_graph_and_a_cold_cache(monkeypatch, captured):
    """Events on a clock of the test: a call takes 0.01 ms, behind a write of the flush buffer, which takes 7, it takes 0.5 ms more."""
    now, cold, recording, graphs = [0.0], [0.0], [False], []

    def call():
        if not recording[0]:
            now[0] += 0.01 + cold[0]
            cold[0] = 0.0
        elif captured:
            graphs[-1].calls += 1
        else:
            raise RuntimeError("a host sync")

    class Graph:
        calls = 0

        def replay(self):
            recording[0] = False
            for _ in range(self.calls):
                call()

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = now[0]

        def elapsed_time(self, end):
            return end.at - self.at

    @contextlib.contextmanager
    def graph(g):
        graphs.append(g)
        recording[0] = True
        try:
            yield
        finally:
            recording[0] = False

    stream = SimpleNamespace(wait_stream=lambda other: None)
    fakes = {"CUDAGraph": Graph, "graph": graph, "Event": Event, "Stream": lambda: stream, "current_stream": lambda: stream, "synchronize": lambda: None}
    for name, fake in {**fakes, "stream": contextlib.nullcontext}.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    buffer = SimpleNamespace(zero_=lambda: (now.__setitem__(0, now[0] + 7), cold.__setitem__(0, 0.5)))
    times = clock.time_cuda(call, buffer, 10)
    assert times.warm == pytest.approx((0.01,) * 3) and times.cold == pytest.approx((0.51,) * 3)
    assert (times.how, [g.calls for g in graphs]) == (("graph", [5, 1]) if captured else ("launches", [0, 0]))


@pytest.mark.parametrize(("cache", "size"), [(100 << 20, 200 << 20), (1 << 20, 128 << 20)])
def test_what_flushes_a_cache_is_larger(monkeypatch, cache, size):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(L2_cache_size=cache))
    assert clock.flush_buffer(torch.device("meta")).nbytes == size
