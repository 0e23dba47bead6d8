"""Permuted N:M masks of a resumed run whose state was forgotten: a load of weights builds others, and the first step says so."""

import copy

import pytest
import torch
from torch import nn, optim
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import fxmask
from fxmask import FxMaskWarning, NMMask

BUILT = r"(?s)a load of weights has built permuted N:M masks anew, and the optimiser had stepped.*where: 0, 2\n.*fix: fxmask\.load_state_dict\(model, saved\)"


def net(mode="permuted"):
    return fxmask.apply(nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 32)), NMMask(mode=mode))


def steps(model, optimiser, n):
    for _ in range(n):
        optimiser.zero_grad()
        model(torch.randn(4, 32)).square().sum().backward()
        optimiser.step()


def half_way(mode="permuted"):
    """Weights, masks' state and optimiser of a run."""
    torch.manual_seed(0)
    model = net(mode)
    optimiser = optim.AdamW(model.parameters(), 0.1)
    steps(model, optimiser, 3)
    return copy.deepcopy((model.state_dict(), fxmask.state_dict(model), optimiser.state_dict()))


@pytest.mark.parametrize("first", ["weights", "optimiser"])
def test_a_resume_without_the_state_is_noticed_once(first):
    weights, _, state = half_way()
    model = net()
    optimiser = optim.AdamW(model.parameters())
    if first == "optimiser":
        optimiser.load_state_dict(state)
    model.load_state_dict(weights)
    optimiser.load_state_dict(state)
    with pytest.warns(FxMaskWarning, match=BUILT) as told:
        steps(model, optimiser, 1)
    assert len(told) == 1
    steps(model, optimiser, 2)  # any warning is an error


def test_going_back_to_weights_of_before_is_noticed_too():
    torch.manual_seed(0)
    model = net()
    optimiser = optim.AdamW(model.parameters(), 0.5)
    steps(model, optimiser, 2)
    best, masks = copy.deepcopy(model.state_dict()), fxmask.masks(model)
    steps(model, optimiser, 2)
    model.load_state_dict(best)
    assert not all(torch.equal(m, masks[n]) for n, m in fxmask.masks(model).items())
    with pytest.warns(FxMaskWarning, match=BUILT):
        steps(model, optimiser, 1)


def test_a_step_that_makes_an_optimisers_state_is_not_the_first():
    """torch.distributed.checkpoint takes one before it loads a state."""
    torch.manual_seed(0)
    model = net()
    optimiser = optim.AdamW(model.parameters(), 0.1)
    steps(model, optimiser, 3)
    weights, state = copy.deepcopy((model.state_dict(), get_optimizer_state_dict(model, optimiser)))
    model = net()
    optimiser = optim.AdamW(model.parameters())
    model.load_state_dict(weights)
    set_optimizer_state_dict(model, optimiser, state)
    with pytest.warns(FxMaskWarning, match=BUILT):
        steps(model, optimiser, 1)


@pytest.mark.parametrize("case", ["state", "refresh", "new optimiser", "masked anew", "the same weights", "magnitude"])
def test_what_is_no_loss_is_quiet(case):
    """Any warning is an error."""
    mode = "magnitude" if case == "magnitude" else "permuted"
    weights, masks, state = half_way(mode)
    model = net(mode)
    optimiser = optim.AdamW(model.parameters())
    if case != "the same weights":
        model.load_state_dict(weights)
    if case != "new optimiser":
        optimiser.load_state_dict(state)
    if case == "state":
        fxmask.load_state_dict(model, masks)
    elif case == "refresh":
        fxmask.refresh(model)
    elif case == "masked anew":
        fxmask.apply(fxmask.restore(model), NMMask(mode="permuted"))
    elif case == "the same weights":
        model.load_state_dict(model.state_dict())
    steps(model, optimiser, 2)


def test_weights_that_are_swapped_out_and_in_again_are_quiet():
    """Their masks come back: an average is evaluated between two steps. Any warning is an error."""
    torch.manual_seed(0)
    model = net()
    optimiser = optim.AdamW(model.parameters(), 0.1)
    steps(model, optimiser, 2)
    fxmask.refresh(model)
    weights, masks = copy.deepcopy(model.state_dict()), fxmask.masks(model)
    model.load_state_dict({k: v.flip(0) for k, v in weights.items()})
    assert not any(torch.equal(m, masks[n]) for n, m in fxmask.masks(model).items())
    model.load_state_dict(weights)
    steps(model, optimiser, 1)
