"""`passes.used_mask`: under refresh=1 the optimiser's step takes the mask that the forward has built, where nothing since would make it another one."""

import copy
import pickle

import pytest
import torch
from torch import nn, optim

import fxmask
from fxmask.kernels.grid import expand_mask
from fxmask.passes import site_mask

X = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))


def build(fused=False, masked_step=False, **config):
    torch.manual_seed(0)
    model = fxmask.apply(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)), **{"ratio": 0.5, "block": (16, 16), **config})
    optimiser = optim.AdamW(model.parameters(), lr=0.01, fused=fused)
    return model, optimiser, fxmask.guard(optimiser, model, masked_step=masked_step)


@pytest.fixture
def builds(monkeypatch):
    """The names of the layers whose masks are built, in order."""
    made, honest = [], site_mask.build
    monkeypatch.setattr(site_mask, "build", lambda site, *rest, **more: made.append(site._fxmask_name) or honest(site, *rest, **more))
    return made


def forward_and_backward(model):
    for p in model.parameters():
        p.grad = None
    model(X).square().mean().backward()


def assert_frozen(model, before, masks):
    for name, mask in masks.items():
        kept, weight = expand_mask(mask, (64, 64), (16, 16)), model.get_parameter(name)
        assert torch.equal(weight[~kept], before[name][~kept]) and not torch.equal(weight[kept], before[name][kept])


def weights(model):
    return {n: p.detach().clone() for n, p in model.named_parameters()}


@pytest.mark.parametrize("masked_step", [False, True], ids=["freeze", "masked step"])
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("config", [{}, {"schedule": fxmask.Schedule("linear", 6)}, {"criterion": "random"}], ids=["constant", "ramp", "random"])
def test_one_mask_a_step(config, fused, masked_step, builds):
    """Each layer's is built once a step, and is the one to freeze by."""
    model, optimiser, _ = build(fused, masked_step, **config)
    for _ in range(10):
        builds.clear()
        forward_and_backward(model)
        assert builds == ["0.weight", "2.weight"]
        before, masks = weights(model), fxmask.masks(model)
        builds.clear()
        optimiser.step()
        assert not builds
        if not all(m.all() for m in masks.values()):
            assert_frozen(model, before, {n: m for n, m in masks.items() if not m.all()})


def moved_by_hand(model):
    with torch.no_grad():
        model[0].weight.copy_(model[0].weight.flip(0))


def other_data(model):
    model[0].weight.data = model[0].weight.flip(0).detach()


def loaded(model):
    model.load_state_dict({n: t.flip(0) for n, t in model.state_dict().items()})


def other_step(model):
    earlier, *_ = build(schedule=fxmask.Schedule("linear", 6))
    fxmask.load_state_dict(model, fxmask.state_dict(earlier))


BETWEEN = [moved_by_hand, other_data, loaded, other_step]


@pytest.mark.parametrize("between", BETWEEN, ids=lambda f: f.__name__)
def test_what_makes_it_another_one_between_forward_and_step(between, builds):
    model, optimiser, _ = build(schedule=fxmask.Schedule("linear", 6))
    for _ in range(4):
        forward_and_backward(model)
        optimiser.step()
    forward_and_backward(model)
    between(model)
    before, masks = weights(model), fxmask.masks(model)
    builds.clear()
    optimiser.step()
    assert "0.weight" in builds
    assert_frozen(model, before, masks)


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_a_second_step_without_a_forward(fused, builds):
    """A fused step moves weights and leaves no version: what was used before it is not asked again."""
    model, optimiser, _ = build(fused)
    forward_and_backward(model)
    optimiser.step()
    with torch.no_grad():
        model[0].weight.data.copy_(model[0].weight.flip(0))  # no version, either
    before, masks = weights(model), fxmask.masks(model)
    builds.clear()
    optimiser.step()
    assert builds == ["0.weight", "2.weight"]
    assert_frozen(model, before, masks)


def test_closures(builds):
    """Gradients that are made inside the step: its mask is of the weights before it, however often the forward runs."""
    model, optimiser, _ = build(fused=True)

    def closure():
        forward_and_backward(model)
        return torch.zeros(())

    for _ in range(3):
        before, masks = weights(model), fxmask.masks(model)
        optimiser.step(closure)
        assert_frozen(model, before, masks)


def test_what_keeps_none():
    """Forwards without gradients, of other weights, of cached masks; steps, moves to another dtype; copies and pickles."""
    model, optimiser, _ = build()

    def held(m=model):
        return [getattr(layer, "_fxmask_used", None) is not None for layer in (m[0], m[2])]

    with torch.no_grad():
        model(X)
    torch.func.functional_call(model, {n: p * 2 for n, p in model.named_parameters()}, (X,))
    assert held() == [False, False]
    forward_and_backward(model)
    assert held() == [True, True] and not any(held(copy.deepcopy(model))) and not any(held(pickle.loads(pickle.dumps(model))))
    optimiser.step()
    assert held() == [False, False]
    forward_and_backward(model)
    model.double()
    assert held() == [False, False]
    cached, *_ = build(refresh=2)
    forward_and_backward(cached)
    assert held(cached) == [False, False]
    fxmask.restore(cached)
    forward_and_backward(model.float())
    fxmask.restore(model)
    assert held() == [False, False]


def test_a_compiled_forward_leaves_none(builds):
    model, optimiser, _ = build()
    compiled = torch.compile(model, backend="eager")
    for _ in range(2):
        compiled(X).square().mean().backward()
        before, masks = weights(model), fxmask.masks(model)
        builds.clear()
        optimiser.step()
        assert builds == ["0.weight", "2.weight"]
        assert_frozen(model, before, masks)
        optimiser.zero_grad()
