"""States that fxmask.load_state_dict refuses: what is wrong is said, and then nothing has changed."""

import dataclasses

import pytest
import torch
from sample_models import mlp
from saved_states import same, through_a_file
from torch import nn, optim
from unit.state_runs import CUBIC, FORMS, checkpoint, masked, run, snapshot, stepped, take_up, train

import fxmask
from fxmask.errors import StateError


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
        for later in ("soft", "gain"):
            del entry["settings"][later]
        del entry["shape"]
    model = masked(form, refresh=2, schedule=schedule)
    fxmask.load_state_dict(model, through_a_file(state))
    assert same(fxmask.masks(model), fxmask.masks(stepped(refresh=2, schedule=schedule)))
    other = masked(form, refresh=2, schedule=dataclasses.replace(schedule, warmup=2))
    refused(other, state, r"schedule: \{.*'warmup': 2.*\} here, \{.*'warmup': 0.*\} saved")


def test_where_it_runs_is_no_setting():
    model = masked(refresh=2, impl="reference")
    fxmask.load_state_dict(model, fxmask.state_dict(stepped()))
    assert fxmask.explain(model).rows[0]["step"] == 3


@pytest.mark.parametrize("kind", [tuple, torch.Size])
def test_a_shape_of_another_kind_is_the_same_shape(kind):
    state, model = fxmask.state_dict(stepped()), masked(refresh=2)
    for entry in state["masks"].values():
        entry["shape"] = kind(entry["shape"])
    fxmask.load_state_dict(model, state)
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
    # masks that each forward builds are in no state, the shape is
    for n in (128, 60):
        other = fxmask.apply(mlp(sizes=(64, 96, n, 10)), ratio=0.6, refresh=1)
        match = rf"(?s)expected \[64, 96\], got \[{n}, 96\].*where: 2\.weight.*load the state of this architecture"
        refused(masked(form, refresh=1), fxmask.state_dict(other), match)
    ragged = fxmask.apply(mlp(sizes=(64, 96, 60, 10)), ratio=0.6, refresh=2)  # as many blocks, and so a mask that would fit
    refused(masked(form, refresh=2), fxmask.state_dict(ragged), r"expected \[64, 96\], got \[60, 96\]")


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
    "shape": [[96, 64], (96, 64), 64, "64x96"],
    "mask": [[[True]], torch.ones(4, 6), torch.ones(4, 6, dtype=torch.int64), torch.ones(4, 6, dtype=torch.bool, device="meta")],
    "score": [torch.zeros(4, 6)],
    "guarded": [1, None],
    "flips": [torch.zeros((), dtype=torch.int64, device="meta"), None, torch.zeros(3, dtype=torch.int64), torch.zeros(()), 3],
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


@pytest.mark.parametrize("value", [None, torch.zeros(6, 4), torch.zeros(4, 6, dtype=torch.float64), torch.zeros(4, 6, device="meta")], ids=str)
def test_a_score_that_was_changed(value):
    state = fxmask.state_dict(stepped(refresh=2, average=0.5))
    state["masks"]["2.weight"]["score"] = value
    refused(masked(refresh=2, average=0.5), state, r"(?s)score: expected torch.float32 \(4, 6\).*2\.weight")


@pytest.mark.parametrize(
    ("key", "value", "kind"), [("flips", torch.tensor(0), "Tensor"), ("mask", torch.ones(4, 6, dtype=torch.bool), "Tensor"), ("mask", "x", "str")]
)
def test_what_a_mask_that_each_forward_builds_does_not_have(key, value, kind):
    state = fxmask.state_dict(stepped(refresh=1))
    state["masks"]["2.weight"][key] = value
    refused(masked(refresh=1), state, rf"(?s){key}: expected None, because each forward builds the mask, got {kind}.*2\.weight")


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
