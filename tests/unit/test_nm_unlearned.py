"""Learned masks whose logits no optimiser has: a warning, as without one the masks never change and nobody says so."""

import warnings

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from unit.nm_models import logits_of

import fxmask
from fxmask import FxMaskWarning, NMMask

X = torch.randn(4, 32)


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 32))


def steps(model: nn.Module, *optimizers: torch.optim.Optimizer, times: int = 3) -> list[str]:
    """What the steps of these, one after the other, say."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(times):
            model(X).square().sum().backward()
            for o in optimizers:
                o.step()
                o.zero_grad()
    return [str(w.message) for w in caught if issubclass(w.category, FxMaskWarning)]


@pytest.mark.parametrize("trains", [False, True], ids=["weights rest", "weights train"])
def test_an_optimiser_made_before_apply_warns_once_and_is_told_how(trains):
    model = net()
    old = torch.optim.AdamW(model.parameters(), lr=0.1)
    fxmask.apply(model, NMMask(mode="learned", train_weights=trains))
    before = [p.detach().clone() for p in logits_of(model)]
    assert steps(model, old, times=1) == []  # the logits' optimiser may come behind it
    (said,) = steps(model, old)
    for words in ("steps without them: expected one that has them", "where: 0, 2", "add_param_group({'params': logits})"):
        assert words in said
    assert all(torch.equal(a, b) for a, b in zip(before, logits_of(model), strict=True))
    old.add_param_group({"params": logits_of(model)})
    assert steps(model, old) == [] and not any(torch.equal(a, b) for a, b in zip(before, logits_of(model), strict=True))


@pytest.mark.parametrize("case", ["one for each", "made after", "frozen", "restored", "of other layers"])
def test_who_learns_or_does_not_want_to_hears_nothing(case):
    model = net()
    old = torch.optim.AdamW(model[1].parameters() if case == "of other layers" else model.parameters(), lr=0.1)
    fxmask.apply(model, NMMask(mode="learned"))
    if case in ("frozen", "restored"):
        (fxmask.freeze if case == "frozen" else fxmask.restore)(model)
    mine = [torch.optim.AdamW(model.parameters(), lr=0.1)] if case == "made after" else [old]
    mine += [torch.optim.SGD(logits_of(model), lr=0.1)] if case == "one for each" else []
    assert steps(model, *mine) == []


def test_logits_that_freeze_has_stopped_are_missed_by_nobody():
    """Theirs are still the gradients of before, which no optimiser has taken."""
    model = net()
    old = torch.optim.AdamW(model.parameters(), lr=0.1)
    fxmask.apply(model, NMMask(mode="learned"))
    assert steps(model, old, times=1) == []
    fxmask.freeze(model)
    assert all(p.grad is not None for p in logits_of(model)) and steps(model, old) == []


def test_a_step_that_makes_an_optimisers_state_passes_nothing_over():
    """torch.distributed.checkpoint takes one; the next one may be the first that the logits' optimiser comes behind."""
    model = net()
    old = torch.optim.AdamW(model.parameters(), lr=0.1)
    fxmask.apply(model, NMMask(mode="learned", train_weights=True))
    model(X).square().sum().backward()
    old.zero_grad()  # the logits' gradients stay
    get_optimizer_state_dict(model, old)
    assert old.state and steps(model, old, times=1) == []
    assert len(steps(model, old, times=1)) == 1
