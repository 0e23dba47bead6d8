"""The CPU implementation beside other threads and processes: the same bits, no thread lost, no lock kept."""

import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset
from unit.threads import FORKS, set_threads

import fxmask
from fxmask.kernels import ops
from fxmask.kernels.cpu import deciding, implementation, pool, score
from fxmask.kernels.cpu.plans import COLUMNS_512, ROWS_512, ROWS_512X3, RUNS_2048, Plan

BLOCK = (32, 32)
PLANS = (Plan("rows", 256), Plan("runs", 512), Plan("rows", 512, 3), Plan("columns", 256), Plan("rows", 7), Plan("columns", 100))


@pytest.fixture(params=[1, 2, 3])
def threads(request):
    with set_threads(request.param):
        yield request.param


def operands(tokens=1200, n=160, k=224, seed=0):
    g = torch.Generator().manual_seed(seed)
    x, w, bias, gy = (torch.randn(s, generator=g) for s in ((tokens, k), (n, k), (n,), (tokens, n)))
    return x, w, bias, gy, torch.rand(n // 32, k // 32, generator=g) < 0.4


def results(o, plans=PLANS):
    """Everything that the plans compute."""
    x, w, bias, gy, mask = o
    found = []
    for p in plans:
        if p.layout != "columns":
            found += [implementation.masked_linear(x, w, bias, mask, BLOCK, p), implementation.masked_linear_dx(gy, w, mask, BLOCK, p)]
        found += implementation.backward(gy, x, w, mask, BLOCK, p._replace(group=1)) if p.layout != "runs" else ()
    return found


def same(a, b):
    return len(a) == len(b) and all(map(torch.equal, a, b))


@contextmanager
def busy_pool():
    """Another thread works in the pool."""
    inside, done = threading.Event(), threading.Event()

    def hold():
        with pool._lock:
            inside.set()
            done.wait(60)

    other = threading.Thread(target=hold)
    other.start()
    inside.wait(60)
    try:
        yield
    finally:
        done.set()
        other.join()


def is_free():
    """Whether nobody holds the pool's lock, which the thread that holds it may take again."""
    found = []
    other = threading.Thread(target=lambda: found.append(pool._lock.acquire(blocking=False)) or (found[0] and pool._lock.release()))
    other.start()
    other.join()
    return found[0]


def test_the_same_bits_from_run_to_run(threads):
    o = operands()
    first = results(o, (ROWS_512, ROWS_512X3, RUNS_2048, COLUMNS_512, *PLANS))
    for _ in range(3):
        assert same(results(o, (ROWS_512, ROWS_512X3, RUNS_2048, COLUMNS_512, *PLANS)), first)
    assert torch.get_num_threads() == threads


def test_three_threads_compute_what_one_does():
    """dW is the sum of all their shares."""
    *floats, mask = operands()
    o = *(t.double() for t in floats), mask
    with set_threads(1):
        expected = results(o)
    with set_threads(3):
        torch.testing.assert_close(results(o), expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("size", [pytest.param((1200, 160, 224), id="small"), pytest.param((4096, 256, 512), id="large", marks=pytest.mark.slow)])
def test_the_same_bits_whether_the_pool_is_free_or_busy(threads, size):
    o, stop = operands(*size), threading.Event()
    free = results(o)

    def others():
        torch.get_num_threads()
        while not stop.is_set():
            results(o)

    busy = threading.Thread(target=others)
    busy.start()
    try:
        assert same(results(o), free) and same(results(o), free)
    finally:
        stop.set()
        busy.join(120)
    assert torch.get_num_threads() == threads


def test_ranges_are_equal_shares_of_at_least_256_tokens(threads):
    for tokens in (1, 255, 256, 511, 512, 1000, 100_001):
        found = pool.ranges(tokens, threads)
        assert [found[0][0], found[-1][1]] == [0, tokens] and all(a[1] == b[0] for a, b in pairwise(found))
        sizes = [b - a for a, b in found]
        assert len(found) == max(1, min(threads, tokens // pool.LEAST)) and max(sizes) - min(sizes) <= 1


def alone(jobs):
    with pool.one_thread() as count:
        assert (count, torch.get_num_threads()) == (3, 1)
        pool.run(jobs)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_an_error_in_a_job_is_raised_when_all_have_ended(which):
    ended = []

    def good():
        time.sleep(0.05)
        ended.append(torch.is_grad_enabled())

    def bad():
        raise ValueError("a job")

    jobs = [good, good, good]
    jobs[which] = bad
    with set_threads(3):
        for _ in range(2):
            ended.clear()
            with pytest.raises(ValueError, match="a job"):
                alone(jobs)
            assert ended == [False, False] and torch.get_num_threads() == 3 and is_free()
        o = operands()
        assert same(results(o), results(o))


def from_threads(f, n):
    """What n Python threads compute at once; the first error of any."""
    start, found = threading.Barrier(n), [None] * n

    def work(i):
        torch.get_num_threads()  # the thread's count is taken over when it is first asked for: before any of them works
        start.wait(60)
        try:
            found[i] = f(i)
        except BaseException as e:
            found[i] = e

    workers = [threading.Thread(target=work, args=(i,)) for i in range(n)]
    for t in workers:
        t.start()
    for t in workers:
        t.join(120)
    for e in found:
        if isinstance(e, BaseException):
            raise e
    return found


def test_eight_python_threads_at_once(threads):
    given = [operands(seed=i) for i in range(8)]
    serial = [results(o, PLANS[:4]) for o in given]
    for _ in range(2):
        found = from_threads(lambda i: (results(given[i], PLANS[:4]), torch.get_num_threads()), 8)
        assert [f[1] for f in found] == [threads] * 8 and torch.get_num_threads() == threads
        assert [same(f[0], s) for f, s in zip(found, serial, strict=True)] == [True] * 8


def child(f, seconds=30):
    """The exit status of a forked process that ends with 0 where `f` says so; a process that does not end fails."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            status = 0 if f() else 3
        finally:
            os._exit(status)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise AssertionError("the forked process did not end")


@pytest.mark.filterwarnings(FORKS[0])
def test_forked_processes_compute_the_same():
    """With the pool at work there, too: its threads are gone, its lock may be held by a thread that is gone."""
    o = operands()
    with set_threads(2):
        expected = results(o)

    def again():
        torch.set_num_threads(1)  # as PyTorch's own data workers do: its OpenMP threads do not survive a fork, in any op
        pool.ranges = lambda count, *_: [(0, count // 2), (count // 2, count)]  # of this process alone
        return same(results(o), expected) and is_free()

    assert child(again) == 0
    with busy_pool():
        assert child(lambda: again() and child(again) == 0) == 0
    with set_threads(2):
        assert same(results(o), expected)


def digest():
    """Of everything that the plans compute, by two threads."""
    with set_threads(2):
        return hashlib.sha256(b"".join(t.numpy().tobytes() for t in results(operands()))).hexdigest()


def test_another_process_computes_the_same_bits():
    code = "from unit.test_cpu_pool import digest; print(digest())"
    root = Path(__file__).parents[2]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(root), str(root / "tests")])}
    other = subprocess.run([sys.executable, "-c", code], cwd=root, env=env, capture_output=True, text=True, timeout=120)
    assert other.returncode == 0, other.stderr
    assert other.stdout.strip() == digest()


@pytest.mark.filterwarnings(FORKS[0])
def test_a_forked_process_decides_though_another_thread_was_deciding():
    x, w, bias, gy, mask = operands()
    inside, done = threading.Event(), threading.Event()

    def hold():
        with deciding.lock:
            inside.set()
            done.wait(60)

    def decide():
        torch.set_num_threads(1)
        deciding.decisions.clear()
        ops.linear(x, w, bias, mask, BLOCK, "masked", None, "cpu")
        return len(deciding.decisions) == 1

    other = threading.Thread(target=hold)
    other.start()
    inside.wait(60)
    try:
        assert child(decide) == 0
    finally:
        done.set()
        other.join()


class Rows(Dataset):
    """Samples that a masked model of the worker's own makes."""

    def __init__(self):
        torch.manual_seed(1)
        self.x, self.model = torch.randn(6, 700, 64), masked_model()

    def __len__(self):
        return len(self.x)

    @torch.no_grad()
    def __getitem__(self, i):
        return self.x[i], self.model(self.x[i]).argmax(-1)


def masked_model():
    model = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.GELU(), torch.nn.Linear(96, 32))
    return fxmask.apply(model, ratio=0.5, block=(16, 16), impl="cpu")


def train(workers):
    data = Rows()
    torch.manual_seed(2)
    model, losses = masked_model(), []
    optimiser = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        for x, y in DataLoader(data, batch_size=2, num_workers=workers, multiprocessing_context="fork" if workers else None, timeout=60 if workers else 0):
            loss = torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            losses.append(loss.item())
    return losses


@pytest.mark.filterwarnings(*FORKS)
def test_a_training_loop_with_forked_data_workers():
    with set_threads(2):
        plain = train(0)
        assert train(2) == plain and plain[-1] < plain[0]


def test_training_steps_of_several_threads():
    with set_threads(2):
        o = operands()

        def step(_):
            x, w = o[0].clone().requires_grad_(), o[1].clone().requires_grad_()
            y = ops.linear(x, w, o[2], o[4], BLOCK, "masked", None, "cpu")
            return [y.detach(), *torch.autograd.grad(y, (x, w), o[3])]

        expected = step(0)
        assert [same(found, expected) for found in from_threads(step, 4)] == [True] * 4


def test_small_masks_leave_the_count_of_threads_alone(monkeypatch):
    """Another thread's dense product would be rounded otherwise while the count is 1."""
    counts = []
    monkeypatch.setattr(torch, "set_num_threads", counts.append)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    score.block_keys(torch.randn(128, 256), (16, 16), "fro")
    assert counts == []
    score.block_keys(torch.randn(129, 256), (16, 16), "fro")
    assert counts == [1, 2]


def test_inference_mode_on_several_threads(threads):
    """It belongs to a thread, as no_grad does: what others write is the caller's."""
    x, w, bias, _, mask = operands()
    args = x, w, bias, mask, BLOCK, Plan("rows", 256)
    with torch.inference_mode():
        found = implementation.masked_linear(*args)
    assert found.is_inference()
    again = implementation.masked_linear(*args)
    assert not again.is_inference() and torch.equal(found, again)


def test_a_signals_handler_may_run_the_model():
    """It runs on the thread that it interrupts, which may be the one that holds the lock."""
    o = operands()
    with set_threads(2):
        first = results(o)
        with pool._lock:
            assert same(results(o), first)


AT_THE_END = """
import atexit, sys, threading, time
import torch
from fxmask.kernels.cpu import implementation
from fxmask.kernels.cpu.plans import Plan
torch.set_num_threads(2)
x, w, mask = torch.randn(1200, 64), torch.randn(64, 64), torch.eye(2) > 0
def run(): return implementation.masked_linear(x, w, None, mask, (32, 32), Plan("rows", 256))
first = run()
def later():
    threading.main_thread().join()
    print("thread", torch.equal(run(), first))
threading.Thread(target=later).start()
atexit.register(lambda: print("exit", torch.equal(run(), first)))
"""


def test_work_after_the_main_thread_has_ended():
    """A pool takes none any more; the thread that wants it does it."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run([sys.executable, "-c", AT_THE_END], capture_output=True, text=True, check=False, env=env, timeout=200)
    assert (done.returncode, done.stdout.split("\n")) == (0, ["thread True", "exit True", ""]), done.stderr
