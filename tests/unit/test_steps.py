"""What counts optimiser steps: start, refresh, schedules, rigl; and fxmask.dense."""

import copy
import math

import pytest
import torch
from sample_models import best_blocks, mlp
from torch import fx

import fxmask
from fxmask.errors import ConfigError, StateError
from fxmask.kernels.grid import expand_mask, keep_count
from fxmask.passes.settings.config import SCHEDULES

FORMS = pytest.mark.parametrize("form", ["module", "graph"])
NEEDY = [dict(start=1), dict(refresh=2), dict(schedule=fxmask.Schedule(steps=5)), dict(backward="rigl")]


def masked(form="module", **options):
    return fxmask.apply(mlp() if form == "module" else fx.symbolic_trace(mlp()), **options)


def kept(model):
    return [int(m.sum()) for m in fxmask.masks(model).values()]


@FORMS
@pytest.mark.parametrize("options", NEEDY, ids=lambda o: next(iter(o)))
def test_training_without_a_step_source_raises(form, options):
    model, x = masked(form, **options), torch.randn(2, 64)
    with pytest.raises(StateError, match=r"(?s)expected a step source before training, got none.*0.weight.*fxmask.step\(model, 0\)"):
        model(x)
    model.eval()
    if "start" in options or "schedule" in options:
        with pytest.warns(fxmask.FxMaskWarning, match=r"a masked model is evaluated at ratio 0.0, not 0.5: start or schedule count steps, none was told"):
            model(x)
    else:
        model(x)
    fxmask.step(model.train(), 0)
    model(x)
    assert {r["step"] for r in fxmask.explain(model).rows if r["masked"]} == {0}


@FORMS
def test_an_evaluation_between_two_guards_is_where_steps_have_come(form):
    """Any warning is an error; a copy sees no steps of the run, and warns."""
    model, x = masked(form, schedule=fxmask.Schedule(steps=5), backward="ste"), torch.randn(2, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        with fxmask.guard(optimizer, model):
            model(x).sum().backward()
            optimizer.step()
        model.eval()(x)
        model.train()
    assert {r["step"] for r in fxmask.explain(model).rows if r["masked"]} == {2}
    twin = copy.deepcopy(model).eval()
    with pytest.warns(fxmask.FxMaskWarning, match=r"a masked model is evaluated at ratio 0\.\d+, not 0\.5"):
        twin(x)


@pytest.mark.parametrize("goes", ["on", "away"])
def test_training_in_eval_that_goes_on_where_a_guard_has_ended_says_that_no_step_is_told(goes):
    """The layers do not know that they train."""
    model, x = masked(schedule=fxmask.Schedule(steps=5), backward="ste"), torch.randn(2, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with fxmask.guard(optimizer, model):
        model(x).sum().backward()
        optimizer.step()
    if goes == "away":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.eval()(x).sum().backward()
    optimizer.step()
    with pytest.warns(fxmask.FxMaskWarning, match=r"a masked model is evaluated at ratio 0\.\d+, not 0\.5"):
        model(x)
    fxmask.load_state_dict(model, fxmask.state_dict(model))
    model(x)  # a state says where steps have come


@FORMS
def test_without_moving_options_no_steps_are_needed(form):
    for options in ({}, dict(refresh=0), dict(criterion="random"), dict(schedule="constant")):
        masked(form, **options)(torch.randn(2, 64))


@FORMS
def test_start(form):
    model = masked(form, start=3, ratio=0.7)
    for step in range(5):
        fxmask.step(model, 1 if step else 0)
        expected = 24 if step < 3 else keep_count(24, 0.7)
        assert kept(model) == [expected] * 2
    x = torch.randn(2, 64)
    other = masked(form, start=3, ratio=0.7)
    fxmask.step(other, 0)
    assert torch.equal(other(x), mlp()(x))  # bitwise dense before


@FORMS
def test_layers_of_one_ratio_have_starts_and_schedules_of_their_own(form):
    ways = {"0": dict(start=2), "2": dict(schedule=fxmask.Schedule("linear", steps=4))}
    for name, other in (("0", "2"), ("2", "0")):
        model = masked(form, ratio=0.7, overrides={name: ways[name]})
        fxmask.step(model, 0)
        found = fxmask.masks(model)
        assert [int(found[f"{n}.weight"].sum()) for n in (name, other)] == [24, keep_count(24, 0.7)]


@pytest.mark.parametrize(("ratio", "ahead", "counts"), [(0.5, 0, [15, 18]), (0.75, 2, [6, 15])])
def test_layers_of_one_schedule_have_ratios_and_steps_of_their_own(ratio, ahead, counts):
    model = fxmask.apply(mlp(), ratio=0.75, schedule=fxmask.Schedule("linear", steps=4), overrides={"2": dict(ratio=ratio)})
    fxmask.step(model[0], ahead)
    fxmask.step(model, 2)
    assert [int(m.sum()) for m in fxmask.masks(model).values()] == counts


@FORMS
def test_start_with_a_cached_mask(form):
    model = masked(form, start=2, refresh=2, ratio=0.5)
    fxmask.step(model, 0)
    built = []
    for _ in range(6):
        built.append(kept(model)[0])
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(p.roll(16, 0))
        fxmask.step(model)
    assert built == [24, 24, 12, 12, 12, 12]
    rows = [r for r in fxmask.explain(model).rows if r["masked"]]
    assert [(r["step"], r["mask_age"]) for r in rows] == [(6, 0)] * 2
    assert all(r["flips"] >= 12 for r in rows)
    fxmask.step(model)
    assert fxmask.explain(model).rows[0]["mask_age"] == 1


@FORMS
def test_rebuilds_count_from_the_start(form):
    model, moved = masked(form, start=3, refresh=2), []
    fxmask.step(model, 0)
    for step in range(1, 9):
        before = fxmask.masks(model)["0.weight"]
        with torch.no_grad():
            model.get_parameter("0.weight").copy_(torch.randn(96, 64))
        fxmask.step(model)
        moved += [step] if not torch.equal(before, fxmask.masks(model)["0.weight"]) else []
        if step == 3:  # there was no mask before, so that nothing has changed place
            assert fxmask.explain(model).rows[0]["flips"] == 0
    assert moved == [3, 5, 7] and fxmask.explain(model).rows[0]["flips"] > 0


@FORMS
def test_steps_that_are_told_together_rebuild_where_one_of_them_would_have(form):
    model, moved = masked(form, refresh=4), []
    fxmask.step(model, 0)
    for step in (3, 6, 9, 12):
        before = fxmask.masks(model)["0.weight"]
        with torch.no_grad():
            model.get_parameter("0.weight").copy_(torch.randn(96, 64))
        fxmask.step(model, 3)
        moved += [step] if not torch.equal(before, fxmask.masks(model)["0.weight"]) else []
    assert moved == [6, 9, 12]


@FORMS
@pytest.mark.parametrize("kind", SCHEDULES)
def test_schedules(form, kind):
    around = {} if kind == "constant" else dict(warmup=2, cooldown=3)
    schedule = fxmask.Schedule(kind, steps=15 if around else 10, initial=0.1, cycles=2 if kind == "cyclic" else 1, **around)
    model = masked(form, ratio=0.9, schedule=schedule, start=2)
    fxmask.step(model, 0)
    for step in range(20):
        t = min(max(step - 4, 0) / 10, 1)
        ratio = {
            "constant": 0.9,
            "linear": 0.1 + 0.8 * t,
            "cubic": 0.9 - 0.8 * (1 - t) ** 3,
            "cosine": 0.5 - 0.4 * math.cos(math.pi * t),
            "exponential": 1 - 0.9 * (1 / 9) ** t,
            "cyclic": 0.9 - 0.8 * (1 - (2 * t) % 1) ** 3 if t < 1 else 0.9,
        }[kind]
        assert kept(model) == [keep_count(24, ratio if step >= 2 else 0)] * 2, step
        fxmask.step(model)


@pytest.mark.parametrize("target", [1.0, 1 - 1e-10, 1.5, -0.1, float("nan")])
def test_a_schedule_that_ends_at_nothing(target):
    with pytest.raises(ConfigError, match=r"a schedule cannot end at a ratio of .*where nothing is kept; .*expected a finite number in \[0, 1\)"):
        fxmask.Schedule("linear", 4).ratio_at(3, target)
    with pytest.raises(ConfigError, match=r"expected a finite number in \[0, 1\), got"):
        fxmask.WeightMask(ratio=target, schedule=fxmask.Schedule("linear", 4))


def test_a_long_step_equals_many():
    for options in (dict(refresh=3, schedule=fxmask.Schedule("linear", steps=7)), dict(start=4)):
        a, b = masked(**options), masked(**options)
        fxmask.step(a, 9)
        for _ in range(9):
            fxmask.step(b)
        assert all(torch.equal(p, q) for p, q in zip(fxmask.masks(a).values(), fxmask.masks(b).values(), strict=True))


@FORMS
@pytest.mark.parametrize(("start", "expected"), [(0, [2, 5, 8]), (2, [4, 7])])  # counted from `start` on, as the rebuilds that read these gradients are
def test_rigl_is_dense_on_every_tth_step(form, start, expected):
    config = fxmask.WeightMask(ratio=0.75, backward="rigl", dense_every=3, start=start)
    model = fxmask.apply(mlp() if form == "module" else fx.symbolic_trace(mlp()), config)
    fxmask.step(model, 0)
    x, dense_steps = torch.randn(4, 64), []
    for step in range(9):
        model.zero_grad()
        model(x).square().sum().backward()
        grad = model.get_parameter("0.weight").grad
        mask = fxmask.masks(model)["0.weight"].repeat_interleave(16, 0).repeat_interleave(16, 1)
        assert grad[mask].abs().sum() > 0
        if grad[~mask].abs().sum() > 0:
            dense_steps.append(step)
        fxmask.step(model)
    assert dense_steps == expected


def test_random_masks_move_with_steps_alone_and_differ_by_layer_and_seed():
    model = masked(criterion="random")
    first = fxmask.masks(model)
    assert all(torch.equal(m, first[n]) for n, m in fxmask.masks(model).items())
    assert not torch.equal(first["0.weight"].flatten(), first["2.weight"].flatten())
    assert not torch.equal(first["0.weight"], fxmask.masks(masked(criterion="random", seed=1))["0.weight"])
    assert torch.equal(first["0.weight"], fxmask.masks(masked(criterion="random"))["0.weight"])
    fxmask.step(model)
    assert not torch.equal(first["0.weight"], fxmask.masks(model)["0.weight"])
    static = masked(criterion="random", refresh=0)
    fxmask.step(static, 5)
    fxmask.refresh(static)
    assert torch.equal(first["0.weight"], fxmask.masks(static)["0.weight"])


@FORMS
@pytest.mark.parametrize("refresh", [0, 1, 2])
def test_dense(form, refresh):
    model, x = masked(form, ratio=0.8, refresh=refresh), torch.randn(3, 64)
    fxmask.step(model, 0)
    before, y, masks = model(x), mlp()(x), fxmask.masks(model)
    with fxmask.dense(model) as same:
        assert same is model
        assert torch.equal(model(x), y)
        assert all(m.all() for m in fxmask.masks(model).values())
        assert {r["target_ratio"] for r in fxmask.explain(model).rows if r["masked"]} == {0.0}
        loss = model(x).square().sum()
        for call in (fxmask.step, fxmask.refresh):
            with pytest.raises(StateError, match=r"inside fxmask.dense"):
                call(model)
        with pytest.raises(StateError, match=r"fxmask.dense inside fxmask.dense"), fxmask.dense(model):
            pass
    loss.backward()  # after the block: the forward's masks count
    plain = mlp()
    plain(x).square().sum().backward()
    assert torch.equal(model.get_parameter("0.weight").grad, plain[0].weight.grad)
    assert torch.equal(model(x), before)
    assert all(torch.equal(m, masks[n]) for n, m in fxmask.masks(model).items())
    with pytest.raises(KeyError), fxmask.dense(model):
        raise KeyError
    assert torch.equal(model(x), before)


def test_two_forwards_before_one_backward_and_a_step_between():
    model, x = masked(refresh=2, ratio=0.7), torch.randn(3, 64)
    fxmask.step(model, 0)
    old = fxmask.masks(model)["0.weight"]
    loss = model(x).sum() + model(-x).sum()
    with torch.no_grad():
        model[2].weight.data = model[2].weight.data.clone()
    fxmask.step(model, 2)
    loss.backward()
    grad = model[0].weight.grad
    assert (grad[~old.repeat_interleave(16, 0).repeat_interleave(16, 1)] == 0).all()


@pytest.mark.parametrize("n", [-1, 1.0, True, "1"])
def test_bad_steps(n):
    with pytest.raises(ConfigError, match="an int of at least 0"):
        fxmask.step(masked(), n)


@pytest.mark.parametrize(("options", "text"), [
    (dict(kind="square"), f"unknown schedule: expected one of {', '.join(SCHEDULES)}, got 'square'"),
    (dict(steps=0), "Schedule.steps counts optimiser steps: expected an int of at least 1, got 0"),
    (dict(initial=1.0), "Schedule.initial: ratio is the fraction of blocks that are masked (sparsity): expected a finite number in [0, 1), got 1.0"),
    (dict(warmup=-1), "Schedule.warmup counts optimiser steps: expected an int of at least 0, got -1"),
    (dict(cooldown=2.0), "Schedule.cooldown counts optimiser steps: expected an int of at least 0, got 2.0"),
    (dict(steps=9, warmup=4, cooldown=5), "expected warmup + cooldown below steps, got warmup=4 + cooldown=5 of steps=9; raise steps"),
    (dict(kind="cyclic", cycles=0), "Schedule.cycles counts the ramps of a cyclic schedule: expected an int of at least 1, got 0"),
    (dict(kind="cyclic", cycles=True), "expected an int of at least 1, got True"),
    (dict(kind="cyclic", cycles=6, steps=9, warmup=4), "expected at most one for each of the 5 steps of the ramp, got 6; raise steps"),
    (dict(kind="cosine", cycles=2), "cycles=2 is for kind='cyclic': expected cycles=1 with kind='cosine'"),
    (dict(kind="constant", warmup=2), "kind='constant' has no ramp: expected no warmup and no cooldown, got warmup=2, cooldown=0; start="),
    (dict(kind="constant", cooldown=2), "got warmup=0, cooldown=2; start="),
])  # fmt: skip
def test_bad_schedules(options, text):
    with pytest.raises(ConfigError) as e:
        fxmask.Schedule(**options)
    assert text in str(e.value)


def test_ties_keep_is_the_literal_option():
    model = torch.nn.Sequential(torch.nn.Linear(64, 64))
    torch.nn.init.constant_(model[0].weight, 0.1)
    assert kept(fxmask.apply(model, fxmask.WeightMask(ratio=0.9, ties="keep"))) == [16]
    assert kept(fxmask.apply(fxmask.restore(model), ratio=0.9)) == [2]


MOVES = {"double": lambda m: m.to(torch.float64), "half": lambda m: m.half().float(), "to_empty": lambda m: m.to_empty(device="cpu")}


@pytest.mark.parametrize("device_move", MOVES.values(), ids=MOVES)
def test_moves_keep_the_count_of_blocks(device_move):
    model = masked(ratio=0.7, schedule=fxmask.Schedule("linear", steps=4))
    fxmask.step(model, 3)
    expected = kept(model)
    moved = device_move(model)
    moved.load_state_dict(mlp().state_dict())
    assert kept(moved) == expected
    name = "0.weight"
    assert torch.equal(fxmask.masks(moved)[name], best_blocks(moved.get_parameter(name), (16, 16), 0.525))


@pytest.mark.parametrize("phases", [None, {1: dict(backward="ste")}, {9: dict(backward="ste")}], ids=["none", "begun", "to come"])
def test_a_step_that_failed_has_not_begun_to_count(monkeypatch, phases):
    """Neither is anybody known to count, nor has the ratio moved."""
    model = masked(ratio=0.8, schedule=fxmask.Schedule("linear", steps=2), phases=phases)
    before = fxmask.masks(model)
    with monkeypatch.context() as patched:
        patched.setattr("fxmask.passes.settings.looks.look", lambda found: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            fxmask.step(model, 2)
    assert all(torch.equal(m, before[name]) for name, m in fxmask.masks(model).items())
    with pytest.raises(StateError, match=r"fxmask\.step"):
        model(torch.randn(3, 64))


def test_weights_set_by_hand_on_the_meta_device_take_the_state_with_the_next_move():
    """As the error of a mask and a weight on two devices says: move the whole model."""
    model, x = masked(refresh=2, ratio=0.7).to("meta"), torch.randn(3, 64)
    for i, layer in enumerate(mlp()):
        if layer._parameters:
            model[i].weight, model[i].bias = layer.weight, layer.bias
    fxmask.step(model, 0)
    with pytest.raises(StateError, match=r"move the whole model by model.to\(device\)"):
        fxmask.refresh(model)
    fxmask.refresh(model.to("cpu"))
    expected = masked(ratio=0.7)
    assert torch.equal(model(x), expected(x))
    assert all(torch.equal(m, fxmask.masks(model)[name]) for name, m in fxmask.masks(expected).items())


class Stairs(fxmask.Schedule):
    """A ramp of a user's own."""

    def ratio_at(self, step, target):
        return target * (min(step, self.steps) // 2 * 2) / self.steps


@FORMS
@pytest.mark.parametrize("kind", ["cubic", "constant"])
def test_a_ramp_of_ones_own(form, kind):
    schedule = Stairs(kind, steps=4)
    model = masked(form, schedule=schedule)
    with pytest.raises(StateError, match="expected a step source before training"):
        model(torch.randn(2, 64))
    for step in range(6):
        fxmask.step(model, 1 if step else 0)
        assert kept(model) == [keep_count(24, (0, 0, 0.25, 0.25, 0.5, 0.5)[step])] * 2
    other = masked(form, schedule=schedule)
    fxmask.load_state_dict(other, fxmask.state_dict(model))
    assert kept(other) == [12, 12]


def test_a_criterion_of_ones_own_chooses_anew():
    model = mlp()
    optimiser, handle, before = torch.optim.Adam(model.parameters(), lr=0.1), None, None
    for step in range(6):
        if step % 3 == 0:
            if handle is not None:
                handle.remove()
                fxmask.restore(model)
            scores = torch.arange(24.0).reshape(6, 4) * (1 if step else -1)
            fxmask.apply(model, ratio=0.5, block=(16, 16), scores={"0": scores})
            handle = fxmask.guard(optimiser, model)
            mask = fxmask.masks(model)["0.weight"]
            assert torch.equal(mask, scores > scores.median())
        out = ~expand_mask(mask, model[0].weight.shape, (16, 16))
        before = model[0].weight.detach().clone()
        optimiser.zero_grad()
        model(torch.randn(8, 64)).square().mean().backward()
        optimiser.step()
        assert torch.equal(model[0].weight[out], before[out]) and not torch.equal(model[0].weight, before)
    assert optimiser.state[model[0].weight]["step"] == 6
