"""Weights that an owner's forward reads after it has returned: as a generator or coroutine, and in compiled code that a checkpoint runs anew."""

import asyncio

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import fxmask


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.reentrant = nn.Linear(64, 64, bias=False), False

    def inner(self, x):
        return F.linear(x, self.fc.weight).tanh()

    compiled = torch.compile(inner, backend="eager")

    def forward(self, x):
        return self.inner(x)


class Pieces(Own):
    def forward(self, x):
        for piece in x.chunk(2):
            yield self.inner(piece)


class Later(Own):
    async def forward(me, x):  # whatever it calls itself
        await asyncio.sleep(0)
        return F.linear(x, me.fc.weight).tanh()


class LaterPieces(Own):
    async def forward(self, x):
        for piece in x.chunk(2):
            await asyncio.sleep(0)
            yield self.inner(piece)


async def gather(pieces):
    return torch.cat([piece async for piece in pieces])


@pytest.mark.parametrize(
    ("kind", "run"), [(Pieces, lambda y: torch.cat(list(y))), (Later, asyncio.run), (LaterPieces, lambda y: asyncio.run(gather(y)))], ids=lambda p: p.__name__
)
def test_a_forward_that_runs_when_it_has_returned(kind, run):
    model, x = fxmask.apply(kind(), ratio=0.5), torch.randn(8, 64)
    torch.testing.assert_close(run(model(x)), model.fc(x).tanh())
    assert model.fc.weight is model.fc._parameters["weight"]


def test_the_parameter_is_read_while_a_generator_waits():
    model, x = fxmask.apply(Pieces(), ratio=0.5), torch.randn(8, 64)
    pieces = model(x)
    found = [next(pieces)]
    assert model.fc.weight is model.fc._parameters["weight"]
    torch.testing.assert_close(torch.cat([*found, *pieces]), model.fc(x).tanh())


class CompiledPieces(Own):
    def forward(self, x):
        for piece in x.chunk(2):
            yield self.compiled(piece)


class CompiledAnew(Own):
    def forward(self, x):
        return checkpoint(self.compiled, x, use_reentrant=self.reentrant)


class BrokenAnew(CompiledAnew):
    def inner(self, x):
        x = x * 1
        torch._dynamo.graph_break()
        return F.linear(x, self.fc.weight).tanh()

    compiled = torch.compile(inner, backend="eager")


@torch.compile(backend="eager")
def by_layer(x, layer):
    return F.linear(x, layer.weight).tanh()


class HelpedAnew(CompiledAnew):
    """Compiled is a function alone, which is no part of the forward."""

    def inner(self, x):
        return by_layer(x, self.fc) if x is not None else F.linear(x, self.fc.weight)

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


def test_compiled_code_in_a_generator():
    torch._dynamo.reset()
    model, x = fxmask.apply(CompiledPieces(), ratio=0.5), torch.randn(8, 64)
    torch.testing.assert_close(torch.cat(list(model(x))), model.fc(x).tanh())


@pytest.mark.parametrize("fullgraph", [True, False])
def test_a_generator_that_is_compiled(fullgraph):
    torch._dynamo.reset()
    model, x = fxmask.apply(Pieces(), ratio=0.5), torch.randn(8, 64)
    call = torch.compile(model, backend="eager", fullgraph=fullgraph)
    if fullgraph and torch.__version__ < "2.13":  # Dynamo follows no `yield from` yet, and says so
        with pytest.raises(torch._dynamo.exc.Unsupported):
            list(call(x))
        return
    torch.testing.assert_close(torch.cat(list(call(x))), model.fc(x).tanh())
    assert model.fc.weight is model.fc._parameters["weight"]


def refused():
    text = r"(?s)compiled code reads a masked weight for a forward that has ended.*a module that reads a weight.*let the method call the layer"
    return pytest.raises(torch._dynamo.exc.InternalTorchDynamoError, match=text)


@pytest.mark.parametrize("kind", [CompiledAnew, BrokenAnew, HelpedAnew])
@pytest.mark.parametrize("reentrant", [True, False])
def test_compiled_code_in_a_checkpoint_is_refused(kind, reentrant):
    torch._dynamo.reset()
    model, x = fxmask.apply(kind(), ratio=0.5), torch.randn(8, 64, requires_grad=True)
    model.reentrant = reentrant
    y = model(x)
    with refused():
        y.sum().backward()


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_in_a_model_that_is_compiled_as_a_whole(reentrant):
    torch._dynamo.reset()
    model, x = fxmask.apply(CompiledAnew(), ratio=0.5), torch.randn(8, 64)
    model.reentrant, found = reentrant, []
    for call in (lambda x: model.fc(x).tanh(), torch.compile(model, backend="aot_eager")):
        model.zero_grad()
        y = call(x)
        y.sum().backward()
        found.append((y, model.fc._parameters["weight"].grad))
    torch.testing.assert_close(found[1], found[0])


def in_a_function(*held):
    return torch.compile(lambda x: held[0].inner(x), backend="eager")


@pytest.mark.parametrize("by", [lambda m: m.compiled, in_a_function], ids=["method", "function"])
def test_compiled_code_that_is_called_by_itself_says_that_it_is_dense(by):
    """As a method, and in a function that has no module among its variables."""
    torch._dynamo.reset()
    model, x = fxmask.apply(CompiledAnew(), ratio=0.5), torch.randn(8, 64)
    with pytest.warns(fxmask.FxMaskWarning, match=r"(?s)compiled part of a module's forward is called outside of it.*call the module"):
        y = by(model)(x)
    torch.testing.assert_close(y, F.linear(x, model.fc._parameters["weight"]).tanh())


class Deep(nn.Module):
    """Reads a layer of a module inside of it."""

    def __init__(self):
        super().__init__()
        self.inside = nn.Sequential(nn.Linear(64, 64, bias=False))

    def part(self, x):
        return F.linear(x, self.inside[0].weight)

    compiled = torch.compile(part, backend="eager")

    def forward(self, x):
        return self.compiled(x)


def test_a_compiled_part_that_reads_deeper_says_so_too():
    torch._dynamo.reset()
    model, x = fxmask.apply(Deep(), ratio=0.5), torch.randn(8, 64)
    with pytest.warns(fxmask.FxMaskWarning, match="compiled part of a module's forward is called outside of it"):
        model.compiled(x)
    torch.testing.assert_close(model(x), model.inside[0](x))
