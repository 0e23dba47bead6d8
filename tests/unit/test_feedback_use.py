"""Feedback asked for in vain: wrong options, masks and reports, nobody who counts, states that were changed."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from sample_models import Computed, mlp
from saved_states import same
from unit.feedback_masks import FLIPS, LOSS, masked

import fxmask
from fxmask.compiler import backend
from fxmask.errors import ConfigError, FxMaskWarning, StateError, UnsupportedError

pytestmark = pytest.mark.usefixtures("one_thread")

WRONG = [
    (dict(measure="accuracy"), r"unknown measure: expected one of loss, flip_rate, bytes, got 'accuracy'"),
    (dict(every=0), r"Feedback\.every counts reports of the loss: expected an int of at least 1, got 0"),
    (dict(measure="flip_rate", goal=0.1, every=0), r"Feedback\.every counts optimiser steps: expected an int of at least 1, got 0"),
    (dict(initial=1.0), r"Feedback\.initial: ratio is the fraction .* expected a finite number in \[0, 1\), got 1\.0"),
    (dict(change=1.5), r"Feedback\.change: .*got 1\.5"),
    (dict(change=0.0), r"Feedback\.change: expected a change of the ratio above 0"),
    (dict(goal=math.nan), r"Feedback\.goal of 'loss' is a loss: expected a finite number, or None for the best so far, got nan"),
    (dict(measure="flip_rate"), r"Feedback\.goal of 'flip_rate' is a share of the blocks: expected a number in \(0, 1\], got None"),
    (dict(measure="flip_rate", goal=0.0), r"expected a number in \(0, 1\], got 0\.0"),
    (dict(measure="bytes"), r"Feedback\.goal of 'bytes' is a budget: expected a number of bytes, an int of at least 1, got None"),
    (dict(measure="bytes", goal=1e6), r"got 1000000\.0"),
    (dict(measure="bytes", goal=0), r"an int of at least 1, got 0"),
    (dict(goal=True), r"Feedback\.goal of 'loss' is a loss: expected a finite number, or None for the best so far, got True"),
    (dict(tolerance=-0.1), r"Feedback\.tolerance is a share of the loss: expected a finite number of at least 0, got -0\.1"),
    (dict(measure="bytes", goal=9, tolerance=0.1), r"Feedback\.tolerance is for measure='loss': expected 0\.0 with 'bytes', got 0\.1"),
    (dict(stop=0.5), r"Feedback\.stop is for measure='bytes': expected None with 'loss', got 0\.5"),
]


@pytest.mark.parametrize(("options", "text"), WRONG, ids=lambda v: str(v)[:40])
def test_wrong_feedback(options, text):
    with pytest.raises(ConfigError, match=text):
        fxmask.Feedback(**{"measure": "loss", "every": 1, **options})


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (dict(ratio=0.3, schedule=fxmask.Feedback("loss", every=1, initial=0.4)), r"begins above its end: expected initial of at most .* 0\.3, got "),
        (dict(refresh=0, schedule=LOSS), r"refresh=0 builds the mask once, and a schedule wants it to move"),
        (dict(refresh=3, schedule=FLIPS), r"looks every 2 steps at masks that are built every 3: expected every of at least refresh, got every=2 "),
        (dict(schedule=FLIPS, phases={5: dict(refresh=3)}), r"phases\[5\]: Feedback\('flip_rate'\) looks every 2 steps"),
        (dict(schedule="loss"), r"schedule: expected None or a fxmask\.Schedule \(or fxmask\.Feedback\), got 'loss'"),
        (dict(ratio=1.0, schedule=fxmask.Schedule(steps=5)), r"expected a finite number in \[0, 1\), got 1\.0"),
        (dict(ratio=1.2, schedule=LOSS), r"expected a finite number in \[0, 1\), got 1\.2"),
        (dict(ratio=1 - 1e-12, schedule=LOSS), r"expected a finite number in \[0, 1\), got 0\.999999999999"),
    ],
    ids=str,
)
def test_wrong_masks(options, text):
    with pytest.raises(ConfigError, match=text):
        fxmask.WeightMask(**options)


@pytest.mark.parametrize("value", [math.nan, math.inf, "1.0", None, True, torch.ones(2), torch.tensor(math.nan)], ids=str)
def test_a_report_that_is_no_loss(value):
    model = masked(LOSS)
    before = fxmask.state_dict(model)
    with pytest.raises(ConfigError, match=r"fxmask\.feedback: expected a loss, a finite number, got .*; leave a report out where training has diverged"):
        fxmask.feedback(model, value)
    assert same(fxmask.state_dict(model), before)


def test_reports_that_nobody_wants():
    with pytest.raises(StateError, match=r"no mask of this model follows a loss: expected one with schedule=fxmask\.Feedback\('loss'(.|\n)*Sequential"):
        fxmask.feedback(masked(FLIPS), 1.0)
    with pytest.raises(StateError, match=r"fxmask\.feedback: nothing is masked"):
        fxmask.feedback(mlp(), 1.0)
    model = masked(LOSS)
    with fxmask.dense(model), pytest.raises(StateError, match=r"fxmask\.feedback inside fxmask\.dense(.|\n)*report the loss of the masked model"):
        fxmask.feedback(model, 1.0)


def test_nobody_counts():
    model = masked(LOSS)
    with pytest.raises(StateError, match=r"start, schedule, .* count optimiser steps"):
        model(torch.randn(2, 64))
    with pytest.warns(FxMaskWarning, match=r"a masked model is evaluated at ratio 0\.0, not 0\.7"):
        model.eval()(torch.randn(2, 64))


def test_a_weight_that_a_graph_computes_cannot_be_looked_at():
    graph = torch.export.export(Computed(), (torch.randn(2, 32),)).module()
    with pytest.raises(UnsupportedError, match=r"Feedback\('flip_rate'\) looks at the weight between steps, and this graph computes it"):
        fxmask.apply(graph, fxmask.WeightMask(block=(8, 8), schedule=FLIPS))
    fxmask.feedback(fxmask.apply(graph, fxmask.WeightMask(block=(8, 8), schedule=LOSS)), 1.0)


def test_the_backend_refuses():
    with pytest.raises(UnsupportedError, match=r"keeps no state between calls, and schedule counts optimiser steps"):
        backend.parse({"schedule": LOSS})
    call = torch.compile(mlp(), backend="fxmask", options={"inner": "eager", "overrides": {"0": {"schedule": LOSS}}})
    with pytest.raises(Exception, match="the options of '0' count optimiser steps or cache a mask"):
        call(torch.randn(2, 64))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (dict(level=9), r"feedback\.level: expected an int from 0 to 4, got 9"),
        (dict(next=True), r"feedback\.next: expected an int from 0 to 4, got True"),
        (dict(told=1), r"feedback\.told: expected an int from 0 to 0, got 1"),
        (dict(best=math.nan), r"feedback\.best: expected a finite number, got nan"),
        (dict(total=None), r"feedback\.total: expected a finite number, got None"),
        (dict(looked=torch.ones(2, 2, dtype=torch.bool)), r"feedback\.looked: expected None or a mask of \(12, 8\), got Tensor"),
        (dict(more=1), r"feedback: expected a dict with level, next, best, total, told and looked, got \['best'"),
        (None, r"feedback: expected a dict with level, .*, got None"),
    ],
    ids=str,
)
def test_a_state_that_was_changed(change, text):
    model = masked(LOSS)
    state = fxmask.state_dict(model)
    entry = state["masks"]["0.weight"]
    entry["feedback"] = None if change is None else {**entry["feedback"], **change}
    with pytest.raises(StateError, match=f"the state was changed since it was saved: {text}"):
        fxmask.load_state_dict(model, state)


def test_a_mask_that_no_ratio_of_a_feedback_gives():
    model = masked(LOSS, refresh=2)
    state = fxmask.state_dict(model)
    state["masks"]["0.weight"]["mask"][2:] = False
    with pytest.raises(StateError, match=r"mask: expected 29 to 96 kept blocks, got 16"):
        fxmask.load_state_dict(model, state)


def test_a_state_without_feedback_takes_none():
    model = masked(None)
    state = fxmask.state_dict(model)
    assert "feedback" not in state["masks"]["0.weight"]
    state["masks"]["0.weight"]["feedback"] = {}
    with pytest.raises(StateError, match=r"feedback: expected none, got dict"):
        fxmask.load_state_dict(model, state)


def test_a_ratio_begins_exactly_where_it_is_told():
    """Of a third the nearest billionth is another number."""
    f = fxmask.Feedback("loss", every=1, initial=1 / 3)
    assert (f.ratio_of(-1, 0.5), f.ratio_of(0, 0.5), f.ratio_of(99, 0.5)) == (1 / 3, 1 / 3, 0.5)


def test_numbers_of_numpy_are_saved_as_plain_ones():
    f = fxmask.Feedback("loss", every=np.int64(2), goal=np.float64(1.0), initial=np.float64(0.1), change=np.float64(0.2), tolerance=np.float64(0.1))
    assert {type(v) for v in dataclasses.asdict(f).values()} == {str, int, float, type(None)}
