"""Function transforms around a model that was compiled by the backend: Dynamo would skip its frames from then on, and leave them dense without a word."""

import weakref
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
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


def test_after_every_reset_of_dynamo_too():
    model = Wrap(mlp())
    call, errors = compiled(model, **OPTIONS), []
    for _ in range(3):
        call(X)
        with pytest.raises(BackendCompilerFailed, match="would leave") as caught:
            torch.func.vmap(call)(X)
        errors.append(caught.value)  # kept, as a notebook keeps the last one
        torch._dynamo.reset()
    assert "would leave inner.0, inner.2 dense" in refused(lambda: torch.func.vmap(call)(X))


@pytest.mark.parametrize("around", [True, False], ids=["around", "inside"])
def test_a_model_in_ddp(around):
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        ddp, model = nn.parallel.DistributedDataParallel, Wrap(mlp())
        call = ddp(compiled(model, **OPTIONS)) if around else compiled(ddp(model), **OPTIONS)
        assert "would leave inner.0, inner.2 dense" in refused(lambda: torch.func.vmap(call)(X))
    finally:
        torch.distributed.destroy_process_group()


class Container(nn.Sequential):
    def forward(self, x):
        return super().forward(x)


class Trainer:
    def __init__(self):
        self.models = {"main": mlp()}

    def evaluate(self, x):
        return self.models["main"](x)


class Holder:
    model = mlp()

    def evaluate(self, x):
        return self.model(x)


@pytest.mark.parametrize("make", [lambda: Trainer().evaluate, lambda: Holder().evaluate, lambda: Container(*mlp())], ids=["object", "class", "super"])
def test_a_model_that_the_compiled_code_does_not_name(make):
    assert "would leave 0, 2 dense" in refused(lambda: torch.func.vmap(compiled(make(), **OPTIONS))(X))


@pytest.mark.parametrize("held", [mlp(), [mlp()], mlp()[0].weight], ids=["model", "list", "weight"])
@pytest.mark.parametrize("given", [True, False], ids=["given", "closed over"])
def test_what_a_compiled_function_is_given_or_closes_over(held, given):
    def run(x, net):
        return F.linear(x, net) if isinstance(net, nn.Parameter) else net[0](x)

    call = compiled(run if given else lambda x: run(x, held), **OPTIONS)
    mapped = torch.func.vmap(lambda x: call(x, held)) if given else torch.func.vmap(call)
    assert "would leave " in refused(lambda: mapped(X))


def test_a_function_that_was_differentiated_by_a_plain_tensor_masks_a_parameter_later():
    call, weight = compiled(lambda x, w: F.linear(x, w), **OPTIONS), mlp()[0].weight
    expected = call(X, weight)
    torch._dynamo.reset()
    torch.func.grad(lambda w: call(X, w).sum())(weight.detach())
    assert torch.equal(call(X, weight), expected) and not torch.equal(expected, F.linear(X, weight))


class Bare(nn.Module):
    def __init__(self):
        super().__init__()
        self.matrix = nn.Parameter(torch.ones(64, 64))

    def forward(self, x):
        return F.linear(x, self.matrix)


class Scaled(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight * 2, self.bias)


@pytest.mark.parametrize("make", [Bare, lambda: Scaled(64, 64)], ids=["bare", "computed"])
def test_weights_of_no_linear_that_graphs_mask(make):
    assert not torch.equal(compiled(make(), **OPTIONS)(X), make()(X))
    assert "would leave " in refused(lambda: torch.func.vmap(compiled(make(), **OPTIONS))(X))
    call = compiled(nn.Sequential(make()), **OPTIONS, exclude=["0*"])
    assert torch.func.vmap(call)(X).shape == X.shape


def test_what_is_meant_to_be_dense_and_what_apply_has_masked_runs():
    applied = fxmask.apply(mlp(), **OPTIONS)
    for model, options in ((applied, {}), (mlp(), dict(OPTIONS, exclude="*"))):
        assert torch.equal(torch.func.vmap(compiled(model, **options))(X), torch.func.vmap(model)(X))
    expected = fxmask.apply(Wrap(mlp()), **OPTIONS)(X)
    for model, options in ((fxmask.apply(Wrap(mlp()), **OPTIONS), {}), (Wrap(mlp()), dict(OPTIONS, exclude="*"))):
        call = compiled(model, **options)
        assert torch.allclose(torch.func.vmap(call)(X), model(X))
        assert torch.equal(compiled(Wrap(mlp()), **OPTIONS)(X), expected)  # whose code it shares
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
        self.config = SimpleNamespace(width=10)

    def forward(self, x):
        return self.inner(x) + torch.vmap(getattr(self, self.name))(x)

    def number(self, row):
        torch._dynamo.graph_break()
        return self.activation(row[: self.config.width]) * self.scale

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

    def argument(self, row):
        return torch._dynamo.graph_break() or OwnMethod.of(row, self.inner)

    @staticmethod
    def of(row, net):
        torch._dynamo.graph_break()
        return net(row)


class Away:
    """As proxies of what is not there yet: it does not tell its class either."""

    def __getattribute__(self, name):
        raise RuntimeError(f"no {name} outside of a request")


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "attribute"])
@pytest.mark.parametrize("make", [Away, lambda: weakref.proxy(Trainer())], ids=["away", "dead"])
def test_objects_that_cannot_be_asked_what_they_are(make, whole):
    held = [make()]

    odd = held[0]
    call = compiled((lambda x: x if held else held) if whole else (lambda x: x if x.dim() else odd.models), **OPTIONS)
    assert torch.equal(torch.func.vmap(call)(X), X)


def test_a_proxy_of_a_model():
    model = mlp()
    net = weakref.proxy(model)
    assert "would leave 0, 2 dense" in refused(lambda: torch.func.vmap(compiled(lambda x: net(x), **OPTIONS))(X))


@pytest.mark.filterwarnings("ignore:backend='fxmask' masked nothing in a graph")
def test_a_method_that_takes_no_linear_of_its_model():
    expected = fxmask.apply(OwnMethod("number"), **OPTIONS)(X)
    assert torch.equal(compiled(OwnMethod("number"), **OPTIONS)(X), expected)


class MapsPart(Wrap):
    """Maps a method of a part, whose names in the model begin otherwise."""

    def __init__(self):
        super().__init__(mlp())
        self.part = OwnMethod("linears")

    def forward(self, x):
        return self.inner(x) + torch.vmap(self.part.linears)(x)


@pytest.mark.filterwarnings("ignore:backend='fxmask' masked nothing in a graph")
def test_patterns_go_by_the_names_of_the_compiled_model():
    expected = fxmask.apply(MapsPart(), **OPTIONS, exclude="part.*")(X)
    assert torch.allclose(compiled(MapsPart(), **OPTIONS, exclude="part.*")(X), expected)
    assert "would leave part.inner.0, part.inner.2 dense" in refused(lambda: compiled(MapsPart(), **OPTIONS, exclude="inner.*")(X))


@pytest.mark.parametrize("name", ["linears", "method", "itself", "argument"])
def test_a_method_that_may_take_one(name):
    assert "would leave inner.0, inner.2 dense" in refused(lambda: compiled(OwnMethod(name), **OPTIONS)(X))
