"""Eager code is dense, and says so where an optimiser can see it."""

import re
import warnings

import pytest
import torch
from compile_backend.helpers import OPTIONS, Wrap, compiled, steps_of
from sample_models import mlp
from torch import nn

from fxmask.compiler import backend, backend_steps, backend_watch
from fxmask.errors import FxMaskWarning, UnsupportedError


def test_a_step_around_the_graph_is_a_warning():
    model = Wrap(mlp())
    call = compiled(model, **OPTIONS)
    steps_of(model, call, 3)
    with torch.compiler.set_stance("force_eager"), pytest.warns(FxMaskWarning, match=r"gradients of inner\.0, inner\.2 though no masked graph ran") as seen:
        steps_of(model, call, 1)
    assert "fxmask.apply(model, ...) is masked in eager code, too" in str(seen[0].message)
    steps_of(model, call, 1)


class Broken(nn.Module):
    """Two layers of one class, each a frame of its own: Dynamo compiles one graph and calls it with the weights of both."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Wrap(nn.Linear(64, 64)) for _ in range(2))

    def forward(self, x):
        y = 0
        for layer in self.layers:
            torch._dynamo.graph_break()
            y = y + layer(x)
        return y


def test_a_graph_that_several_layers_share_counts_for_each():
    model = Broken()
    call = compiled(model, **OPTIONS)
    steps_of(model, call, 1)
    first, second = (backend_watch.uses[layer.inner.weight] for layer in model.layers)
    assert (first.calls, second.calls) == (1, 1) and second.name == f"{first.name} (of another layer, which shares its graph)"
    steps_of(model, call, 1)
    assert (first.calls, second.calls) == (2, 2)

    call_first = compiled(model.layers[0], **OPTIONS)

    def only_the_first(x):
        return model.layers[1](x) + call_first(x)

    with pytest.warns(FxMaskWarning, match=rf"gradients of {re.escape(second.name)} though no masked graph ran"):
        steps_of(model, only_the_first, 1)


def test_one_gradient_in_two_steps_is_no_warning():
    model = Wrap(mlp())
    call, optimizer = compiled(model, **OPTIONS), torch.optim.SGD(model.parameters(), 0.1)
    call(torch.randn(4, 64)).sum().backward()
    optimizer.step()
    optimizer.step()


def test_a_dense_gradient_that_is_written_into_the_last_one_is_a_warning():
    """As `zero_grad(set_to_none=False)` leaves it: the same tensor, and another gradient."""
    model, x = Wrap(mlp()), torch.randn(4, 64)
    call, optimizer = compiled(model, **OPTIONS), torch.optim.SGD(model.parameters(), 0.1)
    call(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    model(x).sum().backward()
    with pytest.warns(FxMaskWarning, match="though no masked graph ran"):
        optimizer.step()


def test_the_recompile_limit_is_a_warning():
    model = Wrap(mlp())
    call = torch.compile(model, backend=backend.fxmask_backend, dynamic=False, options={**OPTIONS, "inner": "eager"})
    with torch._dynamo.config.patch(recompile_limit=2), pytest.warns(FxMaskWarning, match="the recompile limit"):
        steps_of(model, call, 4)


def test_fullgraph_makes_an_error_of_the_recompile_limit():
    """Of an evaluation, too, of which no optimiser step would warn."""
    model = Wrap(mlp())
    call = torch.compile(model, backend=backend.fxmask_backend, dynamic=False, fullgraph=True, options={**OPTIONS, "inner": "eager"})
    with torch._dynamo.config.patch(recompile_limit=1), torch.no_grad():
        call(torch.randn(4, 64))
        with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
            call(torch.randn(5, 64))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_an_evaluation_between_two_steps_hides_nothing(mode):
    model = Wrap(mlp())
    call, x = compiled(model, **OPTIONS), torch.randn(4, 64)
    for how, told in ((call, 0), (model, 2), (call, 0)):  # compiled steps, steps of the model itself, compiled ones
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always", FxMaskWarning)
            for _ in range(2):
                with mode():
                    call(x)
                steps_of(model, how, 1)
        assert [("inner.0, inner.2 though" in str(w.message), w.category) for w in seen] == [(True, FxMaskWarning)] * told


@pytest.mark.parametrize(("require", "refused"), [(True, True), (["inner.0", "*.2"], True), ("inner.0", True), (False, False)])
def test_require_refuses_the_gradients_of_eager_code(require, refused):
    """Again where the step is tried again; nothing has moved by then, and a masked step goes on."""
    model = Wrap(mlp())
    call, optimizer, x = compiled(model, **OPTIONS, require=require), torch.optim.SGD(model.parameters(), 0.1), torch.randn(4, 64)
    steps_of(model, call, 1)
    optimizer.zero_grad()
    model(x).sum().backward()
    before = [p.clone() for p in model.parameters()]
    for _ in range(2 * refused):
        with pytest.raises(UnsupportedError, match=r"(?s)gradients of inner\.0, inner\.2 though.*`require` wants them masked.*past its compiled form"):
            optimizer.step()
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    if not refused:
        with pytest.warns(FxMaskWarning, match="though no masked graph ran"):
            optimizer.step()
    optimizer.zero_grad()
    call(x).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("stance", ["force_eager", *(["default"] if torch.__version__ < "2.14" else [])])
def test_a_backend_that_no_graph_reaches_is_a_warning(stance):
    """Before PyTorch 2.14 nn.Sequential.compile never calls its backend, and later only where nothing keeps Dynamo from it."""
    backend_steps.state.reached = backend_steps.state.told = False  # as when it began; by the end it is told, so that no step of another test is
    model = mlp()
    model.compile(backend=backend.fxmask_backend, options=OPTIONS)
    fix = r"of one call no backend: use torch\.compile\(model\)" if torch.__version__ < "2.14" else r"force_eager: torch\.compile\(fullgraph=True\)"
    with torch.compiler.set_stance(stance):
        with pytest.warns(FxMaskWarning, match=rf"(?s)gradients of 0, 2 of.*no graph has reached it.*{fix}"):
            steps_of(model, model, 1)
        steps_of(model, model, 1)  # once
