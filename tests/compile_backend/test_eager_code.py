"""Eager code is dense, and says so where an optimiser can see it."""

import pytest
import torch
from compile_backend.helpers import OPTIONS, Wrap, compiled, steps_of
from sample_models import mlp

from fxmask import backend, backend_watch
from fxmask.errors import FxMaskWarning


def test_a_step_around_the_graph_is_a_warning():
    model = Wrap(mlp())
    call = compiled(model, **OPTIONS)
    steps_of(model, call, 3)
    with torch.compiler.set_stance("force_eager"), pytest.warns(FxMaskWarning, match=r"gradients of inner\.0, inner\.2 though no masked graph ran") as seen:
        steps_of(model, call, 1)
    assert "fxmask.apply(model, ...) is masked in eager code, too" in str(seen[0].message)
    steps_of(model, call, 1)


def test_one_gradient_in_two_steps_is_no_warning():
    model = Wrap(mlp())
    call, optimizer = compiled(model, **OPTIONS), torch.optim.SGD(model.parameters(), 0.1)
    call(torch.randn(4, 64)).sum().backward()
    optimizer.step()
    optimizer.step()


def test_the_recompile_limit_is_a_warning():
    model = Wrap(mlp())
    call = torch.compile(model, backend=backend.fxmask_backend, dynamic=False, options={**OPTIONS, "inner": "eager"})
    with torch._dynamo.config.patch(recompile_limit=2), pytest.warns(FxMaskWarning, match="the recompile limit"):
        steps_of(model, call, 4)


def test_a_backend_that_no_graph_reaches_is_a_warning(monkeypatch):
    """nn.Sequential.compile never calls its backend."""
    monkeypatch.setattr(backend_watch, "state", backend_watch.State())
    model = mlp()
    model.compile(backend=backend.fxmask_backend, options=OPTIONS)
    with pytest.warns(FxMaskWarning, match="no graph has reached it"):
        steps_of(model, model, 1)
    steps_of(model, model, 1)  # once
