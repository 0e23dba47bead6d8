"""What several threads do to one model at once, or beside each other: masks stay, whoever leaves fxmask.dense first."""

import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType

import pytest
import torch
from sample_models import mlp

import fxmask
from fxmask import steps
from fxmask.errors import StateError
from fxmask.passes.state import rebuild


def masked():
    model = fxmask.apply(mlp(), ratio=0.75, block=(16, 16), refresh=0)
    return model, fxmask.masks(model)


def test_two_threads_that_enter_at_once(monkeypatch):
    """One is refused; the mask that the other one lays aside is the layer's own."""
    model, before = masked()
    honest, begun, refused = steps.sites_in_force, threading.Barrier(2), threading.Event()

    def slow(*args):
        found = honest(*args)
        time.sleep(0.05)
        return found

    monkeypatch.setattr(steps, "sites_in_force", slow)

    def work():
        begun.wait()
        try:
            with fxmask.dense(model):
                refused.wait(10)
        except StateError as error:
            refused.set()
            return str(error)
        return ""

    with ThreadPoolExecutor(2) as pool:
        first, second = (f.result() for f in [pool.submit(work) for _ in range(2)])
    assert (first == "") != (second == "") and "fxmask.dense inside fxmask.dense" in first + second
    after = fxmask.masks(model)
    assert all(torch.equal(after[n], m) for n, m in before.items())


def test_a_rebuild_that_is_under_way_at_the_end():
    """It switches the masks on for as long as it takes; what it puts back is not the state of before the end."""
    model, _ = masked()
    jobs = [rebuild.Job(m, m.weight) for m in model if hasattr(m, "_fxmask_mask")]
    under_way = threading.Event()

    def slow(some):
        under_way.set()
        time.sleep(0.1)
        rebuild.computed(some)

    with fxmask.dense(model):
        other = threading.Thread(target=rebuild.rebuild, args=(jobs, slow))
        other.start()
        under_way.wait()
    other.join()
    assert not any(j.site._fxmask_is_dense for j in jobs)
    assert [int(m.sum()) for m in fxmask.masks(model).values()] == [int(j.site._fxmask_keep) for j in jobs]
    with fxmask.dense(model):
        pass


def test_broken_off_on_the_way_in(monkeypatch):
    """As by Ctrl-C, or for want of memory: masks are in force again."""
    model, before = masked()
    honest, calls = rebuild.hold, []

    def breaking(site, *args):
        calls.append(site)
        if len(calls) == 2:
            raise KeyboardInterrupt
        honest(site, *args)

    monkeypatch.setattr(rebuild, "hold", breaking)
    with pytest.raises(KeyboardInterrupt), fxmask.dense(model):
        pass
    monkeypatch.undo()
    after = fxmask.masks(model)
    assert all(torch.equal(after[n], m) for n, m in before.items())
    with fxmask.dense(model):
        pass


def test_apply_while_another_thread_imports_the_compiler(monkeypatch):
    """PyTorch does that in the first optimiser of a process, for seconds."""
    monkeypatch.setitem(sys.modules, "torch._dynamo", ModuleType("torch._dynamo"))  # as far as it is
    assert len(fxmask.masks(fxmask.apply(mlp(), ratio=0.5))) == 2
