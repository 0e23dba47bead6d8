"""Phases asked for in vain: wrong options, nobody who counts, layers and backends that cannot follow."""

import copy
import re
from contextlib import nullcontext

import pytest
import torch
from sample_models import mlp
from unit.phased_runs import LAST, PHASES, config, run, train

import fxmask
from fxmask.compiler import backend
from fxmask.errors import ConfigError, FxMaskWarning, StateError, UnsupportedError

pytestmark = pytest.mark.usefixtures("one_thread")

WRONG = [
    (3, r"phases: expected \{optimiser step: dict of options, ...\}, such as .*, got 3\."),
    ({0: dict(backward="ste")}, r"steps of at least 1 \(the options of the mask itself are those of step 0\), got 0"),
    ({True: dict(backward="ste")}, "steps of at least 1"),
    ({1.5: dict(backward="ste")}, "got 1.5"),
    (((2, (("backward", "ste"),)), (2, (("ties", "keep"),))), "each step once"),
    ({2: "ste"}, r"phases: expected \{optimiser step"),
    ({2: dict(ratio=0.9)}, r"phases\[2\]: expected some of block, backward, .*, got ratio; the ratio moves by schedule="),
    ({2: dict(backward="st")}, r"phases\[2\]: unknown backward mode: expected one of masked, .*, got 'st'"),
    ({2: dict(block=(0, 4))}, r"phases\[2\]: block must be two positive ints"),
    ({2: dict(backward="masked")}, r"phases\[2\] changes nothing: expected another value than before this step, got backward='masked'; leave the phase out"),
    ({2: {}}, r"phases\[2\] changes nothing: .*, got no option"),
    ({2: dict(backward="ste"), 4: dict(backward="ste")}, r"phases\[4\] changes nothing"),
    ({2: dict(cover=True), 4: dict(ties="keep")}, r"phases\[4\]: cover: expected a bool, and ties='lowest' with True"),
]


@pytest.mark.parametrize(("phases", "text"), WRONG, ids=lambda v: str(v)[:40])
def test_wrong_phases(phases, text):
    with pytest.raises(ConfigError, match=text):
        config(phases)


def test_refresh_0_waits_for_the_end_of_a_ramp():
    config({8: dict(refresh=0)}, schedule=fxmask.Schedule(steps=5), start=3)
    with pytest.raises(ConfigError, match=r"phases\[7\]: refresh=0 builds the mask once, and a schedule wants it to move"):
        config({7: dict(refresh=0)}, schedule=fxmask.Schedule(steps=5), start=3)


def test_nobody_counts():
    model = fxmask.apply(mlp(), config())
    with pytest.raises(StateError, match=r"phases, regrow, gain, backward='rigl' and criteria of gradients.* count optimiser steps(.|\n)*call fxmask\.guard"):
        model(torch.randn(2, 64))
    with pytest.warns(FxMaskWarning, match=r"evaluated in its phase of step 0, in blocks of \(8, 8\): phases count steps, none was told"):
        model.eval()(torch.randn(2, 64))
    fxmask.step(model, 0)
    model.eval()(torch.randn(2, 64))


@pytest.mark.parametrize("options", [dict(block=(16, 16)), dict(criterion="l1"), dict(ties="keep"), dict(cover=True)], ids=lambda o: next(iter(o)))
def test_whatever_makes_a_later_mask_another_one_is_told(options):
    model = fxmask.apply(mlp(), fxmask.WeightMask(ratio=0.6, block=(8, 8), phases={3: options})).eval()
    with pytest.warns(FxMaskWarning, match=r"evaluated in its phase of step 0, in blocks of \(8, 8\): phases count steps, none was told"):
        model(torch.randn(2, 64))


def test_a_copy_that_is_evaluated_after_the_last_phase_says_nothing():
    model, optimiser = run(config())
    train(model, optimiser, 0, LAST)
    copy.deepcopy(model).eval()(torch.randn(2, 64))


@pytest.mark.parametrize(("step", "told"), [(0, True), (3, True), (5, False)])
def test_a_phase_that_names_what_is_in_force_already_is_no_change(step, told):
    phases = {2: dict(block=(16, 16)), 4: dict(block=(8, 8)), 6: dict(block=(8, 8), refresh=4)}
    model = fxmask.apply(mlp(), fxmask.WeightMask(ratio=0.6, block=(8, 8), phases=phases))
    fxmask.step(model, step)
    with pytest.warns(FxMaskWarning, match="evaluated in its phase of step") if told else nullcontext():  # warnings are errors here
        copy.deepcopy(model).eval()(torch.randn(2, 64))


def test_steps_that_are_counted_inside_a_cuda_graph(monkeypatch):
    """Its replays would count none, and stay in one phase; the step is not taken. (No GPU here: the capture is pretended.)"""
    model = fxmask.apply(mlp(), config())
    with monkeypatch.context() as m:
        m.setattr("fxmask.passes.state.tensors.capturing", lambda t: True)
        fxmask.step(model, 0)
        with pytest.raises(UnsupportedError, match=r"fxmask.step inside a CUDA graph, whose replays would not count(.|\n)*let fxmask.guard count"):
            fxmask.step(model)
    assert fxmask.explain(model).rows[0]["step"] == 0
    fxmask.step(model, 3)
    assert fxmask.explain(model).rows[0]["backward"] == "ste"


def test_freeze_and_a_later_mode_that_moves():
    model, optimiser = run(config(), guard=None)
    with pytest.raises(UnsupportedError, match=r"masked_weights='freeze' with backward='ste' would cancel it"):
        fxmask.guard(optimiser, model, "freeze")


def test_a_budget_is_of_one_block_size():
    with pytest.raises(ConfigError, match=r"spends its budget in blocks of one size, and phases change the block of 0, 2"):
        fxmask.apply(mlp(), config(), allocation="erk")


def test_the_backend_refuses():
    with pytest.raises(UnsupportedError, match=r"keeps no state between calls, and phases counts optimiser steps(.|\n)*use fxmask.apply"):
        backend.parse({"phases": PHASES})
    call = torch.compile(mlp(), backend="fxmask", options={"inner": "eager", "overrides": {"0": {"phases": PHASES}}})
    with pytest.raises(Exception, match=re.escape("the options of '0' count optimiser steps or cache a mask")):
        call(torch.randn(2, 64))


def test_layers_that_no_block_of_a_phase_can_mask_are_named():
    with pytest.warns(FxMaskWarning, match=r"no block can be masked at this ratio, so these stay dense: 0 \(1 block of \(128, 128\)\), 2 \(1 block"):
        fxmask.apply(mlp(), config({3: dict(block=(128, 128))}))


def test_it_is_plain_and_frozen():
    c = config({6: dict(block=[16, 16]), 3: dict(backward="ste")})
    assert c.phases == ((3, (("backward", "ste"),)), (6, (("block", (16, 16)),))) and hash(c) == hash(config(c.phases))
    assert config({}) == config(None) and config({}).phases is None


def test_a_phase_by_momenta_that_the_optimiser_does_not_have():
    """Seen at the first step whose optimiser has moved the weight and made no state, or blocks would rank by nothing for ever."""
    model = fxmask.apply(mlp(), config({2: dict(criterion="momentum")}))
    optimiser = torch.optim.SGD(model.parameters(), lr=0.01)
    fxmask.guard(optimiser, model)
    with pytest.raises(UnsupportedError, match=r"criterion='momentum' reads the optimiser's first moment(.|\n)*where: 0.weight"):
        train(model, optimiser, 0, 4)
