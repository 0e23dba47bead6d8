"""A signal's handler that raises while the CPU's threads work, as Ctrl-C does and a DataLoader whose worker was killed: training may go on after it."""

import os
import subprocess
import sys
from queue import SimpleQueue

import pytest

from fxmask.kernels.cpu import pool


def program(text):
    """A process that runs it, when it has ended."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    return subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False, env=env, timeout=200)


INTERRUPTED = """
import signal, sys, time
from functools import partial
import torch
from fxmask.kernels.cpu import implementation, pool
from fxmask.kernels.cpu.plans import Plan
class Stop(ERROR): pass
def stop(*_): raise Stop("a handler")
signal.signal(signal.SIGALRM, stop)
torch.set_num_threads(4)
x, w, mask = torch.randn(2048, 64), torch.randn(64, 64), torch.eye(2) > 0
def run(): return implementation.masked_linear(x, w, None, mask, (32, 32), Plan("rows", 64))
first, hits, end, took = run(), 0, time.monotonic() + 6, time.perf_counter()
run()
took = time.perf_counter() - took
i = 0
while time.monotonic() < end or not hits:
    i += 1
    if i % 20 == 0:
        pool._after_fork()  # threads anew, which take longest to begin
    try:
        signal.setitimer(signal.ITIMER_REAL, max(1e-5, took * (i % 97) / 97))
        run()
        signal.setitimer(signal.ITIMER_REAL, 0)
    except Stop:
        hits += 1
    signal.setitimer(signal.ITIMER_REAL, 0)
    assert torch.get_num_threads() == 4 and pool._lock.acquire(blocking=False)
    pool._lock.release()
    assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled() and (x.requires_grad_() * 2).requires_grad
    x.requires_grad_(False)
    assert torch.equal(run(), first)
late, busy = 0, 0
for i in range(400):  # nobody works on when the error comes
    begun, ended = [0] * 4, [0] * 4
    def job(k, begun=begun, ended=ended):
        begun[k] += 1
        time.sleep(0.002)
        ended[k] += 1
    try:
        signal.setitimer(signal.ITIMER_REAL, 1e-5 + 4e-3 * (i % 97) / 97)
        with pool.one_thread():
            pool.run([partial(job, k) for k in range(4)])
        signal.setitimer(signal.ITIMER_REAL, 0)
    except Stop:
        late, busy = late + 1, busy + (begun[1:] != ended[1:])
    signal.setitimer(signal.ITIMER_REAL, 0)
    assert max(begun) <= 1
assert late > 100 and busy <= 4, (late, busy)  # the few windows between two instructions
print("hit", hits > 0)
"""


@pytest.mark.parametrize("error", ["RuntimeError", pytest.param("BaseException", marks=pytest.mark.slow)])
def test_a_handler_that_raises_leaves_the_pool_whole(error):
    """Wherever it comes: no thread waits for ever, none is lost, nothing is computed twice, and the error is the caller's."""
    done = program(INTERRUPTED.replace("ERROR", error))
    assert (done.returncode, done.stdout.strip()) == (0, "hit True"), done.stderr


ENDS = """
import os, signal, sys, threading, time
import torch
from fxmask.kernels.cpu import pool
torch.set_num_threads(2)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
a, begun = torch.randn(1000, 1000), threading.Event()
def work():
    begun.set()
    for _ in range(40): a @ a
threading.Thread(target=lambda: (begun.wait(), time.sleep(0.2), os.kill(os.getpid(), signal.SIGTERM)), daemon=True).start()
with pool.one_thread():
    pool.run([lambda: None, work])
"""


def test_a_process_that_is_told_to_end_while_it_waits_for_its_threads():
    """One that is inside of PyTorch when the interpreter goes would abort it."""
    done = program(ENDS)
    assert (done.returncode, done.stderr) == (3, "")


def test_without_threads_the_caller_does_all(monkeypatch):
    """Where the system gives none, as under a limit of processes; another error, a handler's, is no such thing."""

    def refused(text):
        def start(*_):
            raise RuntimeError(text)

        return start

    done, tasks = [], SimpleQueue()
    monkeypatch.setattr(pool, "_threads", [])
    monkeypatch.setattr(pool, "_tasks", tasks)
    monkeypatch.setattr(pool, "start_new_thread", refused("can't start new thread"))
    pool.run([lambda: done.append(1), lambda: done.append(2), lambda: done.append(3)])
    assert done == [1, 2, 3] and tasks.empty()  # a thread that begins later would do them again
    monkeypatch.setattr(pool, "start_new_thread", refused("DataLoader worker is killed"))
    with pytest.raises(RuntimeError, match="DataLoader worker is killed"):
        pool.run([lambda: done.append(4), lambda: done.append(5)])
    assert done == [1, 2, 3]
