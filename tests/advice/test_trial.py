"""Whole steps of a copy: how they are taken and timed, and what a trial counts."""

import time

import numpy as np
import pytest
import torch
from torch import nn

import fxmask
from fxmask.advice import advise, trial
from fxmask.advice import step as steps
from fxmask.advice.plan import Plan

CPU = torch.device("cpu")


def test_steps_are_timed_in_turns_after_one_that_does_not_count(monkeypatch):
    monkeypatch.setattr(steps, "Stopwatch", lambda device: lambda step: step())
    ran: list[str] = []

    def taking(name, seconds):
        return lambda: ran.append(name) or (seconds if ran.count(name) > 1 else 100.0)

    assert steps.step_seconds({"dense": taking("dense", 2.0), "masked": taking("masked", 1.0)}, CPU, 0.0) == {"dense": 2.0, "masked": 1.0}
    assert ran == ["dense", "masked", "masked", "dense", "dense", "masked", "masked", "dense"] and steps.FEWEST == 3


def test_steps_are_no_more_than_a_dozen_though_there_is_time(monkeypatch):
    monkeypatch.setattr(steps, "Stopwatch", lambda device: lambda step: step())
    ran: list[float] = []
    steps.step_seconds({"dense": lambda: ran.append(1.0) or 1.0}, CPU, 60.0)
    assert len(ran) == 1 + steps.MOST == 13


@pytest.mark.parametrize("make", [None, lambda p: torch.optim.SGD(p, 0.0)], ids=["no optimiser", "one"])
def test_gradients_are_those_of_one_step(make):
    model, x = nn.Linear(8, 8), torch.randn(4, 8)
    step = steps.stepper(model, (x,), {}, steps.mean_square, steps.optimizer_of(model, make))
    step()
    first = model.weight.grad.clone()
    step()
    assert torch.equal(model.weight.grad, first)


def test_sparse_gradients_want_an_optimiser_that_takes_them():
    model, x = nn.Sequential(nn.Embedding(8, 8, sparse=True), nn.Linear(8, 8)), torch.zeros(4, dtype=torch.long)
    with pytest.raises(fxmask.errors.UnsupportedError, match=r"(?s)their sparse gradients, got AdamW: .*\n  fix: optimizer=None"):
        steps.stepper(model, (x,), {}, steps.mean_square, steps.optimizer_of(model, torch.optim.AdamW))()
    steps.stepper(model, (x,), {}, steps.mean_square, steps.optimizer_of(model, torch.optim.SGD))()


class OfNested(nn.Module):
    def __init__(self):
        super().__init__()
        self.nested, self.plain = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x):
        return self.plain(self.nested(x).values())


def test_a_layer_with_a_nested_input_is_not_timed_and_said():
    nested = torch.nested.nested_tensor([torch.randn(3, 32), torch.randn(2, 32)], layout=torch.jagged)
    rows = {row["layer"]: row["why"] for row in fxmask.advise(OfNested(), nested, seconds=1e-6, blocks=[16], ratios=[0.5]).rows}
    assert rows["nested"] == "its input is a nested tensor: expected a plain one" and "nested tensor" not in rows["plain"]
    with pytest.raises(fxmask.errors.UnsupportedError, match=r"nothing to time: .* \(model\): its input is a nested tensor"):
        fxmask.advise(nn.Linear(32, 32), nested, seconds=1.0)


def test_the_loss_where_none_is_given_is_of_complex_outputs_too():
    """Of both parts, and also of a conjugate, which is a view."""
    a, b, z = torch.tensor([3.0, 1.0], requires_grad=True), torch.tensor([4.0, 2.0], requires_grad=True), torch.ones(2, dtype=torch.complex64)
    for of in (torch.complex(a, b), torch.complex(a, b).conj()):
        found = steps.mean_square({"of": of, "real": [2 * a], "no gradient": (z, 3)})
        assert found.item() == (9 + 1 + 16 + 4) / 4 + (36 + 4) / 2
        assert [g.tolist() for g in torch.autograd.grad(found, (a, b))] == [[13.5, 4.5], [2.0, 1.0]]


def a_trial(refresh=10):
    model = nn.Sequential(nn.Linear(64, 64))
    return trial.Trial(model, ((torch.randn(8, 64),), {}), steps.mean_square, torch.optim.SGD, refresh, {"backward": "ste"}, CPU)


@pytest.mark.parametrize(("refresh", "expected"), [(10, 1.3), (1, 4.0), (0, 1.0)])
def test_a_trial_counts_its_share_of_a_rebuild_and_no_other(monkeypatch, refresh, expected):
    """Masks rest in the steps themselves; one rebuild is timed."""
    applied, guarded = [], []
    monkeypatch.setattr(trial, "apply", lambda model, **given: applied.append(given) or model)
    monkeypatch.setattr(trial, "guarded", lambda *given: guarded.append(given))
    monkeypatch.setattr(trial, "step_seconds", lambda *_: {"dense": 2.0, "masked": 1.0})
    monkeypatch.setattr(trial, "Stopwatch", lambda device: lambda run: 3.0)
    tried = a_trial(refresh).of(Plan(0.5, {"0": (32, 32)}, 0.001, 2.0), time.perf_counter() + 60, [])
    assert tried == (2.0, pytest.approx(expected)) and len(guarded) == 1
    assert applied == [{"ratio": 0.5, "block": (32, 32), "refresh": 0, "backward": "ste", "include": ["0"]}]


def test_a_trial_that_cannot_be_made_says_why_and_leaves_the_advice_as_it_is(monkeypatch):
    """No time is left, or the memory does not hold one more model."""
    monkeypatch.setattr(trial, "step_seconds", lambda *_: {"dense": 2.0, "masked": 1.0})
    plan, notes = Plan(0.5, {"0": (32, 32)}, 0.001, 2.0), []
    assert a_trial().of(plan, time.perf_counter() + 0.009, notes) is None and notes == ["The advice was not tried: no time was left."]

    def full(model, **given):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(trial, "apply", full)
    said = []
    assert a_trial().of(plan, time.perf_counter() + 60, said) is None
    assert said == ["The advice was not tried: the device's memory does not hold the model three times."]


def test_a_trial_says_what_its_steps_lose_to_page_faults(monkeypatch):
    monkeypatch.setattr(trial, "step_seconds", lambda *_: {"dense": 2.0, "masked": 1.0})
    seen = iter([(1.0, 1.0, 0), (2.0, 2.0, 50_000)])
    monkeypatch.setattr(trial, "usage", lambda: next(seen))
    notes: list[str] = []
    assert a_trial(0).of(Plan(0.5, {"0": (32, 32)}, 0.001, 2.0), time.perf_counter() + 60, notes) == (2.0, 1.0)
    assert len(notes) == 1 and "page faults" in notes[0]


def test_a_copy_is_in_training():
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout()).eval()
    made = trial.copied(model)
    assert made.training and made[1].training and not model.training and not model[1].training


def test_a_trial_counts_faults_behind_the_first_steps_and_takes_half_of_the_time(monkeypatch):
    """Of what is left the other half is for a second trial."""
    order, given = [], []
    monkeypatch.setattr(trial, "stepper", lambda model, *_: lambda: order.append("step"))
    monkeypatch.setattr(trial, "usage", lambda: order.append("usage") or (0.0, 0.0, 0))
    monkeypatch.setattr(trial, "step_seconds", lambda made, device, seconds: given.append(seconds) or dict.fromkeys(made, 1.0))
    a = a_trial(0)
    a.of(Plan(0.5, {"0": (32, 32)}, 0.001, 2.0), time.perf_counter() + 1000, [])
    a.dense(7.0)
    assert order == ["step", "step", "usage", "usage"] and given == [pytest.approx(500, abs=30), 7.0]


def test_a_dense_step_leaves_no_gradients_behind():
    a = a_trial()
    assert a.dense(0.0) > 0 and all(p.grad is None for p in a.model.parameters())


class Around(nn.Sequential):
    """A type that a pattern names."""


@pytest.mark.parametrize(("check", "share"), [(True, 0.8), (False, 1.0)])
def test_the_search_leaves_time_for_a_trial_and_has_what_apply_would_mask(monkeypatch, check, share):
    """NumPy's numbers are Python's by then, and a pattern may be the type of a module around a layer."""
    given = []
    dense = []
    monkeypatch.setattr(trial.Trial, "dense", lambda self, seconds: dense.append(seconds) or 1.0)
    monkeypatch.setattr(advise, "search", lambda *args: given.extend((*args, time.perf_counter())) or [])
    model = nn.Sequential(nn.Linear(64, 64), Around(nn.Linear(64, 64)))
    fxmask.advise(model, torch.randn(8, 64), seconds=1000.0, refresh=np.int64(3), check=check, exclude=[Around])
    layers, _, _, _, refresh, until, now = given
    assert [layer.name for layer in layers] == ["0"] and type(refresh) is int and dense == [200.0] and until - now == pytest.approx(1000 * share, abs=90)
