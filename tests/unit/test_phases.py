"""Block, backward mode and more by the optimiser's step: against runs that are put together by hand, compiled, traced."""

import copy
from itertools import pairwise

import pytest
import torch
from sample_models import Attention, Computed, best_blocks, mlp
from saved_states import same
from torch import nn, optim
from torch._dynamo.testing import CompileCounterWithBackend
from torch.fx import symbolic_trace
from unit.phased_runs import LAST, PHASES, config, run, train

import fxmask
from fxmask.errors import UnsupportedError
from fxmask.passes.settings.phases import in_force

pytestmark = pytest.mark.usefixtures("one_thread")

NAMES = ["0.weight", "2.weight"]


# ---- what a phase is ---------------------------------------------------------------------------------------------------------------------------------------


def test_a_run_is_its_phases_one_after_the_other():
    """Each phase as a run of its own, without phases, that takes up weights and momenta: the same bits."""
    found = train(*run(config(), returning="keep"), 0, LAST)
    options, expected, carried = dict(block=(8, 8)), [], None
    cuts = [0, *PHASES, LAST]
    for first, last in pairwise(cuts):
        options |= PHASES.get(first, {})
        part, own = run(config(None, **options), guard=None)
        if carried:
            part.load_state_dict(carried[0])
            own.load_state_dict(carried[1])
            fxmask.step(part, 0)  # a run that begins
        fxmask.guard(own, part)
        expected += train(part, own, first, last)
        carried = copy.deepcopy((part.state_dict(), own.state_dict()))
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert same((a[0], *a[2:]), (b[0], *b[2:])), i
        assert same(a[1], b[1]) or i + 1 in PHASES, i  # after the last step of a phase the masks are those of the next one
    shapes = [tuple(t[1]["0.weight"].shape) for t in found]
    assert shapes == [(12, 8)] * 5 + [(6, 4)] * 8


def test_momenta_of_elements_that_a_coarser_block_brings_back_are_cleared():
    model, optimiser = run(config({2: dict(block=(32, 32))}, backward="ste"))
    before, after = train(model, optimiser, 0, 2)
    grown = lambda m, b: m.repeat_interleave(b, 0).repeat_interleave(b, 1)  # noqa: E731
    for name in NAMES:
        returned = grown(after[1][name], 32) & ~grown(before[1][name], 8)
        momentum = optimiser.state[model.get_parameter(name)]["exp_avg"]
        assert returned.any() and not momentum[returned].any() and momentum[~returned].all()


def test_a_mask_that_is_alike_in_other_blocks_brings_elements_back():
    """Both grids are 2 x 2, and keep their first block."""
    model = nn.Sequential(nn.Linear(32, 32, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(torch.ones(32, 32))[:8, :8] = 3.0
    fxmask.apply(model, ratio=0.75, block=(16, 16), phases={1: dict(block=(24, 24))})
    optimiser, w = optim.SGD(model.parameters(), lr=0.0, momentum=0.9), model[0].weight
    fxmask.step(model, 0)  # masks begin, under an optimiser with a momentum of before
    fxmask.guard(optimiser, model, returning="zero")
    optimiser.state[w]["momentum_buffer"] = torch.full_like(w, 7.0)
    before = fxmask.masks(model)["0.weight"]
    model(torch.randn(2, 32)).sum().backward()
    optimiser.step()
    assert torch.equal(fxmask.masks(model)["0.weight"], before)
    momentum = optimiser.state[w]["momentum_buffer"]
    assert momentum[:16, :16].all() and not momentum[16:24, :24].any() and not momentum[:16, 16:24].any() and (momentum[24:] == 7).all()


def test_what_is_shown_is_what_is_in_force():
    model, optimiser = run(config())
    rows = []
    for i in range(LAST):
        rows.append(fxmask.explain(model).rows[0])
        train(model, optimiser, i, i + 1)
    assert [(r["block"], r["backward"], r["masked_weights"]) for r in rows] == (
        [("8x8", "masked", "freeze")] * 3 + [("8x8", "ste", "free")] * 3 + [("16x16", "ste", "free")] * 4 + [("16x16", "masked", "freeze")] * 3
    )
    assert [r["mask_age"] for r in rows] == [None] * 6 + [0, 1, 0, 1, 0, 1, 0]
    assert "block=(16, 16), backward='masked'" in repr(model)


def test_blocks_of_another_size_are_no_flips():
    """Nor are those of the first mask that is cached; what was counted before goes on."""
    model, optimiser = run(config({2: dict(refresh=2), 6: dict(block=(16, 16)), 8: dict(criterion="l1")}, backward="ste"))
    flips = []
    for i in range(9):
        train(model, optimiser, i, i + 1)
        flips.append(fxmask.explain(model).rows[0]["flips"])
    assert flips[:3] == [None, 0, 0] and flips[5] == flips[4] > 0 and flips[7] == flips[8] > flips[6] == flips[5]


def test_an_asked_for_policy_stays():
    model, optimiser = run(config({2: dict(backward="masked")}, backward="ste"), guard="free")
    train(model, optimiser, 0, 4)
    assert fxmask.explain(model).rows[0]["masked_weights"] == "free"
    model, optimiser = run(config({2: dict(backward="ste")}), guard="decay")
    train(model, optimiser, 0, 4)
    assert fxmask.explain(model).rows[0]["masked_weights"] == "decay"


def test_the_ratio_goes_on():
    schedule = fxmask.Schedule("linear", steps=8)
    model, optimiser = run(config(schedule=schedule, refresh=1))
    for step in range(LAST):
        c = in_force(config(schedule=schedule), step)
        kept = int(fxmask.masks(model)["0.weight"].sum())
        built = step if c.refresh == 1 else step - step % 2
        assert kept == c.keep_at(built, (96 // c.block[0]) * (64 // c.block[1])), step
        train(model, optimiser, step, step + 1)


def test_masks_that_rest_from_a_step_on():
    """refresh=0 as a phase: once a ramp has ended, the masks that it has come to are kept; a change of the mode alone leaves them."""
    c = config({8: dict(refresh=0), 10: dict(backward="ste")}, schedule=fxmask.Schedule("cubic", steps=8))
    trace = train(*run(c), 0, LAST)
    assert not same(trace[6][1], trace[7][1])
    assert all(same(t[1], trace[7][1]) for t in trace[7:])
    assert same(trace[7][1]["0.weight"], best_blocks(trace[7][2][0], (8, 8), 0.6))


def test_several_steps_told_at_once():
    one, many = fxmask.apply(mlp(), config()), fxmask.apply(mlp(), config())
    fxmask.step(one, LAST)
    for _ in range(LAST):
        fxmask.step(many)
    assert same(fxmask.masks(one), fxmask.masks(many)) and fxmask.masks(one)["0.weight"].shape == (6, 4)


GO_ON = [
    (dict(average=0.5, backward="ste"), dict(backward="masked"), True),
    (dict(criterion="movement", backward="ste"), dict(refresh=2), True),
    (dict(criterion="gradient", backward="ste"), dict(criterion="taylor"), True),  # another one comes with the next step, and these rank until then
    (dict(average=0.5, backward="ste"), dict(criterion="l1"), False),
    (dict(criterion="taylor", backward="ste"), dict(criterion="movement"), False),
]


@pytest.mark.parametrize(("options", "change", "stays"), GO_ON, ids=str)
def test_scores_outlive_a_phase_unless_they_would_add_up_with_others(options, change, stays):
    model, optimiser = run(config({3: change}, **options))
    train(model, optimiser, 0, 3)
    assert fxmask.explain(model).rows[0]["step"] == 3
    assert all(bool(e["score"].any()) == stays for e in fxmask.state_dict(model)["masks"].values())


def test_a_step_that_failed_may_be_told_again(monkeypatch):
    from fxmask.passes.state import rebuild

    model, twin = fxmask.apply(mlp(), config()), fxmask.apply(mlp(), config())
    fxmask.step(model, 5)
    before = fxmask.masks(model)
    with monkeypatch.context() as m:
        m.setattr(rebuild, "rebuild", lambda jobs, compute=None: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            fxmask.step(model)
    assert same(fxmask.masks(model), before) and fxmask.explain(model).rows[0]["block"] == "8x8"
    fxmask.step(model, 4)
    fxmask.step(twin, 9)
    assert same(fxmask.masks(model), fxmask.masks(twin))
    assert same(fxmask.state_dict(model)["masks"]["0.weight"]["mask"], fxmask.masks(twin)["0.weight"])


# ---- compiled ----------------------------------------------------------------------------------------------------------------------------------------------


def test_a_compile_for_each_set_of_values():
    """Three sets, the first of which comes again: three graphs, and what eager computes."""
    phases = {3: dict(backward="ste"), 6: dict(block=(16, 16)), 9: dict(block=(8, 8), backward="masked")}
    c = config(phases, schedule=fxmask.Schedule("cubic", steps=12))
    (model, optimiser), (plain, own) = run(c), run(c)
    counter = CompileCounterWithBackend("aot_eager")
    call = torch.compile(model, backend=counter, fullgraph=True)
    found, counts = [], []
    for i in range(LAST):
        found += train(model, optimiser, i, i + 1, call)
        counts.append(counter.frame_count)
    assert counts == [1] * 3 + [2] * 3 + [3] * 7
    for a, b in zip(found, train(plain, own, 0, LAST), strict=True):
        assert same(a[1], b[1])
        torch.testing.assert_close(a[2], b[2])


# ---- other forms -------------------------------------------------------------------------------------------------------------------------------------------


def test_a_traced_graph_takes_what_is_not_in_its_nodes():
    c = config({2: dict(criterion="l1"), 4: dict(refresh=3), 8: dict(cover=True, refresh=1)})
    assert same(train(*run(c, form="graph"), 0, 10), train(*run(c), 0, 10))


@pytest.mark.parametrize("change", [dict(block=(16, 16)), dict(backward="ste"), dict(backward="rigl", refresh=2)], ids=str)
def test_a_traced_graph_refuses_what_is(change):
    model = symbolic_trace(mlp())
    with pytest.raises(UnsupportedError, match=r"a traced graph holds \w+ in its nodes.*got \(\(5, (.|\n)*call fxmask.apply on the nn.Module"):
        fxmask.apply(model, config({5: change}))
    assert not any("fxmask" in str(n.target) for n in model.graph.nodes)


def test_a_weight_that_a_graph_computes_has_no_cache_later_either():
    with pytest.raises(UnsupportedError, match=r"a cached mask \(refresh=2\) needs the parameter, and this graph computes the weight"):
        fxmask.apply(torch.export.export(Computed(), (torch.randn(2, 32),)).module(), config({5: dict(refresh=2)}))


def test_a_weight_that_its_owner_reads():
    model = fxmask.apply(Attention(), config({2: dict(backward="ste", block=(16, 16))}))
    optimiser = optim.SGD(model.parameters(), lr=0.1)
    fxmask.guard(optimiser, model)
    grads = []
    for _ in range(4):
        optimiser.zero_grad()
        model(torch.randn(2, 5, 32)).square().mean().backward()
        grads.append(int((model.attention.out_proj.weight.grad != 0).sum()))
        optimiser.step()
    assert grads[0] == grads[1] == 7 * 64 and grads[2] == grads[3] == 1024  # 16 blocks of 8x8, of which 7 are kept
    with pytest.raises(UnsupportedError, match=r"phases\[2\]: backward='unmasked' needs the call of the layer"):
        fxmask.apply(Attention(), config({2: dict(backward="unmasked")}))
