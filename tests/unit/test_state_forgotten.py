"""A resumed run whose guard or whose state was forgotten: training asks for it before it begins."""

import copy

import pytest
import torch
from sample_models import best_blocks, mlp
from saved_states import same, through_a_file
from torch import nn, optim
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.nn.utils import prune
from unit.state_runs import CUT, EACH, FORMS, checkpoint, masked, run, take_up, train

import fxmask
from fxmask.errors import StateError


def interrupted(form, config):
    r = run(form, config)
    r.go()
    train(r, 0, CUT, traced=False)
    return r, through_a_file(checkpoint(r))


@FORMS
@EACH
def test_a_forgotten_guard(form, config):
    _, saved = interrupted(form, config)
    fresh = run(form, config, 99)
    take_up(fresh, saved)
    x = torch.randn(2, 64)
    match = r"(?s)the state that was loaded had a guard, and this process has none.*0\.weight.*call fxmask\.guard\(optimizer, model\) again"
    with pytest.raises(StateError, match=match):
        fresh.model(x)
    fresh.model.eval()(x)
    with pytest.raises(StateError, match="the state that was loaded had a guard"):
        fresh.model.train()(x)
    other = copy.deepcopy(fresh.model)
    with pytest.raises(StateError, match="the state that was loaded had a guard"):
        other(x)
    fresh.go()
    fresh.model(x)
    fxmask.step(other, 0)
    other(x)
    assert {r["step"] for r in fxmask.explain(other).rows if r["masked"]} == {CUT}


def test_a_forgotten_guard_survives_another_save():
    """A state that is loaded and saved again, with no guard in between, still asks for it."""
    _, saved = interrupted("module", "refresh-1")
    fresh = run("module", "refresh-1")
    take_up(fresh, saved)
    again = run("module", "refresh-1")
    take_up(again, through_a_file(checkpoint(fresh)))
    with pytest.raises(StateError, match="the state that was loaded had a guard"):
        again.model(torch.randn(2, 64))


def test_a_forgotten_guard_of_weights_that_other_parameters_make():
    make = lambda: fxmask.apply(nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(64, 64))), ratio=0.5, refresh=2)  # noqa: E731
    model, fresh = make(), make()
    optimiser = optim.SGD(model.parameters(), lr=0.1)
    with pytest.warns(fxmask.FxMaskWarning, match="weights that other parameters make"):
        fxmask.guard(optimiser, model)
    fxmask.load_state_dict(fresh, fxmask.state_dict(model))
    with pytest.raises(StateError, match="the state that was loaded had a guard"):
        fresh(torch.randn(2, 64))


def test_a_state_from_before_the_guard_does_not_take_the_guard_off():
    model = masked(refresh=2)
    state, optimiser = fxmask.state_dict(model), optim.SGD(model.parameters(), lr=0.1)
    fxmask.guard(optimiser, model)
    fxmask.load_state_dict(model, state)
    model(torch.randn(2, 64))


@FORMS
@pytest.mark.parametrize("config", ["refresh-2-cubic", "refresh-3-start-4", "rigl"])
def test_without_the_state_training_asks_for_steps(form, config):
    """Weights and optimiser alone: the count of steps is lost, and training asks for one before it begins."""
    _, saved = interrupted(form, config)
    fresh = run(form, config, 99)
    fresh.model.load_state_dict(saved["model"])
    fresh.optimiser.load_state_dict(saved["optimiser"])
    with pytest.raises(StateError, match=r"(?s)expected a step source before training, got none.*0\.weight.*call fxmask\.guard"):
        fresh.model(torch.randn(2, 64))
    with pytest.warns(fxmask.FxMaskWarning, match=rf"(?s){LOST}.*where: 0\.weight, 2\.weight.*fix: fxmask\.load_state_dict\(model, saved\)"):
        fresh.go()
    assert {r["step"] for r in fxmask.explain(fresh.model).rows if r["masked"]} == {0}  # from the beginning
    fresh.model(torch.randn(2, 64))


LOST = "has stepped weights before this guard, and their masks begin at step 0. In a run that is resumed that loses the masks' state: the steps"


@pytest.mark.parametrize("make", [lambda p: optim.SGD(p, 0.1, momentum=0.9), optim.AdamW, optim.Adagrad], ids=["SGD", "AdamW", "Adagrad"])
def test_a_guard_on_an_optimiser_that_has_stepped_dense_weights(make):
    """Masks that count steps begin there, too, where nothing was forgotten: said, unless `step` has said it."""
    model, x = mlp(), torch.randn(2, 64)
    optimiser = make(model.parameters())
    get_optimizer_state_dict(model, optimiser)  # takes a step of zero gradients where there is no state
    for ready in (False, True):  # Adagrad has state before its first step
        fxmask.apply(model, ratio=0.6, refresh=2)
        if ready:
            with pytest.warns(fxmask.FxMaskWarning, match=LOST):
                handle = fxmask.guard(optimiser, model)
        else:
            handle = fxmask.guard(optimiser, model)
        handle.remove()
        fxmask.restore(model)(x).sum().backward()
        optimiser.step()
    fxmask.apply(model, ratio=0.6, refresh=2)
    fxmask.step(model, 0)
    handle = fxmask.guard(optimiser, model)
    optimiser.zero_grad()
    model(x).sum().backward()
    optimiser.step()
    handle.remove()
    fxmask.guard(optimiser, model)  # masks have not begun there
    fxmask.guard(optimiser, fxmask.apply(fxmask.restore(model), ratio=0.6))  # which counts nothing


STEPS_OF_DECAY = {
    "SGD": lambda p: optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.1),
    "Adam": lambda p: optim.Adam(p, weight_decay=0.1),
    "RMSprop": lambda p: optim.RMSprop(p, momentum=0.9, weight_decay=0.1),
    "Adadelta": lambda p: optim.Adadelta(p, weight_decay=0.1),
    "Adamax": optim.Adamax,
    "Rprop": optim.Rprop,
    "ASGD": optim.ASGD,
}


@pytest.mark.parametrize("make", STEPS_OF_DECAY.values(), ids=STEPS_OF_DECAY)
@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_state_that_a_checkpoint_has_made_is_of_no_step(make, early, dtype):
    """Its step has zero gradients, and what a decay, or a state's own beginning, makes of them is none. Any warning is an error."""
    model = fxmask.apply(mlp().to(dtype), ratio=0.6, refresh=2)
    optimiser = make(model.parameters())
    if early:
        get_optimizer_state_dict(model, optimiser)
    handle = fxmask.guard(optimiser, model)
    if not early:
        get_optimizer_state_dict(model, optimiser)
    steps(model, optimiser, 2)
    handle.remove()
    fxmask.apply(fxmask.restore(model), ratio=0.6, refresh=2)
    with pytest.warns(fxmask.FxMaskWarning, match=LOST):
        fxmask.guard(optimiser, model)


@pytest.mark.parametrize("make", [make for name, make in STEPS_OF_DECAY.items() if name != "ASGD"])  # whose first step leaves what its beginning does
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_step_is_told_beside_a_decay(make, dtype):
    model = mlp().to(dtype)
    optimiser = make(model.parameters())
    model(torch.randn(2, 64, dtype=dtype)).square().sum().backward()
    optimiser.step()
    with pytest.warns(fxmask.FxMaskWarning, match=LOST):
        fxmask.guard(optimiser, fxmask.apply(model, ratio=0.6, refresh=2))


class Counts(optim.SGD):
    """Keeps a count, and no tensor that lies flat in the state."""

    def step(self):
        super().step()
        for p in self.param_groups[0]["params"]:
            self.state[p] = {"step": 1, **self.more()}

    def more(self):
        return {}


class Nested(Counts):
    def more(self):
        return {"factors": {"left": torch.ones(4)}}


@pytest.mark.parametrize("kind", [Counts, Nested])
def test_a_count_with_no_tensors_beside_it_is_of_steps(kind):
    model = mlp()
    optimiser = kind(model.parameters())
    model(torch.randn(2, 64)).sum().backward()
    optimiser.step()
    fxmask.apply(model, ratio=0.6, refresh=2)
    with pytest.warns(fxmask.FxMaskWarning, match=LOST):
        fxmask.guard(optimiser, model)


@pytest.mark.parametrize("options", [dict(refresh=2), dict(schedule=fxmask.Schedule("linear", steps=9))], ids=["cached", "scheduled"])
def test_a_state_of_before_the_first_step_is_none_that_was_forgotten(options):
    model = mlp()
    optimiser = optim.AdamW(model.parameters())
    model(torch.randn(2, 64)).sum().backward()
    optimiser.step()
    state = fxmask.state_dict(fxmask.apply(model, ratio=0.6, **options))
    fxmask.load_state_dict(fxmask.apply(fxmask.restore(model), ratio=0.6, **options), state)
    fxmask.guard(optimiser, model)  # any warning is an error


def test_without_the_state_a_mask_that_is_kept_is_another_one():
    """refresh=0: the mask of the loaded weights takes the place of the one that the run had."""
    r, saved = interrupted("module", "refresh-0")
    fresh = run("module", "refresh-0", 99)
    fresh.model.load_state_dict(saved["model"])
    assert same(fxmask.masks(fresh.model), {n: best_blocks(fresh.model.get_parameter(n), (16, 16), 0.6) for n in fxmask.masks(r.model)})
    assert not same(fxmask.masks(fresh.model), fxmask.masks(r.model))
    fxmask.load_state_dict(fresh.model, saved["masks"])
    assert same(fxmask.masks(fresh.model), fxmask.masks(r.model))


def test_without_the_state_the_message_names_it():
    with pytest.raises(StateError, match=r"(?s)expected a step source.*fxmask\.load_state_dict"):
        masked(refresh=2)(torch.randn(2, 64))


def half_way(model, optimiser):
    """Weights and optimiser of a run, as they are saved without the masks' state."""
    fxmask.guard(optimiser, model)
    steps(model, optimiser, 3)
    return {k: v.clone() for k, v in model.state_dict().items()}, copy.deepcopy(optimiser.state_dict())


def steps(model, optimiser, n):
    for _ in range(n):
        optimiser.zero_grad()
        model(torch.randn(2, 64).to(next(model.parameters()))).square().sum().backward()
        optimiser.step()


def go_on(model, optimiser, guarded):
    if not guarded:
        fxmask.guard(optimiser, model)
    steps(model, optimiser, 1)


RESUMED = [dict(refresh=0), dict(refresh=2), dict(schedule=fxmask.Schedule("linear", steps=9))]


@pytest.mark.parametrize("first", ["guard", "loads"])
@pytest.mark.parametrize("options", RESUMED, ids=["refresh-0", "refresh-2", "scheduled"])
def test_a_resume_without_the_state_is_noticed_in_either_order(first, options):
    model = fxmask.apply(mlp(), ratio=0.6, **options)
    weights, state = half_way(model, optim.AdamW(model.parameters()))
    model = fxmask.apply(mlp(), ratio=0.6, **options)
    optimiser = optim.AdamW(model.parameters())
    if first == "guard":
        fxmask.guard(optimiser, model)
    model.load_state_dict(weights)
    optimiser.load_state_dict(state)
    with pytest.warns(fxmask.FxMaskWarning, match=LOST) as told:
        go_on(model, optimiser, guarded=first == "guard")
    assert len(told) == 1
    steps(model, optimiser, 2)  # any warning is an error


@pytest.mark.parametrize("first", ["guard", "loads"])
@pytest.mark.parametrize("norm", [nn.utils.parametrizations.weight_norm, lambda m: prune.identity(m, "weight")], ids=["weight_norm", "prune"])
def test_masks_of_weights_that_other_parameters_make(norm, first):
    make = lambda: fxmask.apply(nn.Sequential(norm(nn.Linear(64, 64))), ratio=0.5, backward="ste", refresh=2)  # noqa: E731
    model = make()
    weights, state = half_way(model, optim.AdamW(model.parameters()))
    masks, model = fxmask.state_dict(model), make()
    optimiser = optim.AdamW(model.parameters())
    if first == "guard":
        fxmask.guard(optimiser, model)
    model.load_state_dict(weights)
    optimiser.load_state_dict(state)
    with pytest.warns(fxmask.FxMaskWarning, match=rf"(?s){LOST}.*where: 0\.weight\n") as told:
        go_on(model, optimiser, guarded=first == "guard")
    assert len(told) == 1
    model = make()
    model.load_state_dict(weights)
    fxmask.load_state_dict(model, masks)
    optimiser = optim.AdamW(model.parameters())
    optimiser.load_state_dict(state)
    go_on(model, optimiser, guarded=False)  # any warning is an error


RAMP = fxmask.ActivationPruning(0.5, 16, schedule=fxmask.Schedule("linear", steps=9))


@pytest.mark.parametrize("first", ["guard", "loads"])
@pytest.mark.parametrize("counts", [False, True], ids=["masks-count-nothing", "masks-count"])
def test_a_schedule_of_pruned_inputs_without_the_state(first, counts):
    mask = fxmask.WeightMask(refresh=2 if counts else 1)
    model = fxmask.apply(mlp(), mask, RAMP)
    weights, state = half_way(model, optim.AdamW(model.parameters()))
    model = fxmask.apply(mlp(), mask, RAMP)
    optimiser = optim.AdamW(model.parameters())
    if first == "guard":
        fxmask.guard(optimiser, model)
    model.load_state_dict(weights)
    optimiser.load_state_dict(state)
    what = r"their masks begin.*where: 0\.weight, 2\.weight\n" if counts else r"their schedules of pruned inputs begin.*where: 0, 2\n"
    with pytest.warns(fxmask.FxMaskWarning, match=f"(?s)has stepped weights before this guard, and {what}") as told:
        go_on(model, optimiser, guarded=first == "guard")
    assert len(told) == 1
    steps(model, optimiser, 2)  # any warning is an error


def test_a_schedule_of_pruned_inputs_of_models_that_are_guarded_together():
    """By a list that nobody keeps."""
    model = fxmask.apply(mlp(), fxmask.WeightMask(), RAMP)
    _, state = half_way(model, optim.AdamW(model.parameters()))
    model = fxmask.apply(mlp(), fxmask.WeightMask(), RAMP)
    optimiser = optim.AdamW(model.parameters())
    fxmask.guard(optimiser, nn.ModuleList([model]))
    optimiser.load_state_dict(state)
    with pytest.warns(fxmask.FxMaskWarning, match=r"(?s)their schedules of pruned inputs begin.*where: 0\.0, 0\.2\n"):
        steps(model, optimiser, 1)


@pytest.mark.parametrize("taken", ["before the first step", "half-way", "never"])
def test_a_schedule_of_pruned_inputs_that_nobody_forgot(taken):
    """Its state is loaded, be it that of step 0; or `step` says that it begins now."""
    model = fxmask.apply(mlp(), fxmask.WeightMask(), RAMP)
    masks = fxmask.state_dict(model)
    weights, state = half_way(model, optim.AdamW(model.parameters()))
    masks = masks if taken == "before the first step" else fxmask.state_dict(model)
    model = fxmask.apply(mlp(), fxmask.WeightMask(), RAMP)
    optimiser = optim.AdamW(model.parameters())
    model.load_state_dict(weights)
    if taken == "never":
        fxmask.step(model, 0)
    else:
        fxmask.load_state_dict(model, masks)
    optimiser.load_state_dict(state)
    fxmask.guard(optimiser, model)  # any warning is an error
    steps(model, optimiser, 1)
    fxmask.guard(optimiser, fxmask.apply(fxmask.restore(model), fxmask.WeightMask(), fxmask.ActivationPruning(0.5, 16)))  # which counts nothing


@pytest.mark.parametrize("options", RESUMED, ids=["refresh-0", "refresh-2", "scheduled"])
def test_a_state_that_comes_after_the_guard_is_in_time(options):
    model = fxmask.apply(mlp(), ratio=0.6, **options)
    weights, state = half_way(model, optim.AdamW(model.parameters()))
    masks = fxmask.state_dict(model)
    model = fxmask.apply(mlp(), ratio=0.6, **options)
    optimiser = optim.AdamW(model.parameters())
    fxmask.guard(optimiser, model)
    optimiser.load_state_dict(state)
    model.load_state_dict(weights)
    fxmask.load_state_dict(model, masks)
    steps(model, optimiser, 1)  # any warning is an error


def test_a_warning_made_an_error_leaves_no_guard():
    model = mlp()
    optimiser = optim.AdamW(model.parameters())
    steps(model, optimiser, 1)
    fxmask.apply(model, ratio=0.6, refresh=2)
    with pytest.raises(fxmask.FxMaskWarning, match=LOST):
        fxmask.guard(optimiser, model)
    assert not optimiser._optimizer_step_pre_hooks and not optimiser._optimizer_step_post_hooks
    fxmask.step(model, 0)
    fxmask.guard(optimiser, model)
    steps(model, optimiser, 1)


def test_masks_for_good_that_no_load_of_weights_has_moved_are_none_that_were_lost():
    """One shot in the middle of a training; and masks of the user's, which no weights move."""
    model = mlp()
    optimiser = optim.AdamW(model.parameters())
    steps(model, optimiser, 2)
    fxmask.guard(optimiser, fxmask.apply(model, ratio=0.6, refresh=0)).remove()
    given = fxmask.masks(fxmask.restore(model) and fxmask.apply(model, ratio=0.6, criterion="random"))
    model = fxmask.apply(fxmask.restore(model), masks=given)
    model.load_state_dict(model.state_dict())
    fxmask.guard(optimiser, model)
    steps(model, optimiser, 1)
