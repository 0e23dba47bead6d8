"""Token ranges on threads of our own, one matmul thread each: PyTorch's own threads inside thousands of small matmuls wait for each other on a busy machine.

The ranges, and the order in which partial sums are added, depend on `torch.get_num_threads()` alone, so results do not depend on who was faster. Several
threads of a program take turns. While jobs run, PyTorch's count of threads is 1 for the whole process, because MKL knows no other: dense matmuls of another
thread have one thread so long, and a thread that first uses PyTorch in that moment keeps one, as after any `torch.set_num_threads(1)`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from queue import SimpleQueue

import torch

from .openmp import dismiss

LEAST = 256  # tokens that are worth a thread
Job = Callable[[], None]
Task = tuple[Job, bool, "SimpleQueue[BaseException | None]"]  # with the caller's inference mode, and where the outcome goes
_lock = threading.RLock()  # the handler of a signal runs on the thread that it interrupts, and may run the model, too
_tasks: SimpleQueue[Task] = SimpleQueue()  # of C: a handler that raises in the middle of a put or a get leaves it whole, unlike an executor's locks
_workers = 0


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

    A handler of a signal may raise anywhere in here: what has begun is waited for, and the next call finds everything as it should be.
    """
    outcomes: SimpleQueue[BaseException | None] = SimpleQueue()
    sent, there = 0, 0
    if len(jobs) > 1:  # a job alone leaves them a core
        dismiss()
        there = _sized(len(jobs) - 1)
    inference, grad = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
    try:
        torch._C._set_grad_enabled(False)  # a context manager may be left between its two halves
        for job in jobs[1:] if there else ():
            _tasks.put((job, inference, outcomes))
            sent += 1  # after it: to wait for one that was never sent would be for ever
        for job in jobs[:1] if there else jobs:
            job()
    finally:
        torch._C._set_grad_enabled(grad)
        errors = [outcomes.get() for _ in range(sent)]  # whatever happened
    for error in filter(None, errors):
        raise error


def _work(tasks: SimpleQueue[Task], begun: SimpleQueue[None]) -> None:
    """A thread's life: as a daemon, it ends with the process."""
    torch.set_num_threads(1)
    begun.put(None)
    while True:
        job, inference, outcomes = tasks.get()
        try:
            with torch.inference_mode(inference), torch.no_grad():  # autograd's modes belong to a thread
                job()
        except BaseException as error:  # the caller's to raise
            outcomes.put(error)
        else:
            outcomes.put(None)
        del job, outcomes  # what they hold, before the next one comes


def _sized(workers: int) -> int:
    """How many threads there are: at least so many, all of them begun, as one that began later would set the process's count of threads then; or none."""
    global _workers
    while _workers < workers:
        begun: SimpleQueue[None] = SimpleQueue()
        try:
            threading.Thread(target=_work, args=(_tasks, begun), name=f"fxmask-{_workers}", daemon=True).start()
        except RuntimeError:
            if threading.main_thread().is_alive():  # a handler's, or the system's limit
                raise
            break  # the program ends: some versions of Python begin no thread any more, though other threads, or what runs at exit, may work
        begun.get()
        _workers += 1
    return _workers


def _after_fork() -> None:
    """Threads do not follow a fork, and a lock that somebody held would never be released."""
    global _lock, _tasks, _workers
    _lock, _tasks, _workers = threading.RLock(), SimpleQueue(), 0


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
