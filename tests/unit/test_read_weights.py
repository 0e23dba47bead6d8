"""The weight of a layer that its owner, or a forward of its own, reads: what it is outside of forwards, as one fails, softly, and with other configurations."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import fxmask
from fxmask.errors import UnsupportedError


class Owner(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(64, 64, bias=False)

    def forward(self, x):
        return F.linear(x, self.fc.weight)


class Own(nn.Linear):
    """Reads its own weight, and is told to fail, to go on in steps, or to run in a checkpoint."""

    how = "returns"

    def part(self, x):
        return F.linear(x, self.weight).tanh()

    def forward(self, x):
        if self.how == "fails":
            raise RuntimeError("out of memory")
        if self.how == "in a checkpoint":
            return checkpoint(self.part, x, use_reentrant=False)
        return (self.part(x) for _ in range(1)) if self.how == "in steps" else self.part(x)


def own(how):
    torch.manual_seed(0)
    model = nn.Sequential(Own(64, 64, bias=False))
    model[0].how = how
    return fxmask.apply(model, ratio=0.5, overrides={"0": dict(read="weight")})


def test_outside_of_forwards_it_may_be_taken_away_and_put_back():
    """As old pruning, weight_norm and PEFT do: a plain tensor in the Parameter's place."""
    fc = fxmask.apply(Owner(), ratio=0.5).fc
    del fc.weight
    assert not hasattr(fc, "weight")
    with pytest.raises(AttributeError, match="has no weight"):
        del fc.weight
    fc.weight = computed = torch.ones(64, 64)
    assert fc.weight is computed
    del fc.weight
    assert not hasattr(fc, "weight")


def test_a_forward_of_its_own_that_fails_leaves_the_parameter():
    model, x = own("fails"), torch.randn(8, 64)
    with pytest.raises(RuntimeError, match="out of memory"):
        model(x)
    assert model[0].weight is model[0]._parameters["weight"]


def test_a_forward_of_its_own_that_goes_on_when_it_has_returned():
    model, x = own("returns"), torch.randn(8, 64)
    expected, dense = model(x), F.linear(x, model[0]._parameters["weight"]).tanh()
    model[0].how = "in steps"
    (found,) = model(x)
    torch.testing.assert_close(found, expected)
    assert not torch.allclose(found, dense, atol=1e-2)


def test_a_forward_of_its_own_runs_a_part_anew_with_the_mask():
    x, found = torch.randn(8, 64), []
    for how in ("returns", "in a checkpoint"):
        model, given = own(how), x.clone().requires_grad_()
        model(given).square().sum().backward()
        found.append((given.grad, model[0].weight.grad))
    torch.testing.assert_close(found[1], found[0])


def test_a_layer_with_a_forward_of_its_own_is_what_it_was_after_restore():
    model, x = own("returns"), torch.randn(8, 64)
    fxmask.restore(model)
    assert type(model[0]) is Own and torch.equal(model(x), F.linear(x, model[0].weight).tanh())


def test_a_layer_whose_class_was_changed_is_refused_by_its_owner():
    model = fxmask.apply(Owner(), ratio=0.5)
    model.fc.__class__ = type("Mine", (type(model.fc),), {})
    with pytest.raises(UnsupportedError, match=r"(?s)class of a masked layer was changed after fxmask.apply \(to Mine\).*where: fc.weight.*shard the owner"):
        model(torch.randn(8, 64))


def test_under_rigl_its_gradient_is_dense_in_the_same_steps_as_a_called_ones():
    model, x, dense = Owner(), torch.randn(8, 64), []
    called = nn.Sequential(copy.deepcopy(model.fc))
    for m in (model, called):
        fxmask.apply(m, ratio=0.5, backward="rigl", dense_every=2)
        fxmask.step(m, 0)
    for _ in range(4):
        for m in (model, called):
            m.zero_grad()
            m(x).square().sum().backward()
            fxmask.step(m)
        gradient = called[0].weight.grad
        torch.testing.assert_close(model.fc.weight.grad, gradient)
        dense.append(bool((gradient != 0).all()))
    assert sorted(dense) == [False, False, True, True]


def halve(w):
    with torch.no_grad():
        w.mul_(0.5)


class Writes(Owner):
    def forward(self, x):
        halve(self.fc.weight)
        return super().forward(x)


def test_a_write_into_a_soft_mask_that_no_source_shows_raises():
    model = fxmask.apply(Writes(), ratio=0.5, schedule=fxmask.Schedule("linear", steps=4), soft=True)
    fxmask.step(model, 0)
    assert model.fc._fxmask_softening
    with pytest.raises(UnsupportedError, match="the forward of Writes writes into the weight of this layer"):
        model(torch.randn(8, 64))


class OneOfTwo(Owner):
    def __init__(self):
        super().__init__()
        self.other = nn.Linear(64, 64, bias=False)

    def forward(self, x, first, writes):
        w = self.fc.weight if first else self.other.weight
        if writes:
            halve(w)
        return F.linear(x, w)


@pytest.mark.parametrize(("first", "name"), [(True, "fc"), (False, "other")])
def test_a_layer_that_a_forward_does_not_read_hides_no_write_into_another_nor_into_itself_later(first, name):
    model, x = fxmask.apply(OneOfTwo(), ratio=0.5), torch.randn(8, 64)
    model(x, not first, writes=False)
    with pytest.raises(UnsupportedError, match=rf"(?s)the forward of OneOfTwo writes into the weight of this layer.*where: {name}\.weight"):
        model(x, first, writes=True)


class Around(nn.Module):
    """Reads the weight before the forward of another reader, and writes into it behind that."""

    def __init__(self):
        super().__init__()
        self.inner = Owner()

    def forward(self, x):
        w = self.inner.fc.weight
        y = self.inner(x)
        halve(w)
        return F.linear(y, w)


def test_a_reader_inside_of_another_one_ends_no_look_at_its_writes():
    model = fxmask.apply(Around(), ratio=0.5)
    with pytest.raises(UnsupportedError, match=r"(?s)the forward of Around writes into the weight of this layer.*where: inner\.fc\.weight"):
        model(torch.randn(8, 64))


class MaskedAnew(Owner):
    """Its masks are taken off and made again before it ends."""

    anew = False

    @torch.compiler.disable
    def masks(self):
        fxmask.apply(fxmask.restore(self), ratio=0.5)

    def forward(self, x):
        y = super().forward(x)
        if self.anew:
            self.masks()
        return y


@pytest.mark.parametrize("how", [lambda m: m, lambda m: torch.compile(m, backend="eager")], ids=["eager", "compiled"])
def test_masks_that_are_made_anew_in_a_forward_are_those_of_the_next(how):
    torch._dynamo.reset()
    model, x = fxmask.apply(MaskedAnew(), ratio=0.5), torch.randn(8, 64)
    expected, call = model(x), how(model)
    for model.anew in (True, False, False):
        found = call(x)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(model(x), expected)
    assert model.fc.weight is model.fc._parameters["weight"]


class Both(Owner):
    """Calls the layer whose weight it reads."""

    def forward(self, x):
        return super().forward(x).detach() + self.fc(x)


def test_what_else_its_call_does_stays():
    masks, other = fxmask.WeightMask(0.5), fxmask.ActivationPruning(0.5, 16)
    model, x = Both(), torch.randn(8, 64)
    called = nn.Sequential(copy.deepcopy(model.fc))
    for m in (model, called):
        fxmask.apply(m, masks, other)
        m(x).sum().backward()
    plain = fxmask.apply(nn.Sequential(copy.deepcopy(Owner().fc)), masks)
    plain(x).sum().backward()
    torch.testing.assert_close(model.fc.weight.grad, called[0].weight.grad)
    assert not torch.allclose(model.fc.weight.grad, plain[0].weight.grad, atol=1e-2)


class ReadsTwo(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

    def forward(self, x):
        with torch.no_grad():
            self.layers[0].weight.clamp_(-0.01, 0.01)
        return F.linear(F.linear(x, self.layers[0].weight), self.layers[1].weight)


class WritesToAll(ReadsTwo):
    """And calls another one than it reads."""

    def forward(self, x):
        with torch.no_grad():
            for layer in self.layers:
                layer.weight.clamp_(-0.01, 0.01)
        return F.linear(self.layers[1](self.layers[2](x)), self.layers[0].weight)


class WritesByAnotherName(ReadsTwo):
    def __init__(self):
        super().__init__()
        self.first = self.layers[0]

    def forward(self, x):
        with torch.no_grad():
            self.first.weight.clamp_(-0.01, 0.01)
        return F.linear(x, self.layers[0].weight)


@pytest.mark.parametrize("kind", [ReadsTwo, WritesToAll, WritesByAnotherName])
def test_of_what_is_read_that_alone_stays_dense_which_is_written_to(kind):
    model, x = kind(), torch.randn(4, 32)
    with pytest.warns(fxmask.FxMaskWarning, match=r"^layers\.0 stays dense: the forward of \w+ writes to its weight and reads it"):
        fxmask.apply(model, ratio=0.5)
    assert list(fxmask.masks(model)) == ["layers.1.weight", "layers.2.weight"]
    model(x)
    assert model.layers[0].weight.abs().max() <= 0.01
