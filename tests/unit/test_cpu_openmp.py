"""OpenMP's idle threads beside the pool of the CPU implementation: told to go, begun anew, and no child of a fork waits for them."""

import ctypes
import os
import re
import signal
import sys
import time

import pytest
import torch
from unit.threads import FORKS, set_threads

from fxmask.kernels.cpu import openmp, pool


def tasks():
    return len(os.listdir("/proc/self/task"))


def wait_for(count):
    """Threads that were told to go take a moment."""
    end = time.monotonic() + 10
    while tasks() != count:
        assert time.monotonic() < end, f"{tasks()} threads, not {count}"
        time.sleep(0.01)


@pytest.mark.skipif(not openmp._pauses(), reason="no OpenMP 5 runtime that /proc names")
def test_openmps_idle_threads_are_told_to_go():
    x, two = torch.zeros(1 << 20), [lambda: None, lambda: None]
    with set_threads(2):
        for leave in (openmp.dismiss, lambda: pool.run(two)):
            x.add(1.0)
            pool.run(two)  # the pool's own threads are there from here on
            few = tasks()
            x.add(1.0)
            wait_for(few + 1)  # PyTorch's second thread, which waits busily
            pool.run(two[:1])
            assert tasks() == few + 1  # and may, beside one range
            leave()
            wait_for(few)
        assert torch.equal(x.add(1.0), torch.ones(1 << 20))  # it begins anew


@pytest.mark.parametrize("proc", [True, False])
def test_without_such_a_runtime_nothing_happens(monkeypatch, tmp_path, proc):
    """Nor where there is no /proc, as on macOS."""
    monkeypatch.setattr(openmp, *(("RUNTIME", re.compile("no such runtime")) if proc else ("Path", lambda _: tmp_path / "nothing")))
    openmp._pauses.cache_clear()
    try:
        assert openmp._pauses() == ()
        openmp.dismiss()
    finally:
        openmp._pauses.cache_clear()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings(*FORKS)
@pytest.mark.parametrize("unseen", [False, True])
def test_a_forked_child_does_not_wait_for_its_parents_threads(unseen, monkeypatch):
    with set_threads(2):
        torch.zeros(1 << 20).add(1.0)
        made = ctypes.PyDLL(None).fork() if unseen else os.fork()  # that of C runs no hooks of Python
        if not made:
            try:
                openmp.dismiss()
            finally:
                os._exit(sys.exc_info()[0] is not None)
    end = time.monotonic() + 10
    while (found := os.waitpid(made, os.WNOHANG))[0] == 0:
        if time.monotonic() > end:
            os.kill(made, signal.SIGKILL)
            os.waitpid(made, 0)
            pytest.fail("the child hangs")
        time.sleep(0.01)
    assert found[1] == 0


def test_a_forked_process_ends_no_threads_which_it_has_on_record_alone(monkeypatch):
    ended = []
    monkeypatch.setattr(openmp, "_pauses", lambda: (ended.append,))
    monkeypatch.setattr(openmp, "_others", lambda: True)
    openmp.dismiss()
    monkeypatch.setattr(openmp, "_forked", True)
    openmp.dismiss()
    assert ended == [openmp.SOFT]
