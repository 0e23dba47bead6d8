"""`fxmask.finalize` before training has come to its end: masks whose ratio, or which themselves, are behind."""

import copy

import pytest
import torch
from sample_models import mlp, with_zeros

import fxmask
from fxmask.errors import FxMaskWarning

NAMES = ["0.weight", "2.weight"]


def test_a_schedule_before_its_end_warns():
    model = fxmask.apply(mlp(), ratio=0.75, schedule=fxmask.Schedule("linear", steps=10))
    fxmask.step(model, 5)
    half = with_zeros(mlp(), NAMES, (16, 16), 0.375)
    with pytest.warns(FxMaskWarning, match=r"before the schedule has come to its end: 0.weight at 0.375 of 0.75, 2.weight at 0.375 of 0.75"):
        fxmask.finalize(model)
    assert torch.equal(model[0].weight, half[0].weight)
    model = fxmask.apply(mlp(), ratio=0.75, schedule=fxmask.Schedule("linear", steps=10))
    fxmask.step(model, 10)
    fxmask.finalize(model)  # without a warning, which would be an error here


@pytest.mark.parametrize(("schedule", "steps", "at"), [(fxmask.Schedule("cubic", steps=50), 99, "0"), (fxmask.Schedule("linear", steps=150), 150, "0.5")])
def test_a_mask_behind_its_schedule_warns(schedule, steps, at):
    """What becomes permanent is the cached mask, and not what its ratio has come to since."""
    model, x = fxmask.apply(mlp(), ratio=0.75, refresh=100, schedule=schedule), torch.randn(4, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    handle = fxmask.guard(optimizer, model)
    for _ in range(steps):
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
    handle.remove()
    late = copy.deepcopy(model)
    with pytest.warns(FxMaskWarning, match=rf"before the schedule has come to its end: 0.weight at {at} of 0.75(?s:.)*fxmask.refresh\(model\)"):
        fxmask.finalize(late)
    fxmask.refresh(model)
    fxmask.finalize(model)  # without a warning
    assert torch.equal(model[0].weight, with_zeros(mlp(), NAMES, (16, 16), 0.75)[0].weight) and (late[0].weight != 0).sum() > (model[0].weight != 0).sum()


def test_a_mask_behind_its_feedback_warns():
    model, x = fxmask.apply(mlp(), ratio=0.75, refresh=100, schedule=fxmask.Feedback("loss", every=1, change=0.75)), torch.randn(4, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    handle = fxmask.guard(optimizer, model)
    for loss in (3.0, 2.0, 1.0):
        fxmask.feedback(model, loss)
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
    handle.remove()
    late = copy.deepcopy(model)
    with pytest.warns(FxMaskWarning, match="0.weight, whose mask is older than its ratio"):
        fxmask.finalize(late)
    fxmask.refresh(model)
    fxmask.finalize(model)  # without a warning
    assert torch.equal(model[0].weight, with_zeros(mlp(), NAMES, (16, 16), 0.75)[0].weight)


@pytest.mark.parametrize(
    ("schedule", "decides"),
    [(fxmask.Feedback("loss", every=2), lambda model: fxmask.feedback(model, 1.0)), (fxmask.Feedback("flip_rate", every=1, goal=1e-9), None)],
)
def test_a_feedback_that_had_nothing_to_decide_by_warns(schedule, decides):
    """A loss that nobody reports, a run shorter than two looks: the ratio is the first one, and the model dense. What has decided ends where it is."""
    model = fxmask.apply(mlp(), ratio=0.75, schedule=schedule)
    fxmask.step(model, 0)
    fxmask.step(model)
    if decides:
        decides(model)
    with pytest.warns(FxMaskWarning, match="0.weight at 0 of 0.75, whose Feedback has measured nothing, 2.weight(?s:.)*losses by fxmask.feedback"):
        fxmask.finalize(copy.deepcopy(model))
    if decides:
        decides(model)
    fxmask.step(model)
    fxmask.finalize(model)  # without a warning


@pytest.mark.parametrize(("start", "steps", "looks"), [(3, [1, 1, 1, 1], 1), (3, [1, 1, 1, 2], 2), (0, [1, 1, 2], 2), (0, [4], 1), (3, [9], 1)])
def test_a_look_that_has_found_too_many_flips_has_measured(start, steps, looks):
    """One comes with the start, if that is no first step; steps that are told at once have one look at most, which compares with none before it."""
    model = fxmask.apply(mlp(), ratio=0.75, start=start, schedule=fxmask.Feedback("flip_rate", every=2, goal=0.01, initial=0.5))
    fxmask.step(model, 0)
    for n in steps:
        for p in model.parameters():
            torch.nn.init.normal_(p)
        fxmask.step(model, n)
    if looks > 1:
        fxmask.finalize(model)  # without a warning
        return
    with pytest.warns(FxMaskWarning, match="0.weight at 0.5 of 0.75, whose Feedback has measured nothing"):
        fxmask.finalize(model)


def test_ties_that_stay_are_no_mask_behind_its_feedback():
    model = mlp()
    torch.nn.init.ones_(model[0].weight)
    fxmask.apply(model, ratio=0.75, refresh=2, ties="keep", schedule=fxmask.Feedback("loss", every=1, change=0.75))
    fxmask.step(model, 0)
    fxmask.feedback(model, 1.0)
    fxmask.step(model)
    fxmask.refresh(model)
    assert fxmask.masks(model)["0.weight"].all()
    fxmask.finalize(model)  # without a warning
