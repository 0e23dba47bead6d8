"""What `explain` notes of gradients that no masked forward made, and what it must not suspect."""

import copy
import warnings

import pytest
import torch
from torch import nn, optim
from unit.dense_readers import Calls, Reader, loss, model

import fxmask
from fxmask.errors import FxMaskWarning
from fxmask.passes.stepping import bypass


def noted(m):
    """The names in the note, none without it."""
    notes = [note for note in fxmask.explain(m).notes if "has not run" in note]
    return notes[0].split(": ")[1].split(";")[0] if notes else None


@pytest.fixture(autouse=True)
def nothing_traced(monkeypatch):
    """What other tests have compiled says nothing here."""
    monkeypatch.setattr(fxmask.passes.state.site_forward, "_TRACED", {})
    yield
    torch._dynamo.reset()


def blocks(**options):
    """Layers alike, each compiled by itself: the first one's code runs all of them."""
    torch.manual_seed(0)
    m = fxmask.apply(nn.Sequential(*(Calls() for _ in range(4))), **options)
    for part in m:
        part.compile(backend="eager")
    return m


def test_a_layer_that_was_warned_of_is_still_noted():
    """The optimiser's warning comes once; the layer stays dense."""
    m = model(Reader())
    optimiser = optim.SGD(m.parameters(), lr=0.1)
    fxmask.guard(optimiser, m)
    for step in range(3):
        optimiser.zero_grad()
        loss(m).backward()
        assert noted(m) == "2.inner.weight"
        if step == 0:
            with pytest.warns(FxMaskWarning) as told:
                optimiser.step()
            assert any("never run" in str(w.message) for w in told)
        else:
            optimiser.step()  # warnings are errors here
        assert noted(m) == "2.inner.weight"


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_that_trains_is_masked(strict):
    """Its Parameters are the model's, whose own forward runs no more."""
    m = model(Calls())
    program = torch.export.export(m, (torch.randn(4, 64),), strict=strict).module()
    loss(program).backward()
    assert noted(m) is None and m[0].weight.grad is not None
    optimiser = optim.SGD(m.parameters(), lr=0.1)
    fxmask.guard(optimiser, m)
    optimiser.step()  # warnings are errors here


def test_a_reader_beside_an_export_is_noted():
    m = fxmask.apply(nn.Sequential(Calls(), Reader()), ratio=0.5)
    torch.export.export(m[0], (torch.randn(4, 64),))
    loss(m).backward()
    assert noted(m) == "1.inner.weight"


RAMPS = {
    "ramp": {"schedule": fxmask.Schedule("cubic", steps=40)},
    "start": {"start": 2},
    "seldom": {"schedule": fxmask.Schedule("linear", steps=8), "refresh": 2},
}
compiled = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo looks at what the layers hand on


@compiled
@pytest.mark.parametrize("how", RAMPS.values(), ids=RAMPS)
def test_gradients_of_before_the_ramps_step_are_no_readers(how):
    m = blocks(ratio=0.75, **how)
    optimiser = optim.SGD(m.parameters(), lr=0.01)
    fxmask.guard(optimiser, m)
    for _ in range(12):
        optimiser.zero_grad()
        loss(m).backward()
        assert noted(m) is None
        optimiser.step()
        assert noted(m) is None


def told_by_steps(m, steps=5):
    """At which steps the guard's optimiser says that a layer never runs."""
    optimiser, found = optim.SGD(m.parameters(), lr=0.0), []
    fxmask.guard(optimiser, m)
    for step in range(steps):
        optimiser.zero_grad()
        loss(m).backward()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            optimiser.step()
        found += [step for w in said if "never run" in str(w.message)]
    return found


@compiled
def test_a_reader_beside_a_compiled_layer_is_told_when_a_mask_tells():
    """Before `start` every block has a gradient, by a masked forward, too."""
    torch.manual_seed(0)
    m = fxmask.apply(nn.Sequential(Calls(), Reader()), ratio=0.5, start=2)
    m[0].compile(backend="eager")
    assert told_by_steps(m) == [3]


@compiled
def test_masks_that_keep_more_than_the_ratio_are_no_readers():
    """Of equal weights all blocks are kept by `ties="keep"`."""
    m = blocks(ratio=0.75, ties="keep")
    for p in m.parameters():
        nn.init.constant_(p, 0.1)
    assert told_by_steps(m) == [] and noted(m) is None and all(part.inner.weight.grad.ne(0).all() for part in m)


@compiled
def test_the_gradients_of_compiled_layers_are_looked_at_once(monkeypatch):
    looked, real = [], bypass._as_masked
    monkeypatch.setattr(bypass, "_as_masked", lambda site, grad: looked.append(site) or real(site, grad))
    assert told_by_steps(blocks(ratio=0.75), 3) == [] and len(looked) == len(set(looked)) > 0


@compiled
def test_a_model_on_meta():
    m = blocks(ratio=0.75)
    loss(m).backward()
    assert noted(m.to("meta")) is None


def test_buffers_of_zeros_are_no_gradients():
    m = model(Calls())
    for p in m.parameters():
        p.grad = torch.zeros_like(p)
    assert noted(m) is None
    m = model(Reader())
    loss(m).backward()
    optim.SGD(m.parameters(), lr=0.1).zero_grad(set_to_none=False)
    assert noted(m) is None


def test_frozen_weights_with_an_old_gradient():
    m = copy.deepcopy(model(Reader()))
    loss(m).backward()
    m[2].inner.weight.requires_grad_(False)
    assert noted(m) is None


def test_a_layer_that_is_tied_to_one_that_runs():
    torch.manual_seed(0)
    m = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    m[1].weight = m[0].weight
    fxmask.apply(m, ratio=0.5)
    loss(m[0]).backward()
    assert noted(m) is None
    optimiser = optim.SGD(m.parameters(), lr=0.1)
    fxmask.guard(optimiser, m)
    optimiser.step()  # warnings are errors here


def test_the_note_names_five_at_most():
    torch.manual_seed(0)
    m = fxmask.apply(nn.Sequential(*(Reader() for _ in range(7))), ratio=0.5)
    loss(m).backward()
    assert noted(m) == ", ".join(f"{i}.inner.weight" for i in range(5)) + " and 2 more"


BROKEN = {"inf": float("inf"), "-inf": float("-inf"), "nan": float("nan"), "finite": 1.0}


@pytest.mark.parametrize("value", BROKEN.values(), ids=BROKEN)
def test_one_element_breaks_a_gradient(value, monkeypatch):
    grad = torch.zeros(32, 32)
    grad[3, 4] = value
    assert bypass.has_broken(grad) == (value != 1.0)
    assert not bypass.has_broken(grad.to_sparse()) and not bypass.has_broken(grad.to("meta"))  # may not be looked at
    monkeypatch.setattr(bypass, "capturing", lambda t: True)
    assert not bypass.has_broken(grad)


def test_a_layer_that_pytorchs_own_modules_read_is_told_of_once():
    """By the guard, in words of its own: no adapter is there."""
    m = nn.MultiheadAttention(64, 4)
    m.out_proj.requires_grad_(False)
    fxmask.apply(m.out_proj, ratio=0.5)
    optimiser = optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.1)
    with pytest.warns(FxMaskWarning, match="a module of this model reads the weights of masked layers without their masks"):
        fxmask.guard(optimiser, m)
    x = torch.randn(3, 64)
    m(x, x, x)[0].sum().backward()
    optimiser.step()  # any warning is an error


class ReadsInEval(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.target = nn.Linear(64, 64), nn.Linear(64, 64).requires_grad_(False)

    def forward(self, x):
        return self.fc(x) if self.training else nn.functional.linear(x, self.target.weight)


def test_an_owner_that_apply_knew_of_and_that_reads_in_eval_alone():
    """Its read will be masked. Any warning is an error."""
    m = fxmask.apply(ReadsInEval(), ratio=0.5)
    optimiser = optim.SGD(m.fc.parameters(), lr=0.1)
    fxmask.guard(optimiser, m)
    m(torch.randn(3, 64)).sum().backward()
    optimiser.step()
    assert not any("target" in note for note in fxmask.explain(m).notes)


class AddsToWeight(nn.Module):
    """A user's own adapter: it adds a product to the weight of a layer, by a name of its own."""

    def __init__(self, base):
        super().__init__()
        self.base, self.up, self.down = base.requires_grad_(False), nn.Parameter(torch.zeros(64, 4)), nn.Parameter(torch.ones(4, 64))

    def forward(self, x):
        return nn.functional.linear(x, self.base.weight + self.up @ self.down, self.base.bias)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("late", [True, False])
def test_an_adapter_of_ones_own_that_reads_a_frozen_weight(late, compiled):
    """Put around a layer after `apply` it runs dense, and no gradient tells; before it, its read is masked. Compiled, its like beside it runs masked."""
    m = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    if late:
        fxmask.apply(m, ratio=0.5)
    m[0] = AddsToWeight(m[0])
    if not late:
        fxmask.apply(m, ratio=0.5)
    optimiser = optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.1)
    run = torch.compile(m, backend="eager") if compiled else m
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        fxmask.guard(optimiser, m)
        for _ in range(2):
            run(torch.randn(3, 64)).square().mean().backward()
            optimiser.step()
    assert [str(w.message).count("where: 0.base\n") for w in told if "never runs" in str(w.message)] == [1] * late
    assert any("0.base" in note and "dense" in note for note in fxmask.explain(m).notes) == late
