"""fxmask.state_dict: a run that was stopped goes on to the same bits; what is wrong is said, and then nothing has changed."""

import copy
import dataclasses
import io
from types import SimpleNamespace

import pytest
import torch
from sample_models import best_blocks, mlp
from torch import fx, nn, optim
from torch.optim.lr_scheduler import StepLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import fxmask
from fxmask.errors import StateError
from fxmask.sites import sites

CUBIC = fxmask.Schedule("cubic", steps=9, initial=0.1)
CONFIGS = {
    "refresh-1": dict(refresh=1),
    "refresh-2-cubic": dict(refresh=2, schedule=CUBIC),
    "refresh-3-start-4": dict(refresh=3, start=4),
    "refresh-0": dict(refresh=0),
    "rigl": dict(backward="rigl", dense_every=3),
    "random": dict(criterion="random"),
}
MOVES = [c for c in CONFIGS if c != "refresh-0"]
EACH = pytest.mark.parametrize("config", CONFIGS)
FORMS = pytest.mark.parametrize("form", ["module", "graph"])
CUT, LAST = 5, 12


def masked(form="module", weights=0, overrides=None, **options):
    model = mlp(weights) if form == "module" else fx.symbolic_trace(mlp(weights))
    return fxmask.apply(model, fxmask.WeightMask(**{"ratio": 0.6, **options}), overrides=overrides)


def through_a_file(state):
    torch.save(state, buffer := io.BytesIO())
    return torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)


def same(a, b):
    """Equal bit for bit, however deep."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(v, b[k]) for k, v in a.items())
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def run(form, config, weights=0, masked_weights="auto", returning="keep"):
    """A training in the making: `go` puts the guard on, which in a resumed run comes last."""
    model = masked(form, weights, **CONFIGS[config])
    optimiser = optim.Adam(model.parameters(), lr=0.05, weight_decay=0.5)
    r = SimpleNamespace(model=model, optimiser=optimiser, scheduler=StepLR(optimiser, 3, 0.7))
    r.go = lambda: fxmask.guard(optimiser, model, masked_weights, returning)
    return r


def train(r, first, last, batches=1, traced=True):
    """The steps first..last, and after each everything that a run consists of, copied."""
    trace = []
    for i in range(first, last):
        noise, losses = torch.Generator().manual_seed(i), []
        for _ in range(batches):
            loss = (r.model(torch.randn(8, 64, generator=noise)) - torch.randn(8, 10, generator=noise)).square().mean()
            loss.backward()
            losses.append(loss.item())
        r.optimiser.step()
        r.optimiser.zero_grad()
        r.scheduler.step()
        if not traced:
            continue
        parts = (losses, r.model.state_dict(), fxmask.masks(r.model), r.optimiser.state_dict(), r.scheduler.state_dict(), fxmask.explain(r.model).rows)
        trace.append(copy.deepcopy(dict(zip(("loss", "weights", "masks", "optimiser", "scheduler", "explain"), parts, strict=True))))
    return trace


def checkpoint(r):
    parts = dict(model=r.model, optimiser=r.optimiser, scheduler=r.scheduler)
    return {**{k: p.state_dict() for k, p in parts.items()}, "masks": fxmask.state_dict(r.model)}


def take_up(r, saved):
    r.model.load_state_dict(saved["model"])
    fxmask.load_state_dict(r.model, saved["masks"])
    r.optimiser.load_state_dict(saved["optimiser"])
    r.scheduler.load_state_dict(saved["scheduler"])


def snapshot(model):
    """All that fxmask keeps of a model's masks, copied, and the weights."""
    found = {name: {k: v for k, v in site.__dict__.items() if k.startswith("_fxmask_") and k != "_fxmask_class"} for name, site, _ in sites(model)}
    return copy.deepcopy((found, model.state_dict()))


def stepped(n=3, **options):
    model = masked(**{"refresh": 2, **options})
    fxmask.step(model, n)
    return model


# ---- to go on ----------------------------------------------------------------------------------------------------------------------------------------------


@FORMS
@EACH
@pytest.mark.parametrize(
    ("policy", "returning", "batches"),
    [("auto", "keep", 1), ("auto", "zero", 4), ("decay", "keep", 1), ("free", "zero", 1)],
)
def test_a_resumed_run_is_the_same_run(form, config, policy, returning, batches):
    """Stopped after 5 of 12 steps: loss, weights, masks, optimiser, learning rate and `explain` of each step left are bit-identical."""
    whole = run(form, config, 0, policy, returning)
    whole.go()
    train(whole, 0, CUT, batches, traced=False)
    saved = through_a_file(checkpoint(whole))
    expected = train(whole, CUT, LAST, batches)
    fresh = run(form, config, 99, policy, returning)
    take_up(fresh, saved)
    fresh.go()
    found = train(fresh, CUT, LAST, batches)
    for i, (a, b) in enumerate(zip(expected, found, strict=True)):
        for part in a:
            assert same(a[part], b[part]), f"{part} of step {CUT + i}"
    auto = "free" if config == "rigl" else "freeze"
    assert {(r["masked_weights"], r["step"]) for r in found[-1]["explain"] if r["masked"]} == {(auto if policy == "auto" else policy, LAST)}
    assert same(through_a_file(checkpoint(whole)), through_a_file(checkpoint(fresh)))


@FORMS
@pytest.mark.parametrize("config", MOVES)
def test_these_runs_move_their_masks(form, config):
    """The test above has something to lose: masks change after the cut, and flips are counted."""
    r = run(form, config)
    r.go()
    trace = train(r, 0, LAST)
    assert any(not same(t["masks"], trace[CUT - 1]["masks"]) for t in trace[CUT:])
    if "refresh" in config and config != "refresh-1":
        assert any(row["flips"] for row in trace[-1]["explain"] if row["masked"])


@FORMS
def test_a_guard_that_was_there_before_the_load_stays(form):
    whole = run(form, "refresh-2-cubic")
    whole.go()
    train(whole, 0, CUT, traced=False)
    saved = through_a_file(checkpoint(whole))
    fresh = run(form, "refresh-2-cubic", 99)
    fresh.go()
    take_up(fresh, saved)
    assert same(train(whole, CUT, LAST), train(fresh, CUT, LAST))


@EACH
def test_steps_told_by_hand_resume_too(config):
    """Without a guard: fxmask.step is told again, and nothing else is needed."""
    whole, fresh = run("module", config), run("module", config, 99)

    def go_on(r, first, last):
        trace = []
        for i in range(first, last):
            trace += train(r, i, i + 1)
            fxmask.step(r.model)
        return [*trace, fxmask.masks(r.model)]

    fxmask.step(whole.model, 0)
    go_on(whole, 0, CUT)
    saved = through_a_file(checkpoint(whole))
    take_up(fresh, saved)
    assert same(go_on(whole, CUT, LAST), go_on(fresh, CUT, LAST))


@FORMS
@EACH
def test_the_state_is_plain_and_a_copy(form, config):
    r = run(form, config)
    r.go()
    train(r, 0, CUT, traced=False)
    state = fxmask.state_dict(r.model)
    before = copy.deepcopy(state)
    assert same(through_a_file(state), before) and state["format"] == 1
    assert list(state["masks"]) == list(fxmask.masks(r.model))
    train(r, CUT, LAST, traced=False)
    assert same(state, before)
    other = masked(form, **CONFIGS[config])
    fxmask.load_state_dict(other, state)
    loaded = snapshot(other)
    for entry in state["masks"].values():
        for key in ("mask", "flips"):
            if entry[key] is not None:
                entry[key].zero_()
    assert same(snapshot(other), loaded)


@pytest.mark.parametrize("number", ["numpy", "fraction"])
def test_settings_of_other_number_types_are_saved_plainly(number):
    numpy, fractions = pytest.importorskip("numpy"), pytest.importorskip("fractions")
    ratio = numpy.float64(0.5) if number == "numpy" else fractions.Fraction(1, 2)
    for options in (dict(ratio=ratio), dict(schedule=fxmask.Schedule("linear", 4, initial=ratio))):
        model = masked(**options)
        fxmask.load_state_dict(model, through_a_file(fxmask.state_dict(model)))


# ---- dense and masked ---------------------------------------------------------------------------------------------------------------------------------------


@FORMS
@EACH
def test_from_a_dense_checkpoint_to_a_masked_run_and_back(form, config):
    dense = mlp(1)
    r = run(form, config)
    r.model.load_state_dict(through_a_file(dense.state_dict()), strict=True)
    r.go()
    if config != "random" and "start" not in config and "cubic" not in config:
        assert all(torch.equal(m, best_blocks(dense.get_parameter(n), (16, 16), 0.6)) for n, m in fxmask.masks(r.model).items())
    train(r, 0, CUT, traced=False)
    weights = copy.deepcopy(r.model.state_dict())
    assert not same(weights["0.weight"], dense.state_dict()["0.weight"])
    dense.load_state_dict(through_a_file(weights), strict=True)
    assert same(dict(dense.state_dict()), dict(weights))
    x = torch.randn(3, 64)
    with fxmask.dense(r.model):
        assert torch.equal(r.model(x), dense(x))
    assert not torch.equal(r.model.eval()(x), dense(x))


@FORMS
def test_restore_gives_the_dense_model(form):
    model = masked(form, ratio=0.8)
    weights = copy.deepcopy(model.state_dict())
    x, dense = torch.randn(3, 64), mlp()
    assert torch.equal(fxmask.restore(model)(x), dense(x)) and same(dict(model.state_dict()), dict(weights))
    with pytest.raises(StateError, match=r"fxmask.state_dict: nothing is masked"):
        fxmask.state_dict(model)


# ---- averaged copies ----------------------------------------------------------------------------------------------------------------------------------------


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
    """An average tells nobody that it writes its weights: call fxmask.refresh before it is evaluated."""
    model, ema = averaged(dict(refresh=refresh), form)
    first = {f"module.{n}": m for n, m in fxmask.masks(masked(form)).items()}
    assert same(fxmask.masks(ema), first) and not same(best(ema), first)
    ema.eval()(torch.randn(2, 64))
    fxmask.refresh(ema)
    assert same(fxmask.masks(ema), best(ema))
    fxmask.load_state_dict(ema.module, fxmask.state_dict(model))  # or the masks and the step of the run
    assert same(fxmask.masks(ema.module), fxmask.masks(model))
    assert {r["step"] for r in fxmask.explain(ema).rows if r["masked"]} == {8}
    ema.eval()(torch.randn(2, 64))


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


# ---- wrong use ----------------------------------------------------------------------------------------------------------------------------------------------


def refused(model, state, match):
    """StateError, and nothing has changed."""
    before = snapshot(model)
    with pytest.raises(StateError, match=match):
        fxmask.load_state_dict(model, state)
    assert same(snapshot(model), before)


OTHER = {
    "ratio": (dict(ratio=0.7), r"ratio: 0\.7 here, 0\.6 saved"),
    "block": (dict(block=(32, 16)), r"block: \[32, 16\] here, \[16, 16\] saved"),
    "refresh": (dict(refresh=3), r"refresh: 3 here, 2 saved"),
    "cached": (dict(refresh=1), r"refresh: 1 here, 2 saved"),
    "backward": (dict(backward="ste"), r"backward: 'ste' here, 'masked' saved"),
    "criterion": (dict(criterion="l1"), r"criterion: 'l1' here, 'fro' saved"),
    "schedule": (dict(schedule=CUBIC), r"schedule: \{'kind': 'cubic', 'steps': 9, 'initial': 0\.1, .*\} here, None saved"),
    "two": (dict(start=2, seed=3), r"start: 2 here, 0 saved; seed: 3 here, 0 saved"),
    "one-layer": (dict(overrides={"2": dict(ratio=0.7)}), r"ratio: 0\.7 here, 0\.6 saved(?s:.*)where: 2\.weight"),
}


@FORMS
@pytest.mark.parametrize("other", OTHER)
def test_other_settings(form, other):
    options, match = OTHER[other]
    model = masked(form, **{"refresh": 2, **options})
    match = rf"the state was saved with other settings: expected the same, got {match}(?s:.*)where: [02]\.weight(?s:.*)apply fxmask with the saved settings"
    refused(model, fxmask.state_dict(stepped()), match.replace(r"(?s:.*)where: 2\.weight(?s:.*)where: [02]\.weight", r"(?s:.*)where: 2\.weight"))


@FORMS
def test_a_state_from_before_a_setting_was_there(form):
    """What is missing has its default; a model with another value is another run."""
    schedule = fxmask.Schedule("cubic", steps=9, initial=0.1)
    state = fxmask.state_dict(stepped(refresh=2, schedule=schedule))
    for entry in state["masks"].values():
        for later in ("cycles", "warmup", "cooldown"):
            del entry["settings"]["schedule"][later]
    model = masked(form, refresh=2, schedule=schedule)
    fxmask.load_state_dict(model, through_a_file(state))
    assert same(fxmask.masks(model), fxmask.masks(stepped(refresh=2, schedule=schedule)))
    other = masked(form, refresh=2, schedule=dataclasses.replace(schedule, warmup=2))
    refused(other, state, r"schedule: \{.*'warmup': 2.*\} here, \{.*'warmup': 0.*\} saved")


def test_where_it_runs_is_no_setting():
    model = masked(refresh=2, impl="reference")
    fxmask.load_state_dict(model, fxmask.state_dict(stepped()))
    assert fxmask.explain(model).rows[0]["step"] == 3


@FORMS
def test_another_architecture(form):
    more = fxmask.apply(mlp(sizes=(64, 96, 64, 64, 10)), ratio=0.6, refresh=2)
    wide = fxmask.apply(mlp(sizes=(64, 96, 128, 10)), ratio=0.6, refresh=2)
    weights = r"the state is of other weights: expected an entry for each masked weight, got none for \[{}\] and unknown ones for \[{}\]"
    refused(masked(form, refresh=2), fxmask.state_dict(more), weights.format("", r"'4\.weight'") + r"(?s:.*)apply fxmask as in the run that saved it")
    refused(more, fxmask.state_dict(masked(form, refresh=2)), weights.format(r"'4\.weight'", ""))
    # 0.weight of `wide` fits and 2.weight does not: neither was taken
    match = r"(?s)expected \(4, 6\), got \(8, 6\).*where: 2\.weight.*load the state of this architecture"
    refused(masked(form, refresh=2), fxmask.state_dict(wide), match)


NOT_A_STATE = {
    "None": (lambda m: None, "NoneType"),
    "a number": (lambda m: 3, "int"),
    "weights": (lambda m: m.state_dict(), r"keys \['0\.bias', '0\.weight'"),
    "optimiser": (lambda m: optim.Adam(m.parameters()).state_dict(), r"keys \['param_groups', 'state'\]"),
    "nothing": (lambda m: {}, r"keys \[\]"),
    "entries alone": (lambda m: fxmask.state_dict(m)["masks"], r"keys \['0\.weight', '2\.weight'\]"),
    "a list": (lambda m: [fxmask.state_dict(m)], "list"),
}


@FORMS
@pytest.mark.parametrize("what", NOT_A_STATE)
def test_something_else_than_a_state(form, what):
    make, got = NOT_A_STATE[what]
    model = masked(form, refresh=2)
    refused(model, make(model), rf"fxmask.load_state_dict: expected what fxmask.state_dict returned \(format 1\), got {got}")


EDITS = {  # of the second entry, so that the first is whole
    "missing key": (lambda e: e.pop("flips"), "expected what fxmask.state_dict returned"),
    "unknown key": (lambda e: e.update(more=1), "expected what fxmask.state_dict returned"),
    "mask of another shape": (lambda e: e.update(mask=e["mask"].T), r"expected \(4, 6\), got \(6, 4\)(?s:.*)where: 2\.weight"),
    "no mask": (lambda e: e.update(mask=None), r"expected \(4, 6\), got None(?s:.*)where: 2\.weight"),
}
VALUES = {
    "settings": [None, [1], "x"],
    "mask": [[[True]], torch.ones(4, 6), torch.ones(4, 6, dtype=torch.int64)],
    "flips": [None, torch.zeros(3, dtype=torch.int64), torch.zeros(()), 3],
    "step": ["x", None, -4, 1.5, float("nan"), True],
    "built": ["x", None, -1, 99],
    "announced": ["no", None],
    "policy": ["ice", 3],
}


@FORMS
@pytest.mark.parametrize("edit", EDITS)
def test_an_entry_that_was_changed(form, edit):
    change, match = EDITS[edit]
    state = fxmask.state_dict(stepped())
    change(state["masks"]["2.weight"])
    refused(masked(form, refresh=2), state, match)


@pytest.mark.parametrize(("key", "value"), [pytest.param(k, v, id=f"{k}-{i}") for k, values in VALUES.items() for i, v in enumerate(values)])
def test_a_value_that_was_changed(key, value):
    state = fxmask.state_dict(stepped())
    state["masks"]["2.weight"][key] = value
    refused(masked(refresh=2), state, rf"(?s){key}.*2\.weight")


def test_a_mask_that_keeps_another_number_of_blocks():
    state = fxmask.state_dict(stepped())
    state["masks"]["2.weight"]["mask"].fill_(False)
    refused(masked(refresh=2), state, r"(?s)expected 10 kept blocks, got 0.*2\.weight")


@FORMS
def test_a_state_that_was_changed(form):
    model = masked(form, refresh=2)
    for change in (
        lambda s: s.update(format=2),
        lambda s: s.pop("format"),
        lambda s: s.update(format=None),
        lambda s: s.update(masks=None),
        lambda s: s.update(masks=list(s["masks"])),
        lambda s: s["masks"].update({"2.weight": None}),
    ):
        state = fxmask.state_dict(stepped())
        change(state)
        refused(model, state, r"expected what fxmask.state_dict returned \(format 1\), got \w+")
    for change, match in ((lambda m: m.pop("2.weight"), r"got none for \['2\.weight'\]"), (lambda m: m.clear(), r"got none for \['0\.weight', '2\.weight'\]")):
        state = fxmask.state_dict(stepped())
        change(state["masks"])
        refused(model, state, match)


def test_an_unknown_format_is_named():
    state = fxmask.state_dict(stepped())
    refused(masked(refresh=2), {**state, "format": 2}, r"format 2")


@FORMS
def test_inside_dense(form):
    model, state = masked(form, refresh=2), fxmask.state_dict(stepped())
    with fxmask.dense(model):
        with pytest.raises(StateError, match=r"(?s)fxmask.load_state_dict inside fxmask.dense: expected masks in force.*0\.weight.*leave the with block first"):
            fxmask.load_state_dict(model, state)
        with pytest.raises(StateError, match=r"(?s)fxmask.state_dict inside fxmask.dense.*0\.weight.*leave the with block first"):
            fxmask.state_dict(model)
    assert same(fxmask.masks(model), fxmask.masks(masked(form, refresh=2))) and fxmask.explain(model).rows[0]["step"] == 0


def test_a_model_without_masks():
    model = mlp()
    with pytest.raises(StateError, match=r"(?s)fxmask.load_state_dict: nothing is masked in this model.*Sequential.*call fxmask.apply"):
        fxmask.load_state_dict(model, fxmask.state_dict(stepped()))
    assert type(model[0]) is nn.Linear and not [k for k in model[0].__dict__ if k.startswith("_fxmask_")]


def test_a_file_that_was_cut_off(tmp_path):
    """torch.load says so, before fxmask sees anything; the model is as it was, and can still be loaded."""
    r = run("module", "refresh-2-cubic")
    r.go()
    train(r, 0, 3)
    torch.save(checkpoint(r), file := tmp_path / "checkpoint.pt")
    whole = file.read_bytes()
    fresh = run("module", "refresh-2-cubic", 99)
    before = snapshot(fresh.model)
    for part in (0.0, 0.001, 0.1, 0.25, 0.5, 0.75, 0.9, 0.999):
        file.write_bytes(whole[: int(part * len(whole))])
        with pytest.raises((RuntimeError, EOFError, OSError, ValueError)):
            take_up(fresh, torch.load(file, weights_only=True))
        assert same(snapshot(fresh.model), before)
    file.write_bytes(whole)
    take_up(fresh, torch.load(file, weights_only=True))
    assert same(fxmask.masks(fresh.model), fxmask.masks(r.model))


# ---- what was forgotten -------------------------------------------------------------------------------------------------------------------------------------


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
    with pytest.raises(StateError, match=r"fxmask\.guard"):
        fresh.model.train()(x)
    other = copy.deepcopy(fresh.model)
    with pytest.raises(StateError, match=r"fxmask\.guard"):
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
    with pytest.raises(StateError, match=r"fxmask\.guard"):
        again.model(torch.randn(2, 64))


def test_a_forgotten_guard_of_weights_that_other_parameters_make():
    make = lambda: fxmask.apply(nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(64, 64))), ratio=0.5, refresh=2)  # noqa: E731
    model, fresh = make(), make()
    optimiser = optim.SGD(model.parameters(), lr=0.1)
    fxmask.guard(optimiser, model)
    fxmask.load_state_dict(fresh, fxmask.state_dict(model))
    with pytest.raises(StateError, match=r"fxmask\.guard"):
        fresh(torch.randn(2, 64))


def test_cached_masks_of_weights_that_other_parameters_make_resume():
    def go(weights=0):
        torch.manual_seed(weights)
        model = fxmask.apply(nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(64, 64))), ratio=0.5, refresh=2, backward="ste")
        optimiser = optim.SGD(model.parameters(), lr=20.0)
        return SimpleNamespace(model=model, optimiser=optimiser, scheduler=StepLR(optimiser, 3, 0.7))

    def steps(r, first, last):
        trace = []
        for i in range(first, last):
            r.optimiser.zero_grad()
            r.model(torch.randn(8, 64, generator=torch.Generator().manual_seed(i))).square().mean().backward()
            r.optimiser.step()
            trace.append((fxmask.masks(r.model), copy.deepcopy(r.model.state_dict())))
        return trace

    whole, fresh = go(), go(9)
    fxmask.guard(whole.optimiser, whole.model)
    steps(whole, 0, CUT)
    take_up(fresh, through_a_file(checkpoint(whole)))
    fxmask.guard(fresh.optimiser, fresh.model)
    first = fxmask.masks(fresh.model)
    expected, found = steps(whole, CUT, LAST), steps(fresh, CUT, LAST)
    assert same(expected, found) and not same(found[-1][0], first)


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
    fresh.go()
    assert {r["step"] for r in fxmask.explain(fresh.model).rows if r["masked"]} == {0}  # from the beginning
    fresh.model(torch.randn(2, 64))


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
