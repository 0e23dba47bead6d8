"""`fxmask.advise` on real layers: what it sees, that it leaves everything as it was, that it never recommends what loses, and wrong use."""

import copy
import json
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import fxmask
from fxmask import cli
from fxmask.advice import advise as module
from fxmask.advice import command, trial
from fxmask.advice.layers import layers_of
from fxmask.advice.plan import Plan
from fxmask.advice.search import Timed
from fxmask.advice.step import mean_square, stepper
from fxmask.advice.unit import FEWEST, Times, Unit, _fewer, guarded
from fxmask.passes.finding.choose import choose
from fxmask.passes.finding.find import find

SMALL = {"seconds": 60.0, "blocks": [32], "ratios": [0.5]}


@pytest.fixture(autouse=True)
def one_round(monkeypatch, request):
    """Each cell is timed once, and not again for half of the time, where no test looks at the figures."""
    if "one_thread" not in request.fixturenames:
        monkeypatch.setattr("fxmask.advice.search.REPEATED", 0.0)


def seen(model: nn.Module, *args, include=None) -> list:
    decisions = choose(find(model), fxmask.WeightMask(ratio=0.5, block=(16, 16)), include, None, None, model)
    return layers_of(model, decisions, args, {})


class Mixed(nn.Module):
    """Two calls of one linear, transposed tokens, attention, a linear that nothing calls, a functional use of a linear's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.tokens, self.idle, self.manual = nn.Linear(32, 32), nn.Linear(24, 24, bias=False), nn.Linear(32, 32), nn.Linear(32, 48)
        self.attention = nn.MultiheadAttention(32, 2, batch_first=True)

    def forward(self, x):
        y = self.twice(self.twice(x))
        z = self.tokens(y.transpose(1, 2)).transpose(1, 2)
        a = self.attention(z, z, z, need_weights=False)[0]
        return F.linear(a, self.manual.weight, self.manual.bias)


def test_it_sees_every_call_with_its_layout():
    found = {x.name: x for x in seen(Mixed(), torch.randn(3, 24, 32))}
    assert found["twice"].tokens == 2 * 3 * 24 and [c.needs_gradient for c in found["twice"].calls] == [False, True]
    assert found["tokens"].calls[0].shape == (3, 32, 24) and found["tokens"].calls[0].stride == (768, 1, 32) and not found["tokens"].bias
    assert found["manual"].tokens == 72 and found["manual"].bias
    assert found["idle"].why == "not called with these inputs" and "owner" in found["attention.out_proj"].why


def test_it_sees_graphs_and_autocast():
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
    traced = torch.fx.symbolic_trace(copy.deepcopy(model))
    exported = torch.export.export(copy.deepcopy(model), (torch.randn(5, 32),)).module()
    for m in (traced, exported):
        assert [x.tokens for x in seen(m, torch.randn(5, 32))] == [5, 5]
    with torch.autocast("cpu", torch.bfloat16):
        first, second = seen(model, torch.randn(5, 32))
    assert (first.calls[0].autocast, second.calls[0].autocast, second.calls[0].dtype) == (torch.bfloat16, torch.bfloat16, torch.bfloat16)
    assert {x.calls[0].autocast for x in seen(model, torch.randn(5, 32))} == {None}


class PartlyCast(nn.Module):
    """A head in float32, as many models have it whatever the autocast around them."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.head = nn.Linear(32, 64), nn.Linear(64, 48)

    def forward(self, x):
        x = self.fc(x)
        with torch.autocast("cpu", enabled=False):
            return self.head(x.float())


class Casts(TorchDispatchMode):
    """Counts casts of weights to 16 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._to_copy.default and isinstance(args[0], nn.Parameter) and kwargs["dtype"] is torch.bfloat16:
            self.shapes.append(tuple(args[0].shape))
        return func(*args, **(kwargs or {}))


def test_every_step_casts_its_weights_as_one_of_a_training_does():
    """Each call under its own autocast; the caller's goes on through all steps, and so would the casts that it keeps."""
    model, x = PartlyCast(), torch.randn(8, 32)
    with torch.autocast("cpu", torch.bfloat16):
        layers = seen(model, x)
        assert [c.autocast for layer in layers for c in layer.calls] == [torch.bfloat16, None]
        whole = stepper(model, (x,), {}, mean_square, torch.optim.SGD(model.parameters(), 0.1))
        for run, shapes in ((Unit(layers[0], None).run_dense, [(64,), (64, 32)]), (Unit(layers[1], None).run_dense, []), (whole, [(64,), (64, 32)])):
            for _ in range(2):
                with Casts() as casts:
                    run()
                assert sorted(casts.shapes) == shapes  # which one is first is the C++ compiler's choice


def test_layers_that_share_a_weight_are_one():
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    model[1].weight = model[0].weight
    (one,) = seen(model, torch.randn(5, 32))
    assert (one.name, one.others, one.tokens) == ("0", ("1",), 10)


def test_long_layers_are_timed_on_fewer_tokens_and_scaled(monkeypatch):
    monkeypatch.setattr("fxmask.advice.unit.LONG", 1e-5)
    (layer,) = seen(nn.Sequential(nn.Linear(64, 64)), torch.randn(4 * FEWEST, 64))
    unit = Unit(layer, torch.optim.SGD)
    assert unit.share == 0.25 and unit.inputs[0].shape == (FEWEST, 64)
    assert unit._times([(1.0, 0.5)]).passes == 4.0 and unit._times([(1.0, 0.5)]).step == 0.5
    cut = _fewer(torch.randn(3, 32, 24).transpose(1, 2), 0.25)
    assert cut.shape == (3, 6, 32) and cut.stride(2) != 1  # the layout is that of the layer


def test_a_unit_is_the_layers_training_step():
    (layer,) = seen(nn.Sequential(nn.Linear(64, 96)), torch.randn(50, 64))
    unit = Unit(layer, torch.optim.AdamW)
    dense, masked = unit.masked(fxmask.WeightMask(ratio=0.5, block=(32, 32), refresh=0))
    assert min(*dense[:2], *masked) > 0 and dense.rebuild == 0
    assert unit.dense.weight is not layer.weight and torch.equal(unit._linear().weight, layer.weight)
    assert Unit(layer, None).masked(fxmask.WeightMask(ratio=0.5, block=(32, 32), refresh=0))[1].step == 0.0
    (narrow,) = seen(nn.Sequential(nn.Linear(64, 96)).bfloat16(), torch.randn(50, 64, dtype=torch.bfloat16))
    unit = Unit(narrow, None)
    assert unit.dense.weight.dtype == unit.inputs[0].dtype == torch.bfloat16


def test_a_guard_for_any_optimiser():
    model = fxmask.apply(nn.Sequential(nn.Linear(64, 64)), ratio=0.5, block=(32, 32))
    assert guarded(torch.optim.AdamW(model.parameters()), model).masked_step
    other = fxmask.apply(nn.Sequential(nn.Linear(64, 64)), ratio=0.5, block=(32, 32), backward="ste")
    assert not guarded(torch.optim.AdamW(other.parameters()), other).masked_step


def test_nothing_is_changed_and_small_layers_stay_dense(monkeypatch):
    monkeypatch.setattr("fxmask.advice.plan.PAYS", float("inf"))  # whatever the machine says
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Dropout(0.5), nn.Linear(64, 10)).eval()
    before, x = copy.deepcopy(model.state_dict()), torch.randn(40, 64)
    state = torch.get_rng_state()
    advice = fxmask.advise(model, x, **SMALL)
    assert torch.equal(torch.get_rng_state(), state) and not model.training and not model._forward_hooks
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))
    assert all(p.grad is None for p in model.parameters()) and type(model[0]) is nn.Linear
    assert advice.plan is None and advice.arguments is None and "leave it dense" in str(advice) and "no layer pays" in str(advice)
    (row,) = advice.rows
    assert row["layer"] == "0" and row["tokens"] == 40 and row["share_of_step"] > 0 and row["50 %"].startswith("32x32 ")


@pytest.mark.parametrize("wanted", [{"include": ["0", "1"]}, {"exclude": ()}], ids=["by name", "no exclusion"])
def test_layers_that_stay_dense_by_default_are_timed_where_they_are_wanted(wanted):
    advice = fxmask.advise(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 10)), torch.randn(40, 64), seconds=60.0, blocks=[(5, 32)], ratios=[0.5], **wanted)
    assert {r["layer"]: r["50 %"].split()[0] for r in advice.rows} == {"0": "5x32", "1": "5x32"}


# on one thread process time is what counts, which other programs disturb least
@pytest.mark.slow
def test_large_layers_at_a_high_ratio_are_advised_and_tried(tmp_path, one_thread):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(768, 768), nn.GELU(), nn.Linear(768, 768), nn.Linear(768, 10))
    begin = time.perf_counter()
    advice = fxmask.advise(model, torch.randn(1536, 768), ratios=[0.95], blocks=[64], seconds=30)
    assert advice.plan is not None and advice.plan.gain > 1.1 and set(advice.plan.blocks) == {"0", "2"}
    assert "Tried on a copy" in str(advice) and "fxmask.apply(model, ratio=0.95, block=(64, 64), refresh=10)" in str(advice)
    assert time.perf_counter() - begin < 90  # of 30, on a machine that may be busy
    fxmask.apply(model, **advice.arguments)
    assert fxmask.masks(model)["0.weight"].float().mean() == pytest.approx(0.05, abs=0.01)
    data = json.loads(advice.save(tmp_path / "a.json").read_text())
    assert data["apply"]["ratio"] == 0.95 and data["plans"][0]["gain"] == advice.plan.gain


def test_advice_that_loses_when_tried_is_taken_back(monkeypatch):
    monkeypatch.setattr(trial, "step_seconds", lambda steps, *a: {"dense": 1.0} if len(steps) == 1 else {"dense": 1.0, "masked": 1.25})
    monkeypatch.setattr(module, "plans", lambda *a: [Plan(0.9, {"0": (32, 32)}, 0.001, 2.0)])
    advice = fxmask.advise(nn.Sequential(nn.Linear(64, 64)), torch.randn(8, 64), seconds=20.0, blocks=[32], ratios=[0.9])
    assert advice.plan is None and advice.arguments is None
    assert "Tried on a copy at 90 %: 0.80" in str(advice) and "it is not advised" in str(advice)
    kept = fxmask.advise(nn.Sequential(nn.Linear(64, 64)), torch.randn(8, 64), seconds=20.0, blocks=[32], ratios=[0.9], check=False)
    assert kept.plan is not None and "Tried" not in str(kept)


def trying(monkeypatch, dense, masked, saved, **options):
    """Advice where the dense step takes `dense` seconds, one time after the other, and trials `masked`; plans save `saved` seconds, {ratio: seconds}."""
    denses, maskeds = iter(dense), iter(masked)
    monkeypatch.setattr(trial, "step_seconds", lambda steps, *a: {name: next(denses if name == "dense" else maskeds) for name in steps})

    def plans(found, ratios, d):
        return [Plan(r, {"0": (32, 32)}, 0.001, d / (d - saved[r])) for r in ratios]

    monkeypatch.setattr(module, "plans", plans)
    monkeypatch.setattr("fxmask.advice.search.ROUNDS", 1)
    model = nn.Sequential(nn.Linear(64, 64))
    return fxmask.advise(model, torch.randn(8, 64), seconds=300.0, blocks=[32], ratios=list(saved), refresh=0, **options)


def test_the_dense_step_is_that_of_both_times(monkeypatch):
    """Before the layers and beside the trial: a machine's speed drifts meanwhile."""
    advice = trying(monkeypatch, [1.0, 2.0], [0.5], {0.9: 0.5})
    assert advice.plan.gain == 1.5 and advice.summary["dense step"] == "1500 ms"
    assert advice.summary["advice"].endswith("1.50 times as fast predicted, 4.00 when tried: 2.45 expected")
    assert advice.gain == pytest.approx(6**0.5) == advice.to_dict()["gain"]


def test_after_a_trial_the_lowest_ratio_that_still_reaches_the_target_is_tried(monkeypatch):
    advice = trying(monkeypatch, [1.0, 2.0, 1.5], [1.5, 0.5], {0.5: 0.3, 0.9: 0.8}, target=1.4)
    assert advice.plan.ratio == 0.9 and "3.00 when tried" in advice.summary["advice"] and str(advice).count("Tried on a copy") == 2


def test_what_loses_when_tried_is_followed_by_the_next_ratio(monkeypatch):
    advice = trying(monkeypatch, [1.0, 1.0, 1.0], [1.25, 0.4], {0.5: 0.5, 0.9: 0.75})
    assert advice.plan.ratio == 0.9 and "at 50 %: 0.80" in str(advice) and "at 90 %: 2.50" in str(advice)
    lost = trying(monkeypatch, [1.0, 1.0, 1.0], [1.25, 1.25], {0.5: 0.5, 0.9: 0.75})
    assert lost.plan is None and lost.arguments is None and lost.gain == 1 and lost.summary["advice"].startswith("leave it dense: nothing reaches 1.05")
    under = trying(monkeypatch, [1.0, 1.0], [0.5], {0.9: 0.75}, target=3)
    assert under.plan is None and "below the target of 3" in str(under) and "the most is 2.83, at 90 %" in under.summary["advice"]
    held = trying(monkeypatch, [1.0, 2.0], [1.0], {0.9: 0.3}, target=1.4)  # the layers say 1.43, then 1.25; the trial 2.0
    assert held.plan.ratio == 0.9 and held.gain == pytest.approx(2.5**0.5) and held.tried == 2.0


def test_rounds_count_by_their_medians():
    timed = Timed([], Times(1.0, 1.0), {}, 10)
    for dense, masked in ((1.0, 0.5), (3.0, 0.7), (2.0, 0.1)):
        timed.add(((64, 64), 0.8), (Times(dense, 0.0), Times(masked, 0.0, 1.0)))
    assert timed.cells == {((64, 64), 0.8): (Times(2.0, 0.0, 0.0), Times(0.5, 0.0, 1.0))} and timed.gain(((64, 64), 0.8)) == pytest.approx(2 / 0.6)


def test_a_busy_machine_is_said(monkeypatch):
    monkeypatch.setattr(module, "load_average", lambda: 1000.0)
    assert "busy: load 1000" in str(fxmask.advise(nn.Linear(64, 64), torch.randn(8, 64), **SMALL))


class NoGradient(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(64, 64)

    def forward(self, x):
        return self.fc(x).argmax()


class Uncopied(nn.Linear):
    def __deepcopy__(self, memo):
        raise RuntimeError("no copies")


def test_inputs_stay_as_they_are():
    x = torch.randn(8, 64, requires_grad=True)
    before = x.detach().clone()
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(64, 64))
    fxmask.advise(model[1], (x,), **SMALL)
    fxmask.advise(model[1], (x * 2,), **SMALL)
    plain = before.clone()
    fxmask.advise(model, (plain,), **SMALL)
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            fxmask.advise(model[1], (torch.randn(8, 64),), **SMALL)
    assert x.grad is None and torch.equal(x.detach(), before) and torch.equal(plain, before)


def test_a_frozen_layer_is_timed_as_one():
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
    model[0].requires_grad_(False)
    first, second = seen(model, torch.randn(512, 256))
    assert first.signature != second.signature
    units = [Unit(x, torch.optim.AdamW) for x in (first, second)]
    assert units[0].dense_times.step == 0 and units[1].dense_times.step > 0
    units[0].run_dense()
    assert units[0].dense.weight.grad is None and units[1].dense.weight.grad is not None
    masked = units[0].masked(fxmask.WeightMask(ratio=0.5, block=(64, 64), refresh=0))[1]
    assert masked.step == 0


def paying(monkeypatch, **options):
    """Advice that pays, whatever the machine says."""
    monkeypatch.setattr(trial, "step_seconds", lambda steps, *a: {"dense": 2.0, "masked": 1.0} if len(steps) > 1 else {"dense": 2.0})
    monkeypatch.setattr("fxmask.advice.plan.PAYS", 0.0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    return fxmask.advise(model, torch.randn(8, 64), target=0.01, **{**SMALL, "seconds": 60.0, **options})


def test_the_printed_calls_are_those_that_were_timed(monkeypatch):
    assert "include" not in paying(monkeypatch).summary["advice"] and "masked_step=True" in paying(monkeypatch).summary["advice"]
    assert "include=['0']" in paying(monkeypatch, include="0").summary["advice"] and "include=['1']" in paying(monkeypatch, exclude="0").summary["advice"]
    assert "guard" not in paying(monkeypatch, optimizer=None).summary["advice"]
    ste = paying(monkeypatch, backward="ste").summary["advice"]
    assert "backward='ste'" in ste and "fxmask.guard(optimizer, model)" in ste


def test_what_was_not_timed_is_not_called_slow():
    advice = fxmask.advise(nn.Sequential(nn.Linear(64, 64)), torch.randn(8, 64), seconds=1e-6, blocks=[32], ratios=[0.5])
    assert advice.summary["advice"] == "none: nothing was timed in that time" and advice.summary["at 50 %"] == "not timed"


def test_encoder_layers_are_timed():
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    rows = {r["layer"]: r["why"] for r in fxmask.advise(layer, torch.randn(2, 8, 64), **{**SMALL, "seconds": 60.0}).rows}
    assert rows["linear1"] == rows["linear2"] == "" and "owner" in rows["self_attn.out_proj"]


def test_a_weight_that_is_computed_anew_for_each_call_is_said():
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(64, 64)), nn.Linear(64, 64))
    first, second = seen(model, torch.randn(8, 64))
    assert first.why == "its weight is computed from other parameters: expected a plain one" and second.why == ""


class Itself(nn.Linear):
    def __deepcopy__(self, memo):
        return self


X = torch.randn(8, 64)
WRONG = {
    "masked already": (lambda: fxmask.advise(fxmask.apply(nn.Linear(64, 64)), X), "expected one without masks"),
    "no linear": (lambda: fxmask.advise(nn.Conv2d(3, 3, 1), torch.randn(1, 3, 4, 4), **SMALL), r"to time: .* it has no linear\.\n  where: Conv2d\n  fix: "),
    "small linears": (lambda: fxmask.advise(nn.Linear(64, 4), X, **SMALL), r"got none: \(model\): default exclusion: min\(out, in\) = 4"),
    "another shape": (lambda: fxmask.advise(nn.Linear(64, 64), torch.randn(8, 63), **SMALL), r"cannot run on these inputs: .*mat1 and mat2 shapes"),
    "not called": (lambda: fxmask.advise(nn.MultiheadAttention(64, 2), (X, X, X), **SMALL), "owner reads"),
    "another device": (lambda: fxmask.advise(nn.Linear(64, 64), X.to("meta"), **SMALL), "one device, got weight on cpu, input 0 on meta"),
    "meta": (lambda: fxmask.advise(nn.Linear(64, 64, device="meta"), X.to("meta"), **SMALL), "expected device cpu or cuda, got meta"),
    "no gradient": (lambda: fxmask.advise(NoGradient(), X, **SMALL), "requires a gradient, got none"),
    "no copy": (lambda: fxmask.advise(Uncopied(64, 64), X, **SMALL), "can be copied, got RuntimeError: no copies"),
    "a copy that is none": (lambda: fxmask.advise(Itself(64, 64), X, **SMALL), "the copy shares parameters or buffers with the model"),
    "loss of many": (lambda: fxmask.advise(nn.Linear(64, 64), X, loss=lambda y: y, **SMALL), r"one number with a gradient, got a tensor \(8, 64\)"),
    "loss of none": (lambda: fxmask.advise(nn.Linear(64, 64), X, loss=lambda y: 1.0, **SMALL), "one number with a gradient, got float"),
    "lbfgs": (lambda: fxmask.advise(nn.Linear(64, 64), X, optimizer=torch.optim.LBFGS, **SMALL), "an optimiser that needs none, got LBFGS"),
    "pruned": (lambda: fxmask.advise(fxmask.apply(nn.Linear(64, 64), fxmask.ActivationPruning()), X), "expected one without masks"),
    "dropped": (lambda: fxmask.advise(fxmask.apply(nn.Linear(64, 64), fxmask.BlockDropout(p=0.5)), X), "expected one without masks"),
    "compiled": (lambda: fxmask.advise(torch.compile(nn.Linear(64, 64)), X, **SMALL), r"advise: .* got one that is compiled(.|\n)*call fxmask\.advise on the"),
    "no module": (lambda: fxmask.advise(len, X), "expected an nn.Module, got builtin"),
    "an optimiser": (lambda: fxmask.advise(m := nn.Linear(64, 64), X, optimizer=torch.optim.SGD(m.parameters()), **SMALL), "got an instance of SGD.$"),
    "target": (lambda: fxmask.advise(nn.Linear(64, 64), X, target=0), "target: expected a number above 0, got 0"),
    "seconds": (lambda: fxmask.advise(nn.Linear(64, 64), X, seconds="60"), "seconds: expected a number above 0, got '60'"),
    "refresh": (lambda: fxmask.advise(nn.Linear(64, 64), X, refresh=-1), "refresh counts optimiser steps: expected an int of at least 0, got -1"),
    "ratios": (lambda: fxmask.advise(nn.Linear(64, 64), X, ratios=0.5), r"as sequences .* ratios=0\.5"),
    "backward": (lambda: fxmask.advise(nn.Linear(64, 64), X, backward="dense"), "unknown backward mode: .* got 'dense'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_use(case):
    call, words = WRONG[case]
    with pytest.raises(fxmask.FxMaskError, match=words):
        call()


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32))


def test_the_command(capsys, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    call = ["advise", "test_advise:two_layers", "--input", "8x64", "--blocks", "32", "--ratios", "0.5", "--seconds", "1", "--out", str(tmp_path / "a.csv")]
    threads = torch.get_num_threads()
    try:
        assert cli.main([*call, "--threads", "1", "--dtype", "bfloat16"]) == 0
    finally:
        torch.set_num_threads(threads)
    out = capsys.readouterr().out
    rows = (tmp_path / "a.csv").read_text().splitlines()
    assert ", 1 thread, " in out
    assert "64x64" in out and "32x64" in out and rows[0].startswith("layer,") and len(rows) > 2  # what it advises of layers so small is noise
    for option, value, expected in [
        ("--dtype", "int8", "--dtype: expected bfloat16 or float16, got 'int8'"),
        ("--device", "nowhere", "--device: expected cpu or cuda, got 'nowhere'"),
        ("--device", "meta", "--device: expected a device that is here, cpu or cuda, got 'meta'"),
        ("--threads", "0", "--threads: expected at least 1, got 0"),
        ("--blocks", "x", "block: expected out x in, such as 16x16, got 'x'"),
    ]:
        assert cli.main([*call, option, value]) == 2
        assert capsys.readouterr().err.startswith(f"fxmask: {expected}")


def test_advice_that_cannot_be_written_is_printed(capsys, tmp_path, monkeypatch):
    """The search was long."""
    monkeypatch.setattr(command, "advise", lambda *_, **__: fxmask.Report("what was found", []))
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    (tmp_path / "file").touch()
    assert cli.main(["advise", "test_advise:two_layers", "--input", "8x64", "-o", str(tmp_path / "file" / "a.csv")]) == 2
    said = capsys.readouterr()
    assert said.out == "what was found\n" and "the report cannot be written" in said.err
