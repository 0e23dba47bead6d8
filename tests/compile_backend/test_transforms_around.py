"""Function transforms around a model that was compiled by the backend: Dynamo would skip its frames from then on, and leave them dense without a word."""

import pytest
import torch
from compile_backend.helpers import OPTIONS, Wrap, compiled
from sample_models import mlp
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed

import fxmask
from fxmask.errors import UnsupportedError

X = torch.arange(4 * 64).reshape(4, 64).remainder(7) - 3.0
TRANSFORMS = {
    "grad": lambda call: torch.func.grad(lambda x: call(x).sum())(X),
    "vmap": lambda call: torch.func.vmap(call)(X),
    "jvp": lambda call: torch.func.jvp(call, (X,), (X,)),
    "inside another": lambda call: torch.func.vmap(torch.func.grad(lambda x: call(x).sum()))(X),
}


def refused(run):
    with pytest.raises(BackendCompilerFailed) as caught:
        run()
    assert isinstance(caught.value.inner_exception, UnsupportedError)
    return str(caught.value.inner_exception)


@pytest.mark.parametrize("before", [False, True], ids=["first", "later"])
@pytest.mark.parametrize("make", [mlp, lambda: Wrap(mlp())], ids=["container", "class"])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_it_raises_and_other_calls_stay_masked(transform, make, before):
    model, expected = make(), fxmask.apply(make(), **OPTIONS)(X)
    call = compiled(model, **OPTIONS)
    if before:
        call(X)
    text = refused(lambda: TRANSFORMS[transform](call))
    assert "would leave " in text and "dense, in this call and in all later ones" in text and "masked by fxmask.apply" in text
    assert torch.equal(call(X), expected)


def test_of_weights_too():
    model = Wrap(mlp())
    call = compiled(model, **OPTIONS)
    weights = {name: p.detach() for name, p in call.named_parameters()}
    assert "inner.0, inner.2" in refused(lambda: torch.func.grad(lambda w: torch.func.functional_call(call, w, (X,)).sum())(weights))


@pytest.mark.parametrize("held", ["closure", "method"])
def test_a_function_and_a_model_compiled_in_place(held):
    model = Wrap(mlp())
    if held == "method":
        compiled(model, **OPTIONS)  # takes the backend anew, which other tests have reset
        model.compile(backend="fxmask", options={**OPTIONS, "inner": "eager"})
    call = model if held == "method" else compiled(lambda x: model(x), **OPTIONS)
    assert "would leave inner.0, inner.2 dense" in refused(lambda: torch.func.vmap(call)(X))


def test_what_is_meant_to_be_dense_and_what_apply_has_masked_runs():
    applied = fxmask.apply(mlp(), **OPTIONS)
    for model, options in ((applied, {}), (mlp(), dict(OPTIONS, exclude="*"))):
        assert torch.equal(torch.func.vmap(compiled(model, **options))(X), torch.func.vmap(model)(X))
    stock = mlp()
    assert torch.equal(torch.func.vmap(torch.compile(stock, backend="aot_eager"))(X), torch.func.vmap(stock)(X))


class OwnVmap(nn.Module):
    """Behind a graph break, a function without a linear in it is mapped."""

    def __init__(self):
        super().__init__()
        self.inner = mlp()

    def forward(self, x):
        y = self.inner(x)
        torch._dynamo.graph_break()
        return y + torch.vmap(lambda row: row.sum())(x)[:, None]


@pytest.mark.filterwarnings("ignore:backend='fxmask' masked nothing in a graph")  # behind the break
def test_a_model_may_map_what_has_no_linear():
    model, expected = OwnVmap(), fxmask.apply(OwnVmap(), **OPTIONS)(X)
    assert torch.equal(compiled(model, **OPTIONS)(X), expected)


class OwnMethod(nn.Module):
    """Maps a method of its own that Dynamo cannot trace, so that it is given by itself, under the transform."""

    def __init__(self, name):
        super().__init__()
        self.inner, self.activation, self.scale, self.name = mlp(), nn.ReLU(), 2.0, name

    def forward(self, x):
        return self.inner(x) + torch.vmap(getattr(self, self.name))(x)

    def number(self, row):
        torch._dynamo.graph_break()
        return self.activation(row[:10]) * self.scale

    def linears(self, row):
        torch._dynamo.graph_break()
        return self.inner(row)

    def method(self, row):
        torch._dynamo.graph_break()
        return self.linears(row)

    def itself(self, row):
        torch._dynamo.graph_break()
        net = self
        return net.inner(row)


@pytest.mark.filterwarnings("ignore:backend='fxmask' masked nothing in a graph")
def test_a_method_that_takes_no_linear_of_its_model():
    expected = fxmask.apply(OwnMethod("number"), **OPTIONS)(X)
    assert torch.equal(compiled(OwnMethod("number"), **OPTIONS)(X), expected)


@pytest.mark.parametrize("name", ["linears", "method", "itself"])
def test_a_method_that_may_take_one(name):
    assert "would leave inner.0, inner.2 dense" in refused(lambda: compiled(OwnMethod(name), **OPTIONS)(X))
