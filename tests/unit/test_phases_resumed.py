"""Runs with phases that are stopped, copied, made dense or permanent: the same bits, and what does not fit is refused."""

import copy
import io

import pytest
import torch
from sample_models import best_blocks, mlp
from saved_states import same, through_a_file
from unit.phased_runs import LAST, config, run, train

import fxmask
from fxmask.errors import StateError
from fxmask.sites import sites

pytestmark = pytest.mark.usefixtures("one_thread")

CUTS = [(4, 0), (7, 0), (2, 12), (11, 12)]


@pytest.mark.parametrize(("cut", "into"), [*CUTS, *(pytest.param(cut, 12 - into, marks=pytest.mark.slow) for cut, into in CUTS)])
def test_a_resumed_run_is_the_same_run(cut, into):
    model, optimiser = run(config())
    train(model, optimiser, 0, cut)
    saved = through_a_file((model.state_dict(), fxmask.state_dict(model), optimiser.state_dict()))
    expected = train(model, optimiser, cut, LAST)
    other, own = run(config(), weights=9, guard="auto" if into else None)
    train(other, own, 0, into)  # a run that is further on goes back to the phase of the state
    other.load_state_dict(saved[0])
    fxmask.load_state_dict(other, saved[1])
    own.load_state_dict(saved[2])
    if not into:
        fxmask.guard(own, other, returning="zero")
    assert same(train(other, own, cut, LAST), expected)
    assert same(fxmask.state_dict(other), fxmask.state_dict(model))


def test_a_state_of_other_phases_is_refused():
    state = fxmask.state_dict(fxmask.apply(mlp(), config()))
    with pytest.raises(StateError, match=r"saved with other settings: .*phases: \{3: \{'backward': 'masked'\}\} here, \{3: \{'backward': 'ste'\}, 6"):
        fxmask.load_state_dict(fxmask.apply(mlp(), config({3: dict(backward="masked")}, backward="ste")), {**state})
    del state["masks"]["0.weight"]["settings"]["phases"], state["masks"]["2.weight"]["settings"]["phases"]
    fxmask.load_state_dict(fxmask.apply(mlp(), config(None)), state)  # saved before there were phases


def test_a_mask_of_another_phase_is_refused():
    model = fxmask.apply(mlp(), config())
    fxmask.step(model, 7)
    state = fxmask.state_dict(model)
    state["masks"]["0.weight"]["mask"] = torch.ones(12, 8, dtype=torch.bool)
    with pytest.raises(StateError, match=r"the saved mask is of another shape: expected \(6, 4\), got \(12, 8\)"):
        fxmask.load_state_dict(fxmask.apply(mlp(), config()), state)


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies(how):
    model, optimiser = run(config())
    train(model, optimiser, 0, 7)
    torch.save(model, buffer := io.BytesIO())
    twin = copy.deepcopy(model) if how == "deepcopy" else torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)
    assert same(fxmask.masks(twin), fxmask.masks(model))
    fxmask.step(twin, 5)
    assert fxmask.explain(twin).rows[0]["backward"] == "masked" and fxmask.explain(model).rows[0]["backward"] == "ste"


def test_dense_restore_and_finalize():
    model, optimiser = run(config(), guard=None)
    guard = fxmask.guard(optimiser, model)
    train(model, optimiser, 0, 7)
    x, plain = torch.randn(3, 64), mlp()
    plain.load_state_dict(model.state_dict())
    masks = fxmask.masks(model)
    with fxmask.dense(model):
        assert torch.equal(model(x), plain(x)) and fxmask.masks(model)["0.weight"].all()
    assert same(fxmask.masks(model), masks)
    guard.remove()
    final = fxmask.finalize(copy.deepcopy(model))
    zeros = final[0].weight == 0
    assert torch.equal(zeros, ~masks["0.weight"].repeat_interleave(16, 0).repeat_interleave(16, 1))
    assert torch.equal(fxmask.restore(model)(x), plain(x)) and not [n for n in model[0].__dict__ if n.startswith("_fxmask")]


@pytest.mark.parametrize(("step", "block"), [(4, (16, 16)), (2, (8, 8))], ids=["other blocks", "begins to cache"])
def test_a_phase_that_begins_inside_dense(step, block):
    """Only weights that other parameters make may step there; what the end of it brings back is the new phase's mask."""
    from fxmask.passes.state import taken_steps

    model = fxmask.apply(mlp(), config({2: dict(refresh=3), 4: dict(block=(16, 16))}))
    fxmask.step(model, step - 1)
    with fxmask.dense(model):
        taken_steps.advance([(site, w) for _, site, w in sites(model)], 1)
        assert all(m.all() for m in fxmask.masks(model).values())
    assert same(fxmask.masks(model)["0.weight"], best_blocks(model[0].weight, block, 0.6))


def test_blocks_that_change_inside_dense_before_masks_begin():
    from fxmask.passes.state import taken_steps

    model = fxmask.apply(mlp(), config({2: dict(block=(16, 16))}, refresh=3, start=9))
    with fxmask.dense(model):
        taken_steps.advance([(site, w) for _, site, w in sites(model)], 2)
    mask = fxmask.masks(model)["0.weight"]
    assert mask.shape == (6, 4) and mask.all()


def test_health_begins_anew_with_other_blocks(tmp_path):
    model, optimiser = run(config({4: dict(block=(16, 16))}, backward="ste"))
    log, rows = fxmask.HealthLog(model), []
    for i in range(8):
        rows.append(log.update().rows[0])
        train(model, optimiser, i, i + 1)
        if i == 4:
            saved = through_a_file(log.state_dict())
            log = fxmask.HealthLog(model)
            log.load_state_dict(saved)
    assert [r["blocks"] for r in rows] == [96] * 4 + [24] * 4
    assert rows[3]["flips_total"] > 0 == rows[4]["flips"] == rows[4]["age_max"] and rows[4]["flips_total"] == rows[3]["flips_total"]
    assert [r["age_max"] for r in rows][:6] == [0, 1, 2, 3, 0, 1] and rows[4]["never_kept"] == pytest.approx(rows[4]["ratio"])
    assert log.activity["0.weight"].shape == (6, 4) and int(log.activity["0.weight"].sum()) == sum(r["kept"] for r in rows[4:])
    pytest.importorskip("matplotlib")
    assert log.heatmap(tmp_path / "heat.png").stat().st_size > 1000
