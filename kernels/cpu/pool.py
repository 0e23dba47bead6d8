"""Token ranges on threads of our own, one matmul thread each: PyTorch's own threads inside thousands of small matmuls wait for each other on a busy machine.

The ranges, and the order in which partial sums are added, depend on `torch.get_num_threads()` alone, so results do not depend on who was faster. Several
threads of a program take turns. While jobs run, PyTorch's count of threads is 1 for the whole process, because MKL knows no other: dense matmuls of another
thread have one thread so long, and a thread that first uses PyTorch in that moment keeps one, as after any `torch.set_num_threads(1)`.
"""

from __future__ import annotations

import atexit
import os
import threading
from _thread import start_new_thread
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from queue import Empty, SimpleQueue

import torch

from .openmp import dismiss

LEAST = 256  # tokens that are worth a thread
Job = Callable[[], None]
Ended = list[BaseException | None]  # a job that has ended has its error here, or None
Task = tuple[Job, bool, Ended, "SimpleQueue[None]"]  # with the caller's inference mode, and what tells and wakes the caller; None: end
_lock = threading.RLock()  # the handler of a signal runs on the thread that it interrupts, and may run the model, too
_tasks: SimpleQueue[Task | None] = SimpleQueue()  # of C: a handler that raises in the middle of a put or a get leaves it whole, unlike an executor's locks
_threads: list[SimpleQueue[None]] = []  # for each, what it wakes when it ends


def ranges(count: int, threads: int, least: int = LEAST) -> list[tuple[int, int]]:
    """Equal shares of tokens (or of block rows), one for each thread, of at least `least`."""
    n = max(1, min(threads, count // least))
    bounds = [count * i // n for i in range(n + 1)]
    return list(pairwise(bounds))


@contextmanager
def one_thread() -> Iterator[int]:
    """Inside, PyTorch has one thread; gives how many it had, for `ranges`. Around whole ops: PyTorch's own threads, once woken, wait busily for more work."""
    threads = torch.get_num_threads()
    if threads == 1:
        yield 1
        return
    with _lock:
        try:
            torch.set_num_threads(1)
            yield threads
        finally:
            torch.set_num_threads(threads)


def run(jobs: list[Job]) -> None:
    """Run all jobs side by side, inside `one_thread`, without gradients; the first one on the caller's thread.

    A handler of a signal may raise anywhere in here: what was handed over is waited for, and the next call finds everything as it should be. (A job that was
    just being handed over may end later; it writes into what nobody reads.)
    """
    ended, woken = Ended(), SimpleQueue[None]()
    sent, there = 0, 0
    if len(jobs) > 1:  # a job alone leaves them a core
        dismiss()
        there = _sized(len(jobs) - 1)
    inference, grad = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
    try:
        torch._C._set_grad_enabled(False)  # a context manager may be left between its two halves
        for job in jobs[1:] if there else ():
            _tasks.put((job, inference, ended, woken))
            sent += 1  # after it: to wait for one that was never sent would be for ever
        for job in jobs[:1] if there else jobs:
            job()
    finally:
        torch._C._set_grad_enabled(grad)
        _wait(sent, ended, woken)  # whatever happened
    for error in filter(None, ended):
        raise error


def _wait(count: int, ended: Ended, woken: SimpleQueue[None]) -> None:
    """Until so many jobs have ended; what a handler raises meanwhile is raised then."""
    raised: BaseException | None = None
    while len(ended) < count:
        try:
            woken.get(timeout=0.1)  # a call may be lost, where a handler raises as it returns
        except Empty:
            pass
        except BaseException as error:
            raised = error
    if raised is not None:
        raise raised


def _work(tasks: SimpleQueue[Task | None], begun: SimpleQueue[None], gone: SimpleQueue[None]) -> None:
    torch.set_num_threads(1)
    begun.put(None)
    while (task := tasks.get()) is not None:
        job, inference, ended, woken = task
        try:
            with torch.inference_mode(inference), torch.no_grad():  # autograd's modes belong to a thread
                job()
        except BaseException as error:  # the caller's to raise
            ended.append(error)
        else:
            ended.append(None)
        woken.put(None)
        del task, job, ended, woken  # what they hold, before the next one comes
    gone.put(None)


def _sized(workers: int) -> int:
    """How many threads there are: at least so many, all of them begun, as one that began later would set the process's count of threads then.

    Fewer, or none, where the system gives no more, and where the program ends: others of its threads, or what runs at exit, may still work.
    """
    while len(_threads) < workers:
        begun, gone = SimpleQueue[None](), SimpleQueue[None]()
        try:
            start_new_thread(_work, (_tasks, begun, gone))  # a threading.Thread's start makes a KeyError of what a handler raises
        except RuntimeError as error:
            if "new thread" not in str(error):  # a handler's
                raise
            break
        begun.get()
        _threads.append(gone)
    return len(_threads)


@atexit.register
def _end() -> None:
    """Let the threads end before the process does: one that is inside of PyTorch then aborts it. A later call begins new ones."""
    global _tasks, _threads
    tasks, ending = _tasks, _threads
    _tasks, _threads = SimpleQueue(), []
    for gone in ending:
        while gone.empty():
            tasks.put(None)  # again, where one whose beginning was interrupted has taken it
            with suppress(Empty):
                gone.put(gone.get(timeout=0.1))


def _after_fork() -> None:
    """Threads do not follow a fork, and a lock that somebody held would never be released."""
    global _lock, _tasks, _threads
    _lock, _tasks, _threads = threading.RLock(), SimpleQueue(), []


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
