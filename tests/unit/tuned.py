"""A tune of small ops into a folder of its own, and the operands that it is made for."""

import os
import time
import warnings

import pytest
import torch

from fxmask.errors import FxMaskWarning
from fxmask.kernels import ops, reference, tune
from fxmask.kernels.cpu import deciding

BLOCK = (16, 16)
G = torch.Generator().manual_seed(0)
X, W, GY = (torch.randn(s, generator=G) for s in ((600, 64), (48, 64), (600, 48)))
MASK = torch.rand(3, 4, generator=G) < 0.5
REAL = tune.measure


class Table:
    """The files, and what was measured: the names of the candidates of each tune."""

    def __init__(self, folder):
        self.folder, self.measured, self.budget = folder, [], 0.002

    def measure(self, candidates, threads, budget=None):
        self.measured.append(list(candidates))
        return REAL(candidates, threads, self.budget)

    def files(self):
        return sorted(self.folder.iterdir()) if self.folder.exists() else []

    def fresh(self):
        """As in another process."""
        deciding.decisions.clear()
        self.measured.clear()


@pytest.fixture(autouse=True, name="table")
def a_table(monkeypatch, tmp_path):
    """Small ops are tuned, into a folder of their own, on a machine that is not busy."""
    made = Table(tmp_path / "cache")
    monkeypatch.setenv("FXMASK_TUNE", "1")
    monkeypatch.setenv("FXMASK_CACHE", str(made.folder))
    monkeypatch.setattr(deciding, "SMALL", 0.0)
    monkeypatch.setattr(deciding, "NEAR", 1e9)
    monkeypatch.setattr(tune, "measure", made.measure)
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    monkeypatch.setattr(time, "process_time", time.perf_counter)
    monkeypatch.setattr(time, "thread_time", time.perf_counter)
    monkeypatch.setattr(deciding, "decisions", {})
    monkeypatch.setattr(deciding, "small", {})
    monkeypatch.setattr(tune, "_warned", set())
    return made


def forward(impl="cpu"):
    y = ops.linear(X, W, None, MASK, BLOCK, "masked", None, impl)
    torch.testing.assert_close(y, reference.masked_linear(X, W, None, MASK, BLOCK))
    return y


def said(f):
    """The texts of fxmask's warnings; any other is an error, as ever."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        f()
    assert all(issubclass(w.category, FxMaskWarning) for w in found), [str(w.message) for w in found]
    return [str(w.message) for w in found]
