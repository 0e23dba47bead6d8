"""The temperature of learned N:M masks over optimiser steps."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import fxmask
from fxmask import NMMask
from fxmask.kernels import nm

FALLING = NMMask(mode="learned", tau_from=1.0, tau=0.01, tau_steps=4)
TAUS = [1.0, 0.1**0.5, 0.1, 0.1**1.5, 0.01, 0.01]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))


def test_by_the_formula():
    assert [FALLING.tau_at(step) for step in range(6)] == pytest.approx(TAUS, rel=1e-12) and FALLING.tau_at(4) == FALLING.tau_at(99) == 0.01
    assert [NMMask(mode="learned", tau=0.3).tau_at(step) for step in (0, 7)] == [0.3, 0.3]
    assert NMMask(mode="learned", tau=0.7, tau_from=0.3, tau_steps=4).tau_at(4) == 0.7  # which the power is not, in floats


def test_draws_are_those_of_the_temperature(monkeypatch):
    """Two layers are stepped together, and each draw has the temperature of its step."""
    seen = []
    monkeypatch.setattr("fxmask.nm.nm_layers.nm.sample", lambda logits, table, tau, draw=nm.sample: seen.append(float(tau)) or draw(logits, table, tau))
    model = fxmask.apply(net(), FALLING)
    fxmask.step(model, 0)
    for _ in TAUS:
        model(torch.randn(2, 32))
        fxmask.step(model)
    assert seen == pytest.approx([t for t in TAUS for _ in range(2)], rel=1e-6)
    model.eval()(torch.randn(2, 32))  # argmax: nothing is drawn
    fxmask.freeze(model)
    model.train()(torch.randn(2, 32))
    assert len(seen) == 12


def test_hot_draws_are_even_and_cold_ones_sharp():
    model = fxmask.apply(nn.Linear(32, 32), NMMask(mode="learned", soft=True, tau_from=100.0, tau=1e-3, tau_steps=2))
    fxmask.step(model, 0)
    even = _drawn(model)
    fxmask.step(model, 5)
    sharp = _drawn(model)
    torch.testing.assert_close(even, torch.full_like(even, 0.5), atol=0.1, rtol=0)
    assert float(torch.minimum(sharp, 1 - sharp).mean()) < 0.01


def _drawn(model):
    """The mixture of patterns of a forward: y of the identity is W∘mixture, transposed."""
    torch.manual_seed(0)
    return ((model(torch.eye(32)) - model.bias).t() / model.weight).detach()


def test_evaluation_needs_no_steps():
    model = fxmask.apply(net(), FALLING).eval()
    model(torch.randn(2, 32))
    with pytest.raises(fxmask.FxMaskError, match=r"fxmask.step\(model, 0\) before training"):
        model.train()(torch.randn(2, 32))


def test_copies_states_and_restore():
    model, x = fxmask.apply(net(), FALLING), torch.randn(2, 32)
    fxmask.step(model, 3)
    fresh = fxmask.apply(net(), FALLING)
    fresh.load_state_dict(model.state_dict())
    fxmask.load_state_dict(fresh, pickle.loads(pickle.dumps(fxmask.state_dict(model))))
    for twin in (fresh, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert float(twin[0].nm_tau) == pytest.approx(TAUS[3]) and torch.equal(*(torch.manual_seed(1) and m(x) for m in (twin, model)))
        fxmask.step(twin)
        assert float(twin[1].nm_tau) == pytest.approx(TAUS[4])
        fxmask.restore(twin)
        assert set(twin[0].__dict__) == set(net()[0].__dict__) and "nm_tau" not in twin[0]._buffers
    assert not [k for k in model.state_dict() if "tau" in k]
    model.to_empty(device="cpu").load_state_dict(fresh.state_dict(), strict=False)
    assert float(model[0].nm_tau) == pytest.approx(TAUS[3])


def test_states_of_before_and_states_that_do_not_fit():
    plain = fxmask.apply(net(), NMMask(mode="learned"))
    state = fxmask.state_dict(plain)
    for name in ("tau_from", "tau_steps"):
        del state["nm"]["0"]["settings"][name]  # saved before there were such
    fxmask.load_state_dict(plain, state)
    model = fxmask.apply(net(), FALLING)
    for change in (lambda e: e.pop("step"), lambda e: e.update(step=-1), lambda e: e.update(counted=1), lambda e: e.update(more=1)):
        state = fxmask.state_dict(model)
        change(state["nm"]["0"])
        with pytest.raises(fxmask.FxMaskError, match="was changed since it was saved"):
            fxmask.load_state_dict(model, state)
    for broken in (None, {}, {"frozen": False}, {**state["nm"]["0"], "settings": None}, {**state["nm"]["0"], "frozen": 0}):
        state["nm"]["0"] = broken
        with pytest.raises(fxmask.FxMaskError, match=r"was changed since it was saved\.\n  where: 0\n  fix: apply fxmask as in the run that saved it"):
            fxmask.load_state_dict(model, state)
    with pytest.raises(fxmask.FxMaskError, match="other settings"):
        fxmask.load_state_dict(model, fxmask.state_dict(plain))


def test_steps_recompile_nothing():
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    model, x = fxmask.apply(net(), FALLING), torch.randn(2, 32)
    fxmask.step(model, 0)
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for _ in range(5):
        compiled(x).sum().backward()
        fxmask.step(model)
    assert counter.frame_count == 1
    torch._dynamo.reset()


def test_beside_block_masks_one_call_steps_both():
    model = nn.Sequential(fxmask.apply(nn.Sequential(nn.Linear(32, 32)), FALLING), fxmask.apply(nn.Sequential(nn.Linear(32, 32)), fxmask.WeightMask(0.5)))
    fxmask.step(model, 2)
    assert float(model[0][0].nm_tau) == pytest.approx(TAUS[2]) and model[1][0]._fxmask_step == 2
