"""Token ranges on threads of our own, one matmul thread each: PyTorch's own threads inside thousands of small matmuls wait for each other on a busy machine.

The ranges, and the order in which partial sums are added, depend on `torch.get_num_threads()` alone, so results do not depend on who was faster. Several
threads of a program take turns. While jobs run, PyTorch's count of threads is 1 for the whole process, because MKL knows no other: dense matmuls of another
thread have one thread so long, and a thread that first uses PyTorch in that moment keeps one, as after any `torch.set_num_threads(1)`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise

import torch

from .openmp import dismiss

LEAST = 256  # tokens that are worth a thread
_lock = threading.RLock()  # the handler of a signal runs on the thread that it interrupts, and may run the model, too
_pool: ThreadPoolExecutor | None = None
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
        torch.set_num_threads(1)
        try:
            yield threads
        finally:
            torch.set_num_threads(threads)


def run(jobs: list[Callable[[], None]]) -> None:
    """Run all jobs side by side, inside `one_thread`; the first one on the caller's thread."""
    if len(jobs) > 1:  # a job alone leaves them a core
        dismiss()
    inference, waiting = torch.is_inference_mode_enabled(), list[Future[None]]()
    try:
        for job in jobs[1:]:
            waiting.append(_sized(len(jobs) - 1).submit(_quietly, job, inference))
    except RuntimeError:  # the program ends: no pool takes work any more, though other threads, or what runs at exit, may
        pass
    try:
        for job in (jobs[0], *jobs[1 + len(waiting) :]):
            _quietly(job, inference)
    finally:
        for w in waiting:
            w.exception()  # wait for all, whatever happened
    for w in waiting:
        w.result()


def _quietly(job: Callable[[], None], inference: bool) -> None:
    with torch.inference_mode(inference), torch.no_grad():  # autograd's modes belong to a thread
        job()


def _sized(workers: int) -> ThreadPoolExecutor:
    """The pool, with at least so many threads, all of them begun: one that began later would set the process's count of threads then."""
    global _pool, _workers
    if _pool is None or _workers < workers:
        if _pool is not None:
            _pool.shutdown()
        _pool, _workers = ThreadPoolExecutor(workers, "fxmask", initializer=torch.set_num_threads, initargs=(1,)), workers
        together = threading.Barrier(workers)
        try:
            for begun in [_pool.submit(together.wait) for _ in range(workers)]:
                begun.result()
        except RuntimeError:
            together.abort()  # those that have begun wait for ever else
            _pool = None
            raise
    return _pool


def _after_fork() -> None:
    """Threads do not follow a fork, and a lock that somebody held would never be released."""
    global _lock, _pool
    _lock, _pool = threading.RLock(), None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
