"""fxmask.state_dict: a run that was stopped goes on to the same bits, and a dense checkpoint becomes a masked run and back."""

import copy
from types import SimpleNamespace

import pytest
import torch
from sample_models import best_blocks, mlp
from saved_states import same, through_a_file
from torch import nn, optim
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim.lr_scheduler import StepLR
from unit.state_runs import CONFIGS, CUT, EACH, FORMS, LAST, checkpoint, masked, run, snapshot, take_up, train

import fxmask
from fxmask.errors import StateError

MOVES = [c for c in CONFIGS if c != "refresh-0"]


# ---- to go on ----------------------------------------------------------------------------------------------------------------------------------------------


GUARDS = [("auto", "keep", 1), ("auto", "zero", 4), ("decay", "keep", 1), ("free", "zero", 1)]
# the first guard with everything, the others with every second config in one form, and with all in both where there is time
RESUMED = [
    pytest.param(form, config, *guard, id="-".join(map(str, (*guard, config, form))), marks=pytest.mark.slow if i and (i + j + 2 * k) % 4 else ())
    for i, guard in enumerate(GUARDS)
    for j, config in enumerate(CONFIGS)
    for k, form in enumerate(("module", "graph"))
]


@pytest.mark.parametrize(("form", "config", "policy", "returning", "batches"), RESUMED)
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


def test_a_state_is_a_copy_of_what_steps_write_in_place():
    """As masks and flips under fxmask.graphed, and scores: neither what was saved moves with the model, nor what it was loaded from."""
    model = fxmask.apply(mlp(), ratio=0.6, refresh=2, average=0.5)
    fxmask.step(model, 0)
    saved = fxmask.state_dict(model)
    before = copy.deepcopy(saved["masks"]["0.weight"])
    fxmask.load_state_dict(model, saved)
    for site in (model[0], model[2]):
        site._fxmask_in_place = True
    again, masks = fxmask.state_dict(model), fxmask.masks(model)
    for _ in range(2):
        with torch.no_grad():
            model[0].weight.copy_(model[0].weight.flip(0))
        fxmask.step(model)
    now = fxmask.state_dict(model)["masks"]["0.weight"]
    for key in ("mask", "flips", "score"):
        found = [state["masks"]["0.weight"][key] for state in (saved, again)]
        assert all(torch.equal(t, before[key]) for t in found) and not torch.equal(now[key], before[key]), key
    assert torch.equal(masks["0.weight"], before["mask"])


KINDS = {
    "masks": fxmask.WeightMask(0.5, (16, 16), refresh=2, schedule=fxmask.Schedule("linear", steps=9)),
    "nm": fxmask.NMMask(mode="permuted"),
    "pruning": fxmask.ActivationPruning(0.8, 16, schedule=fxmask.Schedule("linear", steps=9)),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("direction", ["off", "on"])
def test_wrappers_inside_of_a_model_do_not_count_in_names(kind, direction):
    """A run with checkpointed and compiled blocks goes on, or is evaluated, without, and the other way round: state_dict, too, has other names there."""

    def blocks(wrapped):
        torch.manual_seed(0)
        model = fxmask.apply(nn.ModuleDict({n: nn.Sequential(nn.Linear(32, 32)) for n in "ab"}), KINDS[kind])
        if wrapped:
            model["a"], model["b"] = checkpoint_wrapper(model["a"]), torch.compile(checkpoint_wrapper(model["b"]), backend="eager")
        return model

    first, second = blocks(direction == "off"), blocks(direction == "on")
    if kind == "nm":
        fxmask.freeze(first)
    else:
        fxmask.step(first, 4)
    saved = fxmask.state_dict(first)
    fxmask.load_state_dict(second, saved)
    found = fxmask.state_dict(second)
    assert not same(list(found[kind]), list(saved[kind])) and same(list(found[kind].values()), list(saved[kind].values()))
    name = next(iter(found[kind]))
    for more in ("c", 3, f"_orig_mod.{name}"):  # the last one is another name of what is there
        with pytest.raises(StateError, match="the state is of other"):
            fxmask.load_state_dict(first, {**found, kind: {**found[kind], more: found[kind][name]}})
    with pytest.raises(StateError, match=r"the state is of other|expected what fxmask\.state_dict returned"):
        fxmask.load_state_dict(first, {**found, kind: 3})


def test_a_state_brings_back_masks_that_were_lost_on_the_meta_device():
    """Also where the weights were given their values past `load_state_dict`, as code of sharded checkpoints does."""
    model = fxmask.apply(mlp(), ratio=0.6, refresh=0)
    weights, saved, x = copy.deepcopy(model.state_dict()), fxmask.state_dict(model), torch.randn(3, 64)
    expected = model(x)
    model.to_empty(device="meta").to_empty(device="cpu")
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(weights[name])
    with pytest.raises(StateError, match="lost on the meta device"):
        model(x)
    fxmask.load_state_dict(model, saved)
    assert torch.equal(model(x), expected)
