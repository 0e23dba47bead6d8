"""The threads of the CPU implementation's pool: what they take, leave, keep and tell, over a queue that the test holds."""

import os
import threading
import weakref
from queue import Empty, SimpleQueue

import pytest
import torch
from unit.test_cpu_pool import child
from unit.threads import FORKS

from fxmask.kernels.cpu import pool


class Tasks:
    """The queue of a pool, which does first what the test wants."""

    def __init__(self, before_get=lambda: None, before_put=lambda task: True):
        self.queue, self.before_get, self.before_put = SimpleQueue(), before_get, before_put

    def get(self):
        self.before_get()
        return self.queue.get()

    def put(self, task):
        if self.before_put(task):
            self.queue.put(task)


@pytest.fixture
def begin(monkeypatch):
    """Begins a pool of the test's own, which ends with it."""
    threads = []

    def of(tasks):
        monkeypatch.setattr(pool, "_tasks", tasks)
        monkeypatch.setattr(pool, "_threads", threads)
        return tasks

    yield of
    for _ in threads:
        pool._tasks.queue.put(None)
    for gone in threads:
        gone.get(timeout=60)


def test_jobs_that_nobody_has_begun_when_a_handler_raises_are_left(begin):
    """Their caller has gone on by the time that a thread takes them."""
    left, done = threading.Event(), []

    def put(task):
        tasks.queue.put(task)
        raise KeyError("a handler")

    tasks = begin(Tasks(lambda: left.wait(60), put))
    with pytest.raises(KeyError, match="a handler"):
        pool.run([lambda: done.append(0), lambda: done.append(1)])
    tasks.queue.put(None)
    left.set()
    pool._threads.pop().get(timeout=60)
    assert done == []


def wake(monkeypatch, queue):
    """Have callers wait on a queue of the test's own."""

    def turn(made=pool.Turn):
        found = made()
        found.woken = queue
        return found

    monkeypatch.setattr(pool, "Turn", turn)


def test_a_job_that_has_begun_when_a_handler_raises_is_waited_for(begin, monkeypatch):
    """Though nobody knows how many were handed over."""
    begun, waits, done = threading.Event(), threading.Event(), []

    class Waits(SimpleQueue):
        def get(self, timeout):
            waits.set()
            return super().get(timeout=timeout)

    def job():
        begun.set()
        waits.wait(60)
        done.append("job")

    def put(task):
        tasks.queue.put(task)
        begun.wait(60)
        raise KeyError("a handler")

    wake(monkeypatch, Waits())
    tasks = begin(Tasks(before_put=put))
    try:
        with pytest.raises(KeyError, match="a handler"):
            pool.run([lambda: None, job])
        assert done == ["job"]
    finally:
        waits.set()


def test_an_idle_thread_keeps_nothing(begin):
    """Nor what its last job held, as the operands of a layer."""
    idle, first = threading.Event(), iter([True])
    begin(Tasks(lambda: next(first, None) or idle.set()))
    jobs = [lambda: None, lambda: None]
    held = weakref.ref(jobs[1])
    pool.run(jobs)
    del jobs
    assert idle.wait(60) and held() is None


class Woken(SimpleQueue):
    """Waits until it is woken, however often one asks by oneself."""

    def get(self, timeout):
        try:
            return super().get(timeout=20)
        except Empty:
            raise AssertionError("nobody has woken the caller") from None


@pytest.mark.parametrize("grad", [True, False])
def test_a_thread_that_has_ended_wakes_the_caller(begin, monkeypatch, grad):
    """Who waits looks by himself ten times a second: a step has many such waits. And the caller's gradients are on or off as before."""
    wake(monkeypatch, Woken())
    begin(Tasks())
    with torch.set_grad_enabled(grad):
        pool.run([lambda: None, threading.Event().is_set])
        assert torch.is_grad_enabled() == grad


def test_an_error_of_any_kind_ends_a_job_and_not_its_thread(begin):
    def job():
        raise SystemExit("a job")

    begin(Tasks())
    for _ in range(2):
        with pytest.raises(SystemExit, match="a job"):
            pool.run([lambda: None, job])
    assert len(pool._threads) == 1


def test_at_the_end_nobody_takes_the_place_of_a_thread(monkeypatch):
    """One whose beginning was interrupted is on no list, and takes an end that was meant for another."""
    others = iter([True])
    monkeypatch.setattr(pool, "_tasks", Tasks(before_put=lambda task: not next(others, None)))
    monkeypatch.setattr(pool, "_threads", [])
    assert pool._sized(1) == 1
    (gone,) = pool._threads
    pool._end()
    assert not gone.empty() and not pool._threads


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings(FORKS[0])
def test_a_forked_process_takes_no_task_of_its_parents(monkeypatch):
    done, tasks = [], SimpleQueue()
    tasks.put((lambda: done.append("the parent's"), False, pool.Turn()))
    monkeypatch.setattr(pool, "_tasks", tasks)
    assert child(lambda: pool.run([lambda: None, lambda: done.append("its own")]) is None and done == ["its own"]) == 0
