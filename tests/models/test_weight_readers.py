"""Modules that read `.weight` of a Linear instead of calling it, in the ways in which model code does that: none of them is silently dense."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from models.dense_copy import check, images, stirred
from torch import fx, nn

import fxmask
from fxmask.errors import FxMaskWarning, UnsupportedError


class Reader(nn.Module):
    """Two linears, read in some way."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)
        stirred(self)

    def forward(self, x):
        return F.linear(F.linear(x, weight=self.a.weight, bias=self.a.bias), self.b.weight)


class ByMethod(Reader):
    def forward(self, x):
        return self.second(F.linear(x, self.weight_of_a, self.a.bias))

    @property
    def weight_of_a(self):
        return self.a.weight

    def second(self, x):
        return x @ self.b.weight.t()


class BySuper(Reader):
    def forward(self, x):
        return super().forward(x).relu()


class FromAbove(nn.Module):
    """The owner of the owner reads."""

    def __init__(self):
        super().__init__()
        self.inner = Reader()

    def forward(self, x):
        return F.linear(F.linear(x, self.inner.a.weight), self.inner.b.weight)


class Both(Reader):
    """Calls a layer, and reads it."""

    def forward(self, x):
        return self.a(x) + F.linear(self.b(x), self.a.weight)


READERS = (Reader, ByMethod, BySuper, FromAbove)


@pytest.mark.parametrize("cls", READERS)
def test_what_is_read_is_masked(cls):
    model = check(cls(), images(3, 64), read=["*"])
    assert len(fxmask.masks(model)) == 2


def test_what_is_read_and_called():
    model, x = Both(), images(3, 64)
    twin = copy.deepcopy(model)
    fxmask.apply(model)
    with torch.no_grad():
        for name, mask in fxmask.masks(model).items():
            twin.get_parameter(name).mul_(mask.repeat_interleave(16, 0).repeat_interleave(16, 1))
    for m in (model, twin):
        m(x).square().sum().backward()
    assert torch.equal(model(x), twin(x))
    kept = fxmask.masks(model)["a.weight"].repeat_interleave(16, 0).repeat_interleave(16, 1)
    torch.testing.assert_close(model.a.weight.grad, twin.a.weight.grad * kept)


@pytest.mark.parametrize("cls", READERS)
def test_copies_pickles_and_restore(cls):
    dense, x = nn.Sequential(cls()), images(3, 64)
    expected, model = dense(x), fxmask.apply(copy.deepcopy(dense))
    assert torch.equal(copy.deepcopy(model)(x), model(x)) and torch.equal(pickle.loads(pickle.dumps(model))(x), model(x))
    assert not torch.allclose(model(x), expected)
    with fxmask.dense(model):
        assert torch.equal(model(x), expected)
    assert torch.equal(fxmask.restore(model)(x), expected)
    assert [type(m) for m in model.modules()] == [type(m) for m in dense.modules()]


@pytest.mark.parametrize("cls", READERS)
def test_compiled_fullgraph(cls):
    torch._dynamo.reset()  # its limit of recompilations counts all readers together
    model, x = fxmask.apply(cls()), images(3, 64)
    torch.testing.assert_close(torch.compile(model, backend="aot_eager", fullgraph=True)(x), model(x))


@pytest.mark.parametrize("form", ["trace", "export"])
@pytest.mark.parametrize("cls", [Reader, BySuper])
def test_graphs_of_readers(cls, form):
    model, x = cls(), images(3, 64)
    masked = fxmask.apply(copy.deepcopy(model))
    gm = fx.symbolic_trace(model) if form == "trace" else torch.export.export(model, (x,)).module()
    fxmask.apply(gm)
    assert torch.equal(gm(x), masked(x))
    assert list(fxmask.masks(gm)) == list(fxmask.masks(masked))
    assert fxmask.explain(gm).summary["masked"] == fxmask.explain(gm).summary["linears"] == 2


class Looks(Reader):
    """Asks for what a weight is, and never for its values: an ordinary caller."""

    def forward(self, x):
        if isinstance(self.a.weight, torch.Tensor) and x.dtype != self.b.weight.dtype:
            x = x.to(self.a.weight.dtype)
        return self.b(self.a(x)) if self.a is not None else x


def test_who_only_looks_stays_as_it_is():
    model = fxmask.apply(Looks(), backward="unmasked")
    assert type(model) is Looks and len(fxmask.masks(model)) == 2
    check(Looks(), images(3, 64))


class Clamped(Reader):
    """Keeps a weight small in its forward: a write, which is meant for the parameter."""

    def forward(self, x):
        self.a.weight.data.clamp_(-0.01, 0.01)
        with torch.no_grad():
            self.b.weight *= 0.5
            self.b.weight[0] = 1
        return self.b(self.a(x))


def test_a_write_in_the_forward_reaches_the_parameter():
    model, x = fxmask.apply(Clamped()), images(3, 64)
    before = model.b.weight.detach().clone()
    model(x)
    assert type(model) is Clamped and model.a.weight.abs().max() <= 0.01
    assert torch.equal(model.b.weight[1:], before[1:] * 0.5) and (model.b.weight[0] == 1).all()


def test_a_forward_that_was_replaced_on_the_owner_is_named():
    model = nn.Sequential(Reader(), nn.Linear(64, 64))
    model[0].forward = model[0].forward
    with pytest.warns(FxMaskWarning) as caught:
        fxmask.apply(model)
    said = [str(w.message) for w in caught]
    assert [text.partition(", and the owner's forward was replaced")[0] for text in said] == [
        f"0.{name} stays dense: its owner reads its weight" for name in "ab"
    ]
    assert list(fxmask.masks(model)) == ["1.weight"]


def test_unmasked_cannot_be_read():
    with pytest.raises(UnsupportedError, match="the owner of this layer reads its weight and never calls it"):
        fxmask.apply(Reader(), backward="unmasked")
