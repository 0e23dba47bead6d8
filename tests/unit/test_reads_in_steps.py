"""Generators of an owner: those that its forward returns read W∘M in each of their steps, the same methods outside of any forward the Parameter."""

import asyncio
import copy
import inspect
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import fxmask
from fxmask.errors import UnsupportedError


class Stack(nn.Module):
    """A forward that reads its weights by a generator, which others use, too."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(2))

    def weights(self):
        for layer in self.layers:
            yield layer.weight

    def forward(self, x):
        for w in self.weights():
            x = F.linear(x, w)
        return x


class StackOfExpressions(Stack):
    def weights(self):
        yield from (layer.weight for layer in self.layers)


@pytest.mark.parametrize("kind", [Stack, StackOfExpressions])
def test_a_generator_method_outside_of_a_forward_gives_the_parameters(kind):
    model, x = fxmask.apply(kind(), ratio=0.5), torch.randn(8, 64)
    torch.testing.assert_close(model(x), model.layers[1](model.layers[0](x)))
    parameters = [layer._parameters["weight"] for layer in model.layers]
    assert all(w is p for w, p in zip(model.weights(), parameters, strict=True))
    model(x).sum().mul(100).backward()
    assert torch.nn.utils.clip_grad_norm_(model.weights(), 0.1) > 1
    assert torch.nn.utils.get_total_norm([p.grad for p in parameters]) < 0.11
    assert torch.optim.SGD(model.weights(), lr=0.1).param_groups[0]["params"] == parameters
    for w in model.weights():
        nn.init.ones_(w)
    assert all((p == 1).all() for p in parameters)


class Talks(nn.Module):
    """Is sent scales, and takes errors."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.told = nn.Linear(64, 64, bias=False), []

    def stream(self, x):
        scale = 1.0
        try:
            while scale is not None:
                try:
                    scale = yield F.linear(x * scale, self.fc.weight)
                except KeyError as e:
                    self.told.append(e)
            return self.fc.weight
        finally:
            self.told.append(self.fc.weight)

    def forward(self, x):
        return self.stream(x)


class TalksLater(Talks):
    async def forward(self, x):
        scale = 1.0
        try:
            while scale is not None:
                await asyncio.sleep(0)
                try:
                    scale = yield F.linear(x * scale, self.fc.weight)
                except KeyError as e:
                    self.told.append(e)
        finally:
            await asyncio.sleep(0)
            self.told.append(self.fc.weight)


def is_masked(model, w):
    return torch.equal(w, model.fc(torch.eye(64)).t())


def test_what_is_sent_thrown_and_returned():
    model, x, e = fxmask.apply(Talks(), ratio=0.5), torch.randn(8, 64), KeyError()
    parameter, pieces = model.fc._parameters["weight"], model(x)
    assert inspect.isgenerator(pieces) and pieces.__qualname__ == "Talks.stream"
    for y, scale in ((next(pieces), 1), (pieces.send(2), 2), (pieces.throw(e), 2), (pieces.send(3), 3)):
        torch.testing.assert_close(y, model.fc(x * scale))
        assert model.fc.weight is parameter
    with pytest.raises(StopIteration) as end:
        pieces.send(None)
    assert model.told[0] is e and is_masked(model, model.told[1]) and is_masked(model, end.value.value)
    assert model.fc.weight is parameter


@pytest.mark.parametrize("closes", [True, False])
def test_a_generator_that_ends_early(closes):
    model = fxmask.apply(Talks(), ratio=0.5)
    pieces = model(torch.randn(8, 64))
    next(pieces)
    if closes:
        pieces.close()
    else:
        with pytest.raises(ZeroDivisionError):
            pieces.throw(ZeroDivisionError())
    assert is_masked(model, model.told[0]) and model.fc.weight is model.fc._parameters["weight"]
    assert list(pieces) == []


def test_what_is_sent_and_thrown_in_async_generators():
    model, x, e = fxmask.apply(TalksLater(), ratio=0.5), torch.randn(8, 64), KeyError()
    parameter = model.fc._parameters["weight"]

    async def talk():
        pieces = model(x)
        assert inspect.isasyncgen(pieces)
        for step, scale in ((lambda: pieces.asend(None), 1), (lambda: pieces.asend(2), 2), (lambda: pieces.athrow(e), 2), (lambda: pieces.asend(3), 3)):
            torch.testing.assert_close(await step(), model.fc(x * scale))
            assert model.fc.weight is parameter
        await pieces.aclose()
        ended = model(x)
        await anext(ended)
        with pytest.raises(StopAsyncIteration):
            await ended.asend(None)

    asyncio.run(talk())
    assert model.told[0] is e and len(model.told) == 3 and all(is_masked(model, w) for w in model.told[1:])
    assert model.fc.weight is parameter


class Cancelled(Talks):
    async def forward(self, x):
        try:
            await asyncio.sleep(30)
        finally:
            self.told.append(self.fc.weight)


def test_a_coroutine_that_is_cancelled():
    model = fxmask.apply(Cancelled(), ratio=0.5)
    parameter = model.fc._parameters["weight"]

    async def cancel():
        found = model(torch.randn(8, 64))
        assert inspect.iscoroutine(found)
        task = asyncio.create_task(found)
        await asyncio.sleep(0)
        assert model.fc.weight is parameter
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())
    assert is_masked(model, model.told[0]) and model.fc.weight is parameter


def test_an_async_generator_that_is_cancelled_between_its_steps():
    model = fxmask.apply(TalksLater(), ratio=0.5)

    async def cancel():
        pieces = model(torch.randn(8, 64))
        await anext(pieces)
        with pytest.raises(asyncio.CancelledError):
            await pieces.athrow(asyncio.CancelledError())
        assert len(model.told) == 1

    asyncio.run(cancel())
    assert is_masked(model, model.told[0]) and model.fc.weight is model.fc._parameters["weight"]


class OneOfTwo(Talks):
    kind = tuple

    def forward(self, x):
        return self.kind((self.stream(x), x.shape))


@pytest.mark.parametrize("kind", [tuple, list])
def test_a_generator_beside_other_results(kind):
    model, x = fxmask.apply(OneOfTwo(), ratio=0.5), torch.randn(8, 64)
    model.kind = kind
    found = model(x)
    pieces, shape = found
    torch.testing.assert_close(next(pieces), model.fc(x))
    assert type(found) is kind and shape == x.shape and model.fc.weight is model.fc._parameters["weight"]


def halve(w):
    with torch.no_grad():
        w[:32].mul_(0.5)


class Writes(Talks):
    def forward(self, x):
        halve(self.fc.weight)
        yield F.linear(x, self.fc.weight)


class WritesLater(Talks):
    async def forward(self, x):
        halve(self.fc.weight)
        return F.linear(x, self.fc.weight)


class WritesInLaterSteps(Talks):
    async def forward(self, x):
        halve(self.fc.weight)
        yield F.linear(x, self.fc.weight)


async def all_of(pieces):
    return [piece async for piece in pieces]


def test_a_write_in_a_generator_raises_where_it_ends():
    pieces = fxmask.apply(Writes(), ratio=0.5)(torch.randn(8, 64))
    next(pieces)
    with pytest.raises(UnsupportedError, match="the forward of Writes writes into the weight of this layer"):
        next(pieces)


@pytest.mark.parametrize(("kind", "run"), [(WritesLater, lambda y: y), (WritesInLaterSteps, all_of)], ids=["coroutine", "async generator"])
def test_a_write_in_a_coroutine_raises_where_it_ends(kind, run):
    with pytest.raises(UnsupportedError, match=f"the forward of {kind.__name__} writes into the weight of this layer"):
        asyncio.run(run(fxmask.apply(kind(), ratio=0.5)(torch.randn(8, 64))))


class Student(nn.Module):
    """Compares its weight with that of a masked teacher, which is no part of it."""

    def __init__(self, teacher, breaks):
        super().__init__()
        torch.manual_seed(1)
        self.fc, self.teacher, self.breaks = nn.Linear(64, 64), [teacher], breaks

    def forward(self, x):
        x = F.linear(x, self.fc.weight)
        if self.breaks:
            torch._dynamo.graph_break()
        return x.sum() * (self.fc.weight - self.teacher[0].fc.weight).square().sum()


class AsksForAPart(Student):
    def forward(self, x):
        return F.linear(x, self.fc.weight).sum() + self.teacher[0].part(x).sum()


class InSteps(Student):
    def forward(self, x):
        yield super().forward(x)


class Teacher(Talks):
    def forward(self, x):
        return F.linear(x, self.fc.weight)


class CompiledTeacher(Teacher):
    part = torch.compile(Teacher.forward, backend="eager")


def taught(kind=Student, teacher=Teacher, breaks=False):
    torch._dynamo.reset()
    return fxmask.apply(kind(fxmask.apply(teacher(), ratio=0.5), breaks), ratio=0.5)


@pytest.mark.parametrize("breaks", [False, True])
def test_a_compiled_forward_that_looks_at_a_teachers_weight_says_nothing(breaks):
    model, x = taught(breaks=breaks), torch.randn(8, 64)
    with warnings.catch_warnings():
        warnings.simplefilter("error", fxmask.FxMaskWarning)
        y = torch.compile(model, backend="eager", fullgraph=not breaks)(x)
    torch.testing.assert_close(y, model(x))


def test_a_compiled_part_of_a_teacher_is_told_in_the_forward_of_a_student():
    model, x = taught(AsksForAPart, CompiledTeacher), torch.randn(8, 64)
    with pytest.warns(fxmask.FxMaskWarning, match="compiled part of a module's forward is called outside of it"):
        model(x)


@pytest.mark.parametrize("how", ["eager", "compiled", "in steps"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_of_a_forward_that_looks_at_a_teachers_weight(reentrant, how):
    model, x, found = taught(InSteps if how == "in steps" else Student), torch.randn(8, 64), []
    plain = (lambda x: sum(model(x))) if how == "in steps" else model
    call = torch.compile(model, backend="eager") if how == "compiled" else plain
    for run in (plain, lambda x: checkpoint(call, x, use_reentrant=reentrant)):
        model.zero_grad()
        given = x.clone().requires_grad_()
        y = run(given)
        y.backward()
        found.append([y.detach(), given.grad, copy.deepcopy(model.fc._parameters["weight"].grad)])
    torch.testing.assert_close(found[1], found[0])
