"""Averaged and other copies of a masked model: whose masks they have, and who counts their steps."""

import copy
import gc
import io
import re
import warnings

import pytest
import torch
from sample_models import best_blocks, mlp
from saved_states import same
from torch import nn, optim
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from unit.state_runs import CUBIC, FORMS, masked

import fxmask
from fxmask.errors import StateError

STALE = r"evaluated with a mask of weights that it no longer has(.|\n)*where: \w+\.weight\n(.|\n)*fxmask\.refresh\(model\)"


def averaged(config, form="module", steps=8, early=False):
    """A run with `ste`, whose masks move a lot, and its EMA, made before or after the guard."""
    model = masked(form, backward="ste", **{k: v for k, v in config.items() if k != "backward"})
    optimiser = optim.SGD(model.parameters(), lr=2.0, momentum=0.9)
    make = lambda: AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))  # noqa: E731
    ema = make() if early else None
    fxmask.guard(optimiser, model)
    ema = ema or make()
    mean = {n: p.detach().clone() for n, p in model.named_parameters()}
    for i in range(steps):
        torch.manual_seed(i)
        optimiser.zero_grad()
        model(torch.randn(8, 64)).square().mean().backward()
        optimiser.step()
        ema.update_parameters(model)
        if i == 0:
            mean = {n: p.detach().clone() for n, p in model.named_parameters()}
        else:
            mean = {n: torch.lerp(mean[n], p.detach(), 0.1) for n, p in model.named_parameters()}
    for n, p in ema.module.named_parameters():
        torch.testing.assert_close(p, mean[n])
    return model, ema


def best(ema, ratio=0.6):
    return {n: best_blocks(ema.get_parameter(n), (16, 16), ratio) for n in fxmask.masks(ema)}


@FORMS
@pytest.mark.parametrize("early", [False, True], ids=["after-guard", "before-guard"])
def test_an_average_has_the_masks_of_its_own_weights(form, early):
    model, ema = averaged({}, form, early=early)
    own, theirs = fxmask.masks(ema), {f"module.{n}": m for n, m in fxmask.masks(model).items()}
    assert same(own, best(ema)) and not same(own, theirs)
    dense, x = mlp(), torch.randn(3, 64)
    dense.load_state_dict(ema.module.state_dict())
    for name, mask in own.items():
        w = dense.get_parameter(name.removeprefix("module."))
        w.data.mul_(mask.repeat_interleave(16, 0).repeat_interleave(16, 1)[: w.shape[0], : w.shape[1]])
    assert torch.equal(ema(x), dense(x))  # no guard and no step source asked for
    assert {r["masked_weights"] for r in fxmask.explain(ema).rows if r["masked"]} == {"left to the optimiser (no guard)"}


@FORMS
@pytest.mark.parametrize("refresh", [0, 2])
def test_cached_masks_of_an_average_are_those_of_its_making_until_they_are_refreshed(form, refresh):
    """An average tells nobody that it writes its weights: call fxmask.refresh before it is evaluated; it warns. Masks that are built once are the run's."""
    model, ema = averaged(dict(refresh=refresh), form)
    first = {f"module.{n}": m for n, m in fxmask.masks(masked(form)).items()}
    assert same(fxmask.masks(ema), first) and not same(best(ema), first)
    if refresh:
        with pytest.warns(fxmask.FxMaskWarning, match=STALE) as caught:
            ema.eval()(torch.randn(2, 64))
        assert len(caught) == sum(not torch.equal(a, b) for a, b in zip(best(ema).values(), first.values(), strict=True)) > 0
    ema.eval()(torch.randn(2, 64))  # once for each write
    fxmask.refresh(ema)
    assert same(fxmask.masks(ema), best(ema))
    ema(torch.randn(2, 64))
    fxmask.load_state_dict(ema.module, fxmask.state_dict(model))  # or the masks and the step of the run
    assert same(fxmask.masks(ema.module), fxmask.masks(model))
    assert {r["step"] for r in fxmask.explain(ema).rows if r["masked"]} == {8}
    ema.eval()(torch.randn(2, 64))


def test_masks_that_are_built_once_are_never_stale():
    """Also where steps count for something else, and the copy is asked whether its mask is its weights'."""
    copied = copy.deepcopy(masked(refresh=0, backward="rigl")).eval()
    first = fxmask.masks(copied)
    with torch.no_grad():
        for p in copied.parameters():
            p.copy_(p.roll(16, 0))
    copied(torch.randn(2, 64))  # a warning would be an error
    assert same(fxmask.masks(copied), first) and not same(best(copied), first)


@pytest.mark.parametrize("steps", ["guard", "step"])
@pytest.mark.parametrize("config", [dict(schedule=CUBIC), dict(refresh=2), dict(refresh=2, criterion="taylor")], ids=["schedule", "refresh", "taylor"])
def test_copies_whose_weights_follow_by_hand(config, steps):
    """Whoever counts the run's steps: nobody counts the copy's. The run itself, and a copy that is stepped, say nothing."""
    model = masked(backward="ste", **config)
    optimiser = optim.SGD(model.parameters(), lr=20.0, momentum=0.9)
    handle = fxmask.guard(optimiser, model) if steps == "guard" else fxmask.step(model, 0)
    ema, twin = copy.deepcopy(model).eval(), copy.deepcopy(model)
    fxmask.step(twin, 0)
    for i in range(12):
        torch.manual_seed(i)
        optimiser.zero_grad()
        model(torch.randn(8, 64)).square().mean().backward()
        twin(torch.randn(8, 64)).square().mean().backward()
        optimiser.step()
        if steps == "step":
            fxmask.step(model)
        fxmask.step(twin)
        with torch.no_grad():
            for mine, theirs in zip(ema.parameters(), model.parameters(), strict=True):
                mine.lerp_(theirs, 0.1)
    twin.eval()(torch.randn(2, 64))
    with pytest.warns(fxmask.FxMaskWarning, match=r"evaluated at ratio 0\.\d+, not 0\.6" if "schedule" in config else STALE):
        ema(torch.randn(2, 64))
    fxmask.load_state_dict(ema, fxmask.state_dict(model))
    fxmask.step(ema, 0)
    ema(torch.randn(2, 64))
    if handle is not None:
        handle.remove()
    model.eval()(torch.randn(2, 64))  # as its masks were in its last step


@FORMS
def test_stale_masks_are_made_permanent_with_a_warning(form):
    model, ema = averaged(dict(refresh=2), form)
    with pytest.warns(fxmask.FxMaskWarning, match=r"(?s)fxmask\.finalize makes permanent a mask of weights that it no longer has.*where: .*fxmask\.refresh"):
        fxmask.finalize(copy.deepcopy(ema.module) if form == "module" else ema.module)
    _, ema = averaged(dict(refresh=2), form)
    fxmask.refresh(ema)
    fxmask.finalize(ema.module)
    gc.collect()  # a process's first optimiser is in a cycle: it imports the compiler
    fxmask.finalize(model)  # its guard is gone, and its masks are those of its last step


def test_a_compiled_average_says_that_it_is_not_masked():
    """Once, when it is compiled: what it reads of the host would compile it anew."""
    _, ema = averaged(dict(schedule=CUBIC), steps=3)
    compiled = torch.compile(ema.eval(), backend="eager")
    with pytest.warns(fxmask.FxMaskWarning, match=r"a masked model is evaluated at ratio 0\.\d+, not 0\.6"):
        compiled(torch.randn(2, 64))
    compiled(torch.randn(2, 64))


def test_a_teacher_that_stays_in_training_mode():
    """Its batch norms and dropouts want it so; it has no gradients, and nobody steps it."""
    model = masked(schedule=CUBIC)
    fxmask.step(model, 0)
    teacher = copy.deepcopy(model)
    with torch.no_grad(), pytest.warns(fxmask.FxMaskWarning, match=r"evaluated at ratio 0\.1, not 0\.6"):
        teacher(torch.randn(2, 64))
    teacher(torch.randn(2, 64)).sum().backward()  # a run that goes on in a copy may be stepped after this
    with torch.no_grad():
        model(torch.randn(2, 64))


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda m: torch.load(io.BytesIO(_pickled(m)), weights_only=False)], ids=["deepcopy", "torch.save"])
def test_a_copy_whose_weights_stay_says_nothing_of_its_masks(copier):
    """Nor one that loads others, whose masks are made anew, or is converted."""
    model = masked(refresh=20, backward="ste")
    optimiser = optim.SGD(model.parameters(), lr=20.0, momentum=0.9)
    fxmask.guard(optimiser, model)
    for _ in range(4):
        model(torch.randn(8, 64)).square().mean().backward()
        optimiser.step()
    assert not same(fxmask.masks(model), best(model))  # its masks are of before these steps
    twin = copier(model).eval()
    twin(torch.randn(2, 64))
    twin.load_state_dict(masked().state_dict())
    twin(torch.randn(2, 64))
    twin.double()(torch.randn(2, 64, dtype=torch.float64))


def test_an_average_may_be_stepped_as_the_model_is():
    model = masked(refresh=2, schedule=CUBIC, backward="ste")
    optimiser = optim.SGD(model.parameters(), lr=2.0, momentum=0.9)
    fxmask.guard(optimiser, model)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for i in range(10):
        torch.manual_seed(i)
        optimiser.zero_grad()
        model(torch.randn(8, 64)).square().mean().backward()
        optimiser.step()
        ema.update_parameters(model)
        fxmask.step(ema.module)
        assert [int(m.sum()) for m in fxmask.masks(ema).values()] == [int(m.sum()) for m in fxmask.masks(model).values()]
    assert same(fxmask.masks(ema), best(ema)) and not same(list(fxmask.masks(ema).values()), list(fxmask.masks(model).values()))


@FORMS
@pytest.mark.parametrize("config", [dict(schedule=CUBIC), dict(start=3)], ids=["schedule", "start"])
@pytest.mark.parametrize(
    "early",
    [False, True],
    ids=["after-guard", "before-guard"],
)
def test_an_average_whose_steps_nobody_counts_says_that_it_is_not_masked(form, config, early):
    model, ema = averaged(config, form, steps=12, early=early)
    with pytest.warns(fxmask.FxMaskWarning, match=r"a masked model is evaluated at ratio 0\.\d+, not 0\.6"):
        ema.eval()(torch.randn(2, 64))
    fxmask.load_state_dict(ema.module, fxmask.state_dict(model))
    ema(torch.randn(2, 64))
    assert same(fxmask.masks(ema), best(ema))


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda m: torch.load(io.BytesIO(_pickled(m)), weights_only=False)], ids=["deepcopy", "torch.save"])
def test_a_copy_of_a_guarded_model_asks_for_a_step_source(copier):
    model = masked(refresh=2)
    optimiser = optim.SGD(model.parameters(), lr=0.1)
    fxmask.guard(optimiser, model)
    twin = copier(model)
    twin.eval()(torch.randn(2, 64))
    with pytest.raises(StateError, match=r"call fxmask\.guard\(optimizer, model\)"):
        twin.train()(torch.randn(2, 64))


def _pickled(model):
    torch.save(model, buffer := io.BytesIO())
    return buffer.getvalue()


@pytest.mark.parametrize("inside", ["nothing", "a forward", "a load"])
def test_a_stale_mask_is_stale_after_a_while_without_it(inside):
    model = fxmask.apply(nn.Sequential(nn.Linear(64, 64)), ratio=0.5, refresh=3).eval()
    with torch.no_grad():
        model[0].weight.copy_(torch.randn(64, 64))
    with fxmask.dense(model):
        if inside == "a forward":
            model(torch.randn(2, 64))
        elif inside == "a load":  # which builds the mask of what it brings
            model.load_state_dict(nn.Sequential(nn.Linear(64, 64)).state_dict())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(torch.randn(2, 64))
    assert [re.search(STALE, str(w.message)) is not None for w in caught] == [True] * (inside != "a load")


def test_layers_that_two_optimisers_have_stepped_unlike_have_a_ratio_each_after_a_load():
    def run():
        torch.manual_seed(0)
        model = fxmask.apply(mlp(), ratio=0.8, schedule=fxmask.Schedule("linear", steps=6))
        optimisers = [optim.SGD([model[i].weight], lr=0.1) for i in (0, 2)]
        return model, [fxmask.guard(o, model) for o in optimisers], optimisers

    (model, _, optimisers), (other, *_) = run(), run()
    for turn in (0, 0, 0, 0, 1):
        model(torch.randn(4, 64)).square().mean().backward()
        optimisers[turn].step()
        model.zero_grad()
    other.load_state_dict(model.state_dict())
    fxmask.load_state_dict(other, fxmask.state_dict(model))
    ours, theirs = fxmask.masks(model), fxmask.masks(other)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    ratios = [1 - m.float().mean().item() for m in ours.values()]
    assert max(ratios) > 2 * min(ratios) > 0


@pytest.mark.parametrize("rest", [False, True], ids=["no-grad", "frozen"])
def test_a_target_network_in_training_mode_is_told_how_to_follow(rest):
    model = masked(schedule=CUBIC)
    target, optimiser = copy.deepcopy(model).requires_grad_(not rest), optim.SGD(model.parameters(), lr=0.1)
    fxmask.guard(optimiser, model)
    x = torch.randn(8, 64)
    told = re.escape("fxmask.load_state_dict(copy, fxmask.state_dict(model)), then fxmask.step(copy, 0)")
    with torch.set_grad_enabled(rest), pytest.raises(StateError, match=told):
        target(x)
    for _ in range(12):
        fxmask.load_state_dict(target, fxmask.state_dict(model))
        fxmask.step(target, 0)
        with torch.no_grad():
            wanted = target(x)
        optimiser.zero_grad()
        (model(x) - wanted - 1).square().mean().backward()
        optimiser.step()
        torch._foreach_lerp_([p.data for p in target.parameters()], [p.data for p in model.parameters()], 0.1)
    kept = [[int(m.sum()) for m in fxmask.masks(m).values()] for m in (target, model)]
    assert kept[0] == kept[1] and kept[0][0] < 24
