"""Steps of another optimiser on weights that a guard holds: in its place or in turn with it they are told, as part of its own step they are not."""

import gc
import linecache

import pytest
import torch
from sample_models import mlp
from torch import optim
from torch.distributed.checkpoint import state_dict as checkpoint

import fxmask
from fxmask import FxMaskWarning
from fxmask.guards import other_steps

ON_ANOTHER = r"SGD steps weights whose guard is on another optimiser: expected a guard on this one(.|\n)*where: 0.weight, 2.weight\n(.|\n)*call remove\(\)"


def masked(form="module", **options):
    torch.manual_seed(0)
    return fxmask.apply(torch.fx.symbolic_trace(mlp()) if form == "graph" else mlp(), ratio=0.7, **options)


def gradients(model):
    model.zero_grad()
    loss = model(torch.randn(4, 64)).square().mean()
    loss.backward()
    return loss


def train(model, optimiser):
    gradients(model)
    optimiser.step()


def is_step(warning):
    """Whether it stands where the optimiser steps."""
    return warning.filename == __file__ and "optimiser.step()" in linecache.getline(__file__, warning.lineno)


# ---- told --------------------------------------------------------------------------------------------------------------------------------------------------


def test_a_guard_that_comes_after_the_others_first_steps_is_told_of_once():
    """Another guard keeps the watch on all along: of its own weights alone it has nothing to say."""
    model, critic = masked(), masked()
    first, other, of_critic = optim.AdamW(model.parameters()), optim.SGD(model.parameters(), 0.1), optim.AdamW(critic.parameters())
    fxmask.guard(of_critic, critic)
    train(model, other)
    fxmask.guard(first, model)
    with pytest.warns(FxMaskWarning, match=ON_ANOTHER):
        train(model, other)
    train(model, other)


@pytest.mark.parametrize("form", ["module", "graph"])
@pytest.mark.parametrize("held", ["optimiser", "handle"])
def test_one_that_has_taken_over_is_told_at_its_first_step(held, form):
    model = masked(form)
    optimiser = optim.AdamW(model.parameters())
    handle = fxmask.guard(optimiser, model)
    train(model, optimiser)
    other = optim.SGD(model.parameters(), 0.1)
    if held == "handle":
        del optimiser
        gc.collect()
    with pytest.warns(FxMaskWarning, match=ON_ANOTHER) as caught:
        train(model, other)
    assert len(caught) == 1 and is_step(caught[0]) and handle.policies
    for _ in range(3):
        train(model, other)


@pytest.mark.parametrize("options", [{}, dict(masked_step=True), dict(masked_weights="decay")], ids=["freeze", "masked_step", "decay"])
@pytest.mark.parametrize("first", ["guarded", "other"])
@pytest.mark.parametrize("closure", [False, True])
def test_two_in_turn(closure, first, options):
    """As in a loop with an optimiser for each loss."""
    model = masked()
    optimiser, other = optim.AdamW(model.parameters()), optim.SGD(model.parameters(), 0.1)
    fxmask.guard(optimiser, model, **options)
    if first == "guarded":
        train(model, optimiser)
    model.zero_grad()
    given = [lambda: gradients(model)] if closure else []
    if not closure:
        gradients(model)
    with pytest.warns(FxMaskWarning, match=ON_ANOTHER) as caught:
        other.step(*given)
    assert len(caught) == 1 and caught[0].filename == __file__
    for _ in range(3):
        train(model, optimiser)
        train(model, other)


def test_steps_that_do_not_count_where_masked_weights_are_free():
    """A ramp would stand still for half of the steps; without one there is nothing to tell."""
    for schedule in (None, fxmask.Schedule("cubic", steps=10)):
        model = masked(backward="ste", schedule=schedule)
        optimiser, other = optim.AdamW(model.parameters()), optim.SGD(model.parameters(), 0.1)
        fxmask.guard(optimiser, model)
        if schedule is None:
            train(model, other)
        else:
            with pytest.warns(FxMaskWarning, match=ON_ANOTHER):
                train(model, other)


def test_a_step_of_a_subclass_and_one_that_raised():
    """Its `super().step()` is no step of its own, and says nothing twice; what raised says nothing and spoils nothing."""

    class SGD(optim.SGD):
        fails = True

        def step(self, closure=None):
            if self.fails:
                raise RuntimeError("out of memory")
            super().step(closure)

    model = masked()
    optimiser, other = optim.AdamW(model.parameters()), SGD(model.parameters(), 0.1)
    fxmask.guard(optimiser, model)
    with pytest.raises(RuntimeError, match="out of memory"):
        train(model, other)
    train(model, optimiser)
    SGD.fails = False
    with pytest.warns(FxMaskWarning, match=ON_ANOTHER) as caught:
        train(model, other)
    assert len(caught) == 1 and is_step(caught[0])


def test_the_optimiser_inside_of_a_guarded_wrapper_steps_by_itself():
    """As `second_step` of the usual SAM does: it never runs the step that the guard counts."""
    model = masked()
    inner = optim.SGD(model.parameters(), 0.1)
    outer = Around(inner)
    fxmask.guard(outer, model)
    train(model, outer)
    with pytest.warns(FxMaskWarning, match=ON_ANOTHER):
        train(model, inner)


# ---- one step, of two optimisers ---------------------------------------------------------------------------------------------------------------------------


class Around(optim.Optimizer):
    """Steps through another optimiser, in every so many of its own steps (as accumulation does), and moves the weights by itself, too (as Lookahead does)."""

    def __init__(self, inner, every=1):
        super().__init__(inner.param_groups, {})
        self.inner, self.every, self.calls = inner, every, 0

    def step(self, closure=None):
        self.calls += 1
        if self.calls % self.every:
            return None
        loss = self.inner.step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                torch._foreach_mul_(group["params"], 0.999)
        return loss


class TwoSteps(Around):
    """Climbs, takes gradients anew, comes back and steps, as SAM does: its own step moves weights before and after that of the other."""

    @torch.no_grad()
    def step(self, closure):
        weights = [p for group in self.param_groups for p in group["params"]]
        were = [w.clone() for w in weights]
        torch._foreach_add_(weights, [w.grad for w in weights], alpha=0.05)
        with torch.enable_grad():
            closure()
        torch._foreach_copy_(weights, were)
        self.inner.step()


@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize("which", ["the wrapper", "the wrapped"])
def test_one_optimiser_inside_of_another_is_one(which, every):
    model = masked()
    inner = optim.AdamW(model.parameters())
    outer = Around(inner, every)
    fxmask.guard(outer if which == "the wrapper" else inner, model)
    for _ in range(9):
        train(model, outer)


@pytest.mark.parametrize("which", ["the wrapper", "the wrapped"])
def test_two_steps_in_one(which):
    model = masked()
    inner = optim.AdamW(model.parameters())
    outer = TwoSteps(inner)
    fxmask.guard(outer if which == "the wrapper" else inner, model)
    for _ in range(3):
        gradients(model)
        outer.step(lambda: gradients(model))


def test_a_wrapper_of_a_wrapper():
    model = masked()
    inner = optim.AdamW(model.parameters())
    middle = Around(inner)
    outer = Around(middle)
    fxmask.guard(middle, model)
    for _ in range(3):
        train(model, outer)


def test_the_step_that_a_checkpoint_takes_to_have_a_state_moves_nothing():
    model = masked()
    optimiser, other = optim.AdamW(model.parameters()), optim.AdamW(model.parameters())
    fxmask.guard(optimiser, model)
    checkpoint.get_optimizer_state_dict(model, other)
    assert other.state


def test_a_scaler_that_skips_a_step():
    model = masked()
    optimiser, scaler = optim.AdamW(model.parameters()), torch.amp.GradScaler("cpu", init_scale=4.0)
    outer = Around(optimiser)
    fxmask.guard(optimiser, model)
    for value in (1.0, float("inf"), 1.0):
        model.zero_grad()
        scaler.scale(model(torch.full((4, 64), value)).square().mean()).backward()
        scaler.step(outer)
        scaler.update()


def test_other_weights_and_freed_guards_say_nothing():
    model, critic = masked(), mlp()
    optimiser = optim.AdamW(model.parameters())
    handle = fxmask.guard(optimiser, model)
    other, second = optim.SGD(critic.parameters(), 0.1), optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        train(critic, other)
    handle.remove()
    for _ in range(3):
        train(model, second)
    second.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]})
    fxmask.guard(optimiser, model)
    other.add_param_group({"params": list(model.parameters())})
    model.zero_grad()
    train(critic, other)  # it holds the weights and leaves them alone
    with pytest.warns(FxMaskWarning, match=ON_ANOTHER):
        train(model, other)


def test_a_guard_of_a_model_that_is_dense_again_says_nothing():
    model = masked()
    optimiser = optim.AdamW(model.parameters())
    fxmask.guard(optimiser, model)
    fxmask.restore(model)
    other = optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        train(model, other)
    assert optimiser.state == {}


def test_a_guard_that_another_thread_makes_meanwhile(monkeypatch):
    """Here while a step looks through the guards there are."""
    model, models, shared = masked(), [masked(), masked()], other_steps._shared
    optimiser, others = optim.AdamW(model.parameters()), [optim.AdamW(m.parameters()) for m in models]
    fxmask.guard(optimiser, model)
    fxmask.guard(others[0], models[0])

    def meanwhile(*args):
        if "_fxmask_guard" in vars(models[1][0]) and models[1][0]._fxmask_guard is None:
            fxmask.guard(others[1], models[1])
        return shared(*args)

    monkeypatch.setattr(other_steps, "_shared", meanwhile)
    for m, o in zip((model, *models), (optimiser, *others), strict=True):
        train(m, o)


def test_a_wrapper_is_known_by_its_first_step(monkeypatch):
    """Copies of weights are made until then alone."""
    model = masked()
    inner = optim.AdamW(model.parameters())
    outer = Around(inner)
    fxmask.guard(inner, model)
    train(model, outer)

    def asked(*args):
        raise AssertionError("a wrapper's step is looked at again")

    monkeypatch.setattr("fxmask.guards.other_steps._shared", asked)
    train(model, outer)
