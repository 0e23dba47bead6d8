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
Task = tuple[Job, bool, "Turn"]  # with the caller's inference mode; None instead of a task: end
_lock = threading.RLock()  # the handler of a signal runs on the thread that it interrupts, and may run the model, too
_tasks: SimpleQueue[Task | None] = SimpleQueue()  # of C: a handler that raises in the middle of a put or a get leaves it whole, unlike an executor's locks
_threads: list[SimpleQueue[None]] = []  # for each, what it wakes when it ends


class Turn:
    """What the caller of `run` and the threads that work for it tell each other."""

    def __init__(self) -> None:
        self.begun, self.ended = list[None](), list[BaseException | None]()  # an entry a job: that it was taken; its error, or None
        self.over = False  # an error has come: jobs that are taken from now on are left
        self.woken: SimpleQueue[None] = SimpleQueue()  # at each end


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
    turn, there, handed_over = Turn(), 0, 0
    if len(jobs) > 1:  # a job alone leaves them a core
        dismiss()
        there = _sized(len(jobs) - 1)
    inference, grad = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
    try:
        torch._C._set_grad_enabled(False)  # a context manager may be left between its two halves
        for job in jobs[1:] if there else ():
            _tasks.put((job, inference, turn))
        handed_over = len(jobs) - 1 if there else 0
        for job in jobs[:1] if there else jobs:
            job()
        _wait(turn, handed_over)
    except BaseException:
        turn.over = not handed_over  # nobody knows how many there are
        _wait(turn, handed_over)
        raise
    finally:
        torch._C._set_grad_enabled(grad)
    for error in filter(None, turn.ended):
        raise error


def _wait(turn: Turn, count: int) -> None:
    """Until so many jobs have ended, and all that have begun; what a handler raises meanwhile is raised then."""
    raised: BaseException | None = None
    while True:
        try:
            while len(turn.ended) < max(count, len(turn.begun)):
                turn.woken.get(timeout=0.1)  # a call may be lost, where a handler raises as it returns
            break
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
        job, inference, turn = task
        turn.begun.append(None)  # before a look at `over`, which the caller sets before it looks at this
        try:
            if not turn.over:
                with torch.inference_mode(inference), torch.no_grad():  # autograd's modes belong to a thread
                    job()
        except BaseException as error:  # the caller's to raise
            turn.ended.append(error)
        else:
            turn.ended.append(None)
        turn.woken.put(None)
        del task, job, turn  # what they hold, before the next one comes
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
