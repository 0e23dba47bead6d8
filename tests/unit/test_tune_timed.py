"""When the measured tune times what: busy machines, its budget, samples of large layers, and cases that are too small."""

import json
import math
import os
import threading
import time

import pytest
import torch
from unit.tuned import BLOCK, MASK, REAL, W, X, a_table, forward  # noqa: F401  (a_table is a fixture)

from fxmask.kernels import ops, tune
from fxmask.kernels.cpu import chosen, deciding, pool
from fxmask.kernels.cpu.plans import BY_NAME, Case, plans


def later(monkeypatch, seconds):
    """As if so much time had passed."""
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + seconds)


@pytest.mark.parametrize("kept", [True, False], ids=["on disk", "in memory"])
def test_a_machine_that_stays_busy_is_asked_less_and_less_often(table, kept, monkeypatch):
    """Never for good, and never every minute."""
    monkeypatch.setattr(os, "getloadavg", lambda: (1e3, 0.0, 0.0))
    if not kept:
        monkeypatch.setattr(tune, "load", lambda key, names: None)
        monkeypatch.setattr(tune, "store", lambda key, choice: None)
    forward()
    for repeats in range(1, 5):
        later(monkeypatch, tune.AGAIN * 2 ** (repeats - 1) - 5)
        forward()
        assert len(table.measured) == repeats
        later(monkeypatch, 10)
        forward()
        assert len(table.measured) == repeats + 1 and [c.tries for c in deciding.decisions.values()] == [repeats]
    if kept:  # another process goes on from there
        table.fresh()
        forward()
        assert not table.measured and [c.tries for c in deciding.decisions.values()] == [4]


def test_another_thread_at_work_makes_a_machine_busy_and_is_not_timed(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    monkeypatch.setattr(time, "process_time", lambda: 2 * time.perf_counter())
    assert REAL({"a": lambda: None}, 1, 0.01).busy and not REAL({"a": lambda: None}, 2, 0.01).busy
    stop = threading.Event()
    other = threading.Thread(target=lambda: [sum(range(1000)) for _ in iter(stop.is_set, True)])
    other.start()
    try:
        sleeping = REAL({"a": lambda: time.sleep(0.05)}, 1, 0.0)
    finally:
        stop.set()
        other.join()
    assert sleeping.times["a"] < 0.01  # the process's own time has the other thread's in it


def test_the_first_turn_warms_up(monkeypatch):
    """What is fast once, before it has filled the caches, is not chosen for that."""
    now, calls = [0.0], []

    def first_fast():
        calls.append(0)
        now[0] += 0.1 if len(calls) == 1 else 2.0

    monkeypatch.setattr(time, "thread_time", lambda: now[0])
    found = REAL({"first": first_fast, "always": lambda: now.append(now.pop() + 1.0)}, 1, 0.0)
    assert found.name == "always" and found.times == pytest.approx({"first": 2.0, "always": 1.0})


def test_a_machine_that_was_busy_for_ever_is_not_stale():
    assert not tune.stale(tune.Choice("a", "measured", {"a": 1.0}, busy=True, at=time.time(), tries=10_000))


@pytest.mark.parametrize("cause", ["load", "waiting"])
def test_a_tune_on_a_busy_machine_is_repeated(table, cause, monkeypatch):
    with monkeypatch.context() as m:
        m.setattr(os, "getloadavg", lambda: (1e3 * (cause == "load"), 0.0, 0.0))
        m.setattr(time, "process_time", lambda: (1.0 if cause == "load" else 0.5) * time.perf_counter())
        forward()
    assert [c.busy for c in deciding.decisions.values()] == [True] and json.loads(table.files()[0].read_text())["busy"] is True
    forward()
    assert len(table.measured) == 1  # not at once
    later(monkeypatch, tune.AGAIN + 1)
    forward()
    assert len(table.measured) == 2 and [c.busy for c in deciding.decisions.values()] == [False]
    forward()
    table.fresh()
    forward()
    assert not table.measured and json.loads(table.files()[0].read_text())["busy"] is False


def test_the_budget_is_held_and_the_fastest_wins():
    calls = []

    def candidate(name, seconds):
        return lambda: (calls.append(name), time.sleep(seconds))

    begin = time.perf_counter()
    choice = REAL({"slow": candidate("slow", 0.02), "fast": candidate("fast", 0.002)}, 2, 0.1)
    assert 0.1 <= time.perf_counter() - begin < 0.3 + 10 * 0.022
    assert choice.name == "fast" and 0.002 <= choice.times["fast"] < choice.times["slow"] and choice.times["slow"] >= 0.02
    assert 2 <= calls.count("slow") == calls.count("fast") <= 6
    assert {tuple(calls[i : i + 2]) for i in range(0, len(calls), 2)} == {("slow", "fast"), ("fast", "slow")}  # in turns, in either order
    calls.clear()
    REAL({"slow": candidate("slow", 0.02)}, 2, 0.01)
    assert len(calls) == tune.LEAST == 2  # one to warm up, and one that counts
    calls.clear()
    REAL({"slow": candidate("slow", 0.02)}, 2, 0.06)
    assert len(calls) == tune.TURNS  # within thrice the budget


@pytest.mark.parametrize("op", ["forward", "dx", "dw", "backward"])
@pytest.mark.parametrize("threads", [1, 2, 16])
@pytest.mark.parametrize("forced", [True, False])
def test_large_layers_are_timed_on_few_tokens(op, threads, forced):
    """By our own closed forms a tune takes its time and no more, but for layers whose few tokens take as long; small ones get all their tokens."""
    for features in (64, 1024, 4096, 16384):
        case = Case(op, 25088, (features, features), (64, 64), 0.5, torch.float32)
        names = [*map(str, plans(case)), *(() if forced else ("masked_dense",))]
        n = deciding.sample(case, names, threads)
        took = tune.TURNS * sum(deciding.seconds(BY_NAME[p], case._replace(tokens=n)) for p in names) / threads
        assert 256 * threads <= n <= deciding.SAMPLE and (n == 256 * threads or took <= 1.1 * tune.OVER * tune.BUDGET)
        assert n == deciding.SAMPLE or features > 1024
        assert n in (deciding.SAMPLE, 256 * threads) or took >= 0.8 * tune.OVER * tune.BUDGET  # nor less: more threads, more tokens
    assert deciding.sample(case._replace(tokens=100), names, threads) == 100


def test_a_tune_runs_over_the_sample_alone(table, monkeypatch):
    monkeypatch.setattr(deciding, "sample", lambda case, names, threads: 257)
    seen, real = [], chosen.implementation.masked_linear
    monkeypatch.setattr(chosen.implementation, "masked_linear", lambda x, *rest: (seen.append(len(x)), real(x, *rest))[1])
    forward("cpu")
    assert set(seen[:-1]) == {257} and seen[-1] == 600 and [c.tokens for c in deciding.decisions.values()] == [257]
    assert json.loads(table.files()[0].read_text())["tokens"] == 257


@pytest.mark.parametrize(
    ("lead", "timed"), [((6, 100), (3, 100)), ((4, 2, 100), (2, 2, 100)), ((2, 600), (257,)), ((2, 2, 300), (257,)), ((600,), (257,)), ((), (1,))]
)
def test_a_sample_lies_as_the_tokens_do(table, monkeypatch, lead, timed):
    """Whole samples, and none of them copied: copies of all tokens took longer than the plans that were to be told apart, so that none of them won."""
    monkeypatch.setattr(deciding, "SAMPLE", 257)
    monkeypatch.setattr(pool, "LEAST", 1)
    x, seen = torch.randn(*lead[:-1], 64, *lead[-1:]).transpose(-1, -2) if lead[1:] else torch.randn(*lead, 64), []
    for form in (chosen.implementation, chosen.masked_dense):
        real = form.masked_linear
        monkeypatch.setattr(form, "masked_linear", lambda x, *rest, real=real: (seen.append(x), real(x, *rest))[1])
    chosen.AUTO.masked_linear(x, W, None, MASK, BLOCK)
    ran = seen.pop()
    assert ran is x and {tuple(t.shape) for t in seen} == {(*timed, 64)} and [c.tokens for c in deciding.decisions.values()] == [math.prod(timed)]
    assert len(timed) == 1 or all(t.stride() == x.stride() and t.data_ptr() == x.data_ptr() for t in seen)


@pytest.mark.parametrize(("share", "wins"), [(0.97, "rows-512"), (0.99, "masked_dense")])
def test_a_plan_has_to_beat_masked_dense_by_a_margin(table, monkeypatch, share, wins):
    times = {"rows-512": share, "masked_dense": 1.0}
    monkeypatch.setattr(tune, "measure", lambda candidates, threads: tune.Choice("rows-512", "measured", times))
    forward("auto")
    assert [c.name for c in deciding.decisions.values()] == [wins]


def test_small_cases_are_never_timed(table, monkeypatch):
    monkeypatch.setattr(deciding, "SMALL", 1e-3)
    forward("auto")
    forward("cpu")
    assert not table.measured and table.files() == []
    case = Case("forward", 600, (48, 64), BLOCK, float(MASK.double().mean()), torch.float32)
    small, strips = (deciding.of(case, forced) for forced in (False, True))
    assert (small.name, small.why, strips.name in BY_NAME, strips.why) == ("masked_dense", "too small to gain", True, "estimated")
    assert "masked_dense" in small.times and list(deciding.decisions.values()) == [strips]
    made = [deciding.made("forward", (48, 64), BLOCK, case.density, forced) for forced in (False, True)]
    assert made[0][0] == small and list(made[1].values()) == [strips]


def test_plans_far_behind_masked_dense_are_not_timed(table, monkeypatch):
    """But where masked-dense is none of the candidates."""
    monkeypatch.setattr(deciding, "NEAR", 4.0)
    monkeypatch.setattr(deciding, "seconds", lambda plan, case: 5.0 if str(plan) == "rows-512" else 1.0)
    forward("auto")
    forward("cpu")
    assert [*map(sorted, table.measured)] == [["masked_dense", "rows-512x3"], ["rows-512", "rows-512x3"]]


def test_what_has_no_rival_is_not_timed(table, monkeypatch):
    monkeypatch.setattr(deciding, "NEAR", 4.0)
    monkeypatch.setattr(deciding, "seconds", lambda plan, case: 5.0 if plan.chunk else 1.0)
    forward("auto")
    assert [(c.name, c.why) for c in deciding.decisions.values()] == [("masked_dense", "estimated")] and not table.measured and table.files() == []


def test_small_is_what_is_estimated_to_take_less():
    case = Case("forward", 600, (48, 64), BLOCK, 1.0, torch.float32)
    took = deciding.seconds(chosen.MASKED_DENSE, case)
    assert deciding.unasked("forward", (6, 100, 64), (48, 64), BLOCK, torch.float32, 1.001 * took).name == "masked_dense"
    assert deciding.unasked("forward", (6, 100, 64), (48, 64), BLOCK, torch.float32, took) is None


def test_threads_that_ask_at_once_tune_once(table, monkeypatch):
    lock, waits, measure = threading.RLock(), threading.Event(), table.measure

    class Lock:
        def __enter__(self):
            if not lock.acquire(blocking=False):
                waits.set()
                lock.acquire()

        def __exit__(self, *_):
            lock.release()

    def measured(*args):
        assert waits.wait(60)  # the other one has found no decision, either
        return measure(*args)

    monkeypatch.setattr(tune, "load", lambda key, names: None)  # nor is there one on disk, afterwards
    monkeypatch.setattr(deciding, "lock", Lock())
    monkeypatch.setattr(tune, "measure", measured)
    other = threading.Thread(target=forward)
    other.start()
    forward()
    other.join()
    assert len(table.measured) == len(deciding.decisions) == 1


def test_an_empty_batch_decides_nothing(table, monkeypatch):
    monkeypatch.setattr(deciding, "SMALL", 1e-3)
    for impl in ("auto", "cpu"):
        assert ops.linear(X[:0], W, None, MASK, BLOCK, "masked", None, impl).shape == (0, 48)
    assert not deciding.small and not deciding.decisions
