"""Guards that a restore has ended, and masks that came after a guard: who takes a layer up, and what is said before a step would move it."""

import pytest
import torch
from torch import nn, optim

import fxmask
from fxmask import FxMaskWarning
from fxmask.guards.guard_handle import handles_of

MASKED = dict(ratio=0.5, block=(8, 8), refresh=2)
ANEW = r"a guard ended with fxmask\.restore, and its model is masked anew: expected a new guard, got none"


def net(n=2, **options):
    return fxmask.apply(nn.Sequential(*(nn.Linear(32, 32) for _ in range(n))), **(MASKED | options))


def sgd(model):
    return optim.SGD(model.parameters(), lr=0.1)


def train(model, optimiser):
    optimiser.zero_grad()
    model(torch.randn(4, 32)).square().sum().backward()
    optimiser.step()


def adds(optimiser, layer):
    optimiser.add_param_group({"params": list(layer.requires_grad_(True).parameters())})


def test_a_layer_that_was_not_restored_is_taken_up_still():
    """All that the guard held was; the layer that waits was masked before it, and no other guard is there."""
    model = net(refresh=1)
    optimiser = sgd(model[0])
    handle = fxmask.guard(optimiser, model)
    fxmask.restore(model[0])
    train(model, optimiser)
    adds(optimiser, model[1])
    train(model, optimiser)
    assert handle.policies == {"1.weight": "freeze"} and model[1]._fxmask_step == 1


def test_what_an_ended_guard_would_take_up_is_the_new_ones():
    model = net(refresh=1)
    optimiser = sgd(model[0])
    old = fxmask.guard(optimiser, model, "free")
    fxmask.apply(fxmask.restore(model[0]), ratio=0.5, block=(8, 8))
    new = fxmask.guard(optimiser, model)
    assert handles_of(optimiser) == [new]
    adds(optimiser, model[1])
    train(model, optimiser)
    assert new.policies == {"0.weight": "freeze", "1.weight": "freeze"} and old.policies == {}


def test_guards_of_other_models_stay():
    """One is in force, and one has ended whose model nobody guards yet."""
    models = [net(1, refresh=1) for _ in range(3)]
    whole = nn.Sequential(*models)
    optimiser = sgd(whole)
    _, second, third = (fxmask.guard(optimiser, m) for m in models)
    for m in (models[0], models[2]):
        fxmask.restore(m)
    fxmask.apply(models[0], ratio=0.5, block=(8, 8))
    new = fxmask.guard(optimiser, models[0])
    assert handles_of(optimiser) == [second, third, new]
    fxmask.apply(models[2], ratio=0.5, block=(8, 8))
    with pytest.warns(FxMaskWarning, match=ANEW):
        train(whole, optimiser)


@pytest.mark.parametrize("what", ["rests", "waits", "is pruned"])
def test_a_guard_that_has_something_to_do_yet_stays(what):
    """The weights that it held are the new one's: it still counts a layer that rests, or whose inputs are pruned, or takes one up."""
    model = net(refresh=1)
    if what == "is pruned":
        fxmask.apply(fxmask.restore(model[1]), fxmask.ActivationPruning(0.5, 8, schedule=fxmask.Schedule(steps=4), stages=2))
    model[1].requires_grad_(what != "rests")
    optimiser = sgd(model if what == "is pruned" else model[0])
    old = fxmask.guard(optimiser, model)
    fxmask.apply(fxmask.restore(model[0]), ratio=0.5, block=(8, 8))
    new = fxmask.guard(optimiser, model[0])
    assert handles_of(optimiser) == [old, new]


def test_a_handle_that_was_taken_off_is_removed_without_harm():
    model = net()
    optimiser = sgd(model)
    with fxmask.guard(optimiser, model) as old:
        fxmask.apply(fxmask.restore(model), **MASKED)
        new = fxmask.guard(optimiser, model)
    old.remove()
    train(model, optimiser)
    assert old.policies == {} and len(new.policies) == 2 and model[0]._fxmask_step == 1


def test_a_guard_that_is_made_inside_a_step_leaves_the_one_under_way_where_it_is():
    model, new = net(refresh=1), []
    optimiser = sgd(model)
    old = fxmask.guard(optimiser, model)

    def closure():
        if not new:
            fxmask.apply(fxmask.restore(model), ratio=0.5, block=(8, 8))
            new.append(fxmask.guard(optimiser, model))
        optimiser.zero_grad()
        loss = model(torch.ones(4, 32)).square().sum()
        loss.backward()
        return loss

    optimiser.step(closure)
    assert handles_of(optimiser) == [old, *new]
    optimiser.step(closure)
    assert old.policies == {} and len(new[0].policies) == 2


@pytest.mark.parametrize("ended", [False, True])
def test_the_warning_of_new_masks_comes_before_the_step(ended):
    """Where a filter makes an error of it, nothing has moved, and nothing was counted."""
    model = net(include="0", refresh=1)
    optimiser = sgd(model)
    handle = fxmask.guard(optimiser, model)
    train(model, optimiser)
    fxmask.apply(fxmask.restore(model) if ended else model, ratio=0.5, block=(8, 8), include="0" if ended else "1")
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(FxMaskWarning, match="expected a new guard, got none"):
        train(model, optimiser)
    assert all(map(torch.equal, before, model.parameters())) and handle.steps == 1


def test_layers_that_another_guard_of_the_optimiser_takes_up_want_no_new_one():
    """Any warning is an error, though the first guard looks before the second one has them."""
    model = net(3, include="0", refresh=1)
    optimiser = sgd(model[:2])
    fxmask.guard(optimiser, model)
    fxmask.apply(model, ratio=0.5, block=(8, 8), include=["1", "2"])
    handle = fxmask.guard(optimiser, model[1:])
    adds(optimiser, model[2])
    train(model, optimiser)
    assert len(handle.policies) == 2


def test_masks_whose_state_had_a_guard_want_a_new_one():
    """The state says that steps are counted, and nobody counts them. In eval, where no forward refuses it."""
    model = net()
    optimiser = sgd(model)
    fxmask.guard(optimiser, model)
    train(model, optimiser)
    state = fxmask.state_dict(model)
    fxmask.load_state_dict(fxmask.apply(fxmask.restore(model), **MASKED), state)
    with pytest.warns(FxMaskWarning, match=ANEW):
        train(model.eval(), optimiser)
