"""Block, backward mode and more by the optimiser's step: against runs that are put together by hand, compiled, stopped, copied, and asked for in vain."""

import copy
import io
import re
from itertools import pairwise

import pytest
import torch
from sample_models import Attention, Computed, best_blocks, mlp, noisy_step
from torch import fx, optim
from torch._dynamo.testing import CompileCounterWithBackend
from torch.fx import symbolic_trace

import fxmask
from fxmask import backend
from fxmask.errors import ConfigError, FxMaskWarning, StateError, UnsupportedError
from fxmask.passes.phases import in_force
from fxmask.sites import sites

NAMES = ["0.weight", "2.weight"]
PHASES = {3: dict(backward="ste"), 6: dict(block=(16, 16), refresh=2), 10: dict(backward="masked", criterion="l1")}
LAST = 13


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch._dynamo.reset()
    yield
    torch.set_num_threads(threads)


def config(phases=PHASES, **options):
    return fxmask.WeightMask(**{"ratio": 0.6, "block": (8, 8), "phases": phases, **options})


def run(c, weights=0, form="module", guard="auto", returning="zero"):
    model = mlp(weights) if form == "module" else fx.symbolic_trace(mlp(weights))
    fxmask.apply(model, c)
    optimiser = optim.Adam(model.parameters(), lr=0.02, weight_decay=0.3)
    if guard:
        fxmask.guard(optimiser, model, guard, returning)
    return model, optimiser


def train(model, optimiser, first, last, call=None):
    """After each step: loss, masks, weights, momenta."""
    trace = []
    for i in range(first, last):
        loss = noisy_step(call or model, optimiser, i)
        momenta = [t.clone() for s in optimiser.state.values() for t in s.values()]
        trace.append((loss.item(), fxmask.masks(model), [p.detach().clone() for p in model.parameters()], momenta))
    return trace


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(v, b[k]) for k, v in a.items())
    return len(a) == len(b) and all(map(same, a, b)) if isinstance(a, (list, tuple)) else a == b


def through_a_file(state):
    torch.save(state, buffer := io.BytesIO())
    return torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)


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


def test_a_step_that_failed_may_be_told_again(monkeypatch):
    from fxmask.passes import rebuild

    model, twin = fxmask.apply(mlp(), config()), fxmask.apply(mlp(), config())
    fxmask.step(model, 5)
    before = fxmask.masks(model)
    with monkeypatch.context() as m:
        m.setattr(rebuild, "rebuild", lambda jobs: 1 / 0)
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


# ---- to stop, to copy, to end ------------------------------------------------------------------------------------------------------------------------------


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
    from fxmask.passes import rebuild

    model = fxmask.apply(mlp(), config({2: dict(refresh=3), 4: dict(block=(16, 16))}))
    fxmask.step(model, step - 1)
    with fxmask.dense(model):
        rebuild.advance([(site, w) for _, site, w in sites(model)], 1)
        assert all(m.all() for m in fxmask.masks(model).values())
    assert same(fxmask.masks(model)["0.weight"], best_blocks(model[0].weight, block, 0.6))


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


# ---- wrong use ---------------------------------------------------------------------------------------------------------------------------------------------

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


def test_a_phase_that_begins_inside_a_cuda_graph(monkeypatch):
    """A replay would run the phase before it; the step is not taken. (No GPU here: the capture is pretended.)"""
    model = fxmask.apply(mlp(), config())
    with monkeypatch.context() as m:
        m.setattr("fxmask.passes.site.capturing", lambda t: True)
        fxmask.step(model, 2)
        with pytest.raises(UnsupportedError, match=r"a phase begins at step 3 inside a CUDA graph(.|\n)*capture the step anew in each phase"):
            fxmask.step(model)
    assert fxmask.explain(model).rows[0]["step"] == 2
    fxmask.step(model)
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
