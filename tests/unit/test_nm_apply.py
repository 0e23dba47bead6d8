"""What apply promises, kept by `NMMask`: layers chosen and reported, copies, states, compiles, exports, and masks made permanent."""

import copy
import pickle

import pytest
import torch
from sample_models import same_snapshot, snapshot
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from unit.nm_models import MODES, batch, grads, net

import fxmask
from fxmask import FxMaskWarning, NMMask
from fxmask.kernels import nm
from fxmask.nm import nm_masking


@pytest.mark.parametrize("mode", MODES)
def test_finalize(mode):
    dense, x = net(), batch()
    model = fxmask.apply(copy.deepcopy(dense), NMMask(**MODES[mode])).eval()
    weight, masks, y = model[3].weight, fxmask.masks(model), model(x)
    assert fxmask.finalize(model) is model and torch.equal(model(x), y) and fxmask.masks(model) == {}
    assert type(model[0]) is nn.Conv2d and model[3].weight is weight and list(model.state_dict()) == list(dense.state_dict())
    assert all(torch.equal(model.get_parameter(n), torch.where(m, dense.get_parameter(n), 0)) for n, m in masks.items())
    fxmask.apply(model, NMMask())


def test_finalize_for_the_hardware_says_what_it_cannot():
    for include, words in ((None, "got a convolution"), ("3", "CUDA device of capability 8.0")):
        model = fxmask.apply(net(), NMMask(), include=include)
        with pytest.raises(fxmask.FxMaskError, match=words):
            fxmask.finalize(model, "2:4")
        assert fxmask.masks(model) and torch.equal(model[0].weight, net()[0].weight), "nothing has changed"
    for config, format, words in ((NMMask(mode="permuted"), "2:4", "at most 2 nonzeros"), (NMMask(3, 4), "2:4", "got 3"), (NMMask(), "bsr", "has no blocks")):
        with pytest.raises(fxmask.FxMaskError, match=words):
            fxmask.finalize(fxmask.apply(net(), config, include="3"), format)


def test_linears_for_the_hardware_beside_convolutions_with_zeros(monkeypatch):
    """What the message advises: a submodule of Linears by itself, then the rest. PyTorch's tensor needs a GPU, so a dense copy stands in for it."""
    monkeypatch.setattr("fxmask.nm.nm_finalizing.semi_structured", lambda name, w, made_by: w.clone())
    parts = net()
    model, x = nn.Sequential(nn.Sequential(*parts[:3]), nn.Sequential(*parts[3:])), batch()
    fxmask.apply(model, NMMask())
    masks, y, conv = fxmask.masks(model), model(x), model[0][0].weight
    with pytest.raises(fxmask.FxMaskError, match=r"got a convolution(?s:.*)finalize the Linears' submodule alone"):
        fxmask.finalize(model, "2:4")
    fxmask.finalize(model[1], "2:4")
    assert list(fxmask.masks(model)) == ["0.0.weight"] and not model[1][0].weight.requires_grad
    fxmask.finalize(model)
    assert torch.equal(model(x), y) and model[0][0].weight is conv and type(model[0][0]) is nn.Conv2d
    assert all(torch.equal(model.get_parameter(n) != 0, m) for n, m in masks.items())


def test_tied_weights():
    tied = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    tied[1].weight = tied[0].weight
    with pytest.raises(fxmask.FxMaskError, match="uses this weight unmasked"):
        fxmask.finalize(fxmask.apply(copy.deepcopy(tied), NMMask(), include="0"))
    with pytest.raises(fxmask.FxMaskError, match="one weight would have two masks: '0' and '1'"):
        fxmask.apply(tied, NMMask(mode="learned"))
    fxmask.finalize(fxmask.apply(tied, NMMask()))
    assert tied[0].weight is tied[1].weight and int((tied[0].weight != 0).sum()) == 512


@pytest.mark.parametrize("mode", MODES)
def test_copies_and_states(mode):
    dense, x = net(), batch()
    model = fxmask.apply(copy.deepcopy(dense), NMMask(**MODES[mode]))
    assert [k for k in model.state_dict() if "nm_" not in k] == list(dense.state_dict())
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        a, b = (torch.manual_seed(2) and grads(copy.deepcopy(m), x) for m in (model, twin))
        assert all(torch.equal(a[n], b[n]) for n in a)
        fxmask.restore(twin)
        assert repr(twin) == repr(dense) and set(twin[3].__dict__) == set(dense[3].__dict__)
    fxmask.freeze(model)
    state = pickle.loads(pickle.dumps({"model": model.state_dict(), "fxmask": fxmask.state_dict(model)}))
    torch.manual_seed(5)
    fresh = fxmask.apply(net(), NMMask(**MODES[mode]))
    fresh.load_state_dict(state["model"])
    fxmask.load_state_dict(fresh, state["fxmask"])
    assert all(torch.equal(m, fxmask.masks(model)[n]) for n, m in fxmask.masks(fresh).items()) and torch.equal(fresh(x), model(x))


def test_states_that_do_not_fit():
    model = fxmask.apply(net(), NMMask())
    fxmask.freeze(model)
    state = fxmask.state_dict(model)
    one, fewer, blocks = fxmask.apply(net(), NMMask(1, 4)), fxmask.apply(net(), NMMask(), include="3"), fxmask.apply(net())
    for other, words in ((one, "other settings"), (fewer, "of other N:M masks"), (blocks, "other weights")):
        with pytest.raises(fxmask.FxMaskError, match=words):
            fxmask.load_state_dict(other, state)
    mask = state["nm"]["0"]["mask"]
    for frozen, wrong in ((True, mask[:1]), (True, mask.int()), (True, None), (False, mask)):
        state["nm"]["0"] |= {"mask": wrong, "frozen": frozen}
        with pytest.raises(fxmask.FxMaskError, match="saved mask does not fit"):
            fxmask.load_state_dict(fxmask.apply(net(), NMMask()), state)


def test_logits_ask_for_a_gradient_where_the_state_that_is_loaded_is_not_frozen():
    make = lambda: fxmask.apply(nn.Sequential(nn.Linear(32, 32)), NMMask(mode="learned"))  # noqa: E731
    frozen, learning = make(), make()
    fxmask.freeze(frozen)
    before = fxmask.state_dict(learning)
    fxmask.load_state_dict(learning, fxmask.state_dict(frozen))
    assert not learning[0].nm_logits.requires_grad
    fxmask.load_state_dict(learning, before)
    assert learning[0].nm_logits.requires_grad


@pytest.fixture
def fresh_compiler():
    """No compiles of other models before, and none left behind: all share the code of nn.Sequential, whose recompiles are limited."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# of the modes that make their masks alike, some will do; frozen masks are constants
MOVING = [pytest.param(mode, False, marks=() if mode in ("magnitude", "sr-ste", "learned", "reordered") else pytest.mark.slow) for mode in MODES]
FROZEN = [pytest.param(mode, True, marks=() if mode in ("permuted", "learned") else pytest.mark.slow) for mode in MODES]


@pytest.mark.parametrize(("mode", "frozen"), [*MOVING, *FROZEN])
def test_compiled_in_one_graph(fresh_compiler, mode, frozen):
    model, x = fxmask.apply(net(torch.float32), NMMask(**MODES[mode])), batch(torch.float32)
    if frozen:
        fxmask.freeze(model)
    got = grads(torch.compile(copy.deepcopy(model), backend="aot_eager", fullgraph=True), x)
    assert ("_orig_mod.0.nm_logits" in got) == (MODES[mode].get("mode") == "learned" and not frozen)
    model.eval()
    compiled = torch.compile(copy.deepcopy(model), backend="aot_eager", fullgraph=True)
    want, got = grads(model, x), {n.removeprefix("_orig_mod."): g for n, g in grads(compiled, x).items()}
    assert got.keys() == want.keys() >= {"x", "y", "0.weight", "0.bias"}
    for n, g in want.items():
        torch.testing.assert_close(got[n], g)


@pytest.mark.parametrize("mode", MODES)
def test_checkpoints_draw_the_same_mask_and_autocast_keeps_it_exact(mode):
    model, x = fxmask.apply(net(torch.float32), NMMask(**MODES[mode])), batch(torch.float32)
    torch.manual_seed(1)
    want = grads(copy.deepcopy(model), x)
    torch.manual_seed(1)
    again = copy.deepcopy(model)
    checkpoint(again, x, use_reentrant=False).square().sum().backward()
    for n, p in again.named_parameters():
        assert torch.equal(p.grad, want[n])
    torch.manual_seed(1)
    with torch.autocast("cpu", torch.bfloat16):
        y = copy.deepcopy(model)(x)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), want["y"], atol=0.05, rtol=0.05)


def test_what_stays_dense_is_reported():
    convs = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 16, 3, groups=4), nn.Conv2d(16, 16, 3)
    model = nn.Sequential(*convs, nn.Linear(30, 32), nn.Linear(32, 10), nn.MultiheadAttention(32, 2))
    fxmask.apply(model, NMMask(), overrides={"2": dict(n=1), "4": False})
    rows = {r["name"]: r for r in fxmask.explain(model).rows}
    assert [rows[n]["reason"] for n in ("0", "1", "3")] == [
        "its rows have 27 elements, no multiple of 4", "a grouped convolution (groups=4)", "its rows have 30 elements, no multiple of 4",
    ]  # fmt: skip
    assert "min(out, in) = 10" in rows["4"]["reason"] and "never calls it" in rows["5.out_proj"]["reason"]
    assert {n for n, r in rows.items() if r["masked"]} == {"2"}
    assert (rows["2"]["block"], rows["2"]["blocks"], rows["2"]["achieved_ratio"], rows["2"]["shape"]) == ("1:4", 576, 0.75, "16x16x3x3")
    assert "mask: 1:4 magnitude" in repr(model) and "convolution" in str(fxmask.explain(model))
    with pytest.warns(fxmask.FxMaskWarning, match="masked nothing: 0: its rows have 27 elements"):
        model = fxmask.apply(nn.Sequential(nn.Conv2d(3, 16, 3)), NMMask())
    assert [r["reason"] for r in fxmask.explain(model).rows] == ["its rows have 27 elements, no multiple of 4"]
    model = fxmask.apply(nn.Sequential(nn.Linear(32, 18), nn.ReLU(), nn.Linear(20, 16)), NMMask(transposable=True))
    assert fxmask.explain(model).rows[0]["reason"] == "it has 18 rows, no multiple of 4 as transposable wants" and fxmask.explain(model).rows[1]["masked"]
    assert {NMMask().misfit(torch.empty(size)) for size in ((16, 0), (0, 16))} == {"its rows have 0 elements, no multiple of 4"}
    assert fxmask.explain(fxmask.apply(net(), ratio=0.5)).summary["linears"] == 2  # no row for what no N:M mask was asked for

    class Own(nn.Conv2d):
        def forward(self, x):
            return self._conv_forward(x, self.weight * 2, self.bias)

    model = fxmask.apply(nn.Sequential(Own(4, 16, 3), nn.Linear(16, 16)), NMMask())
    assert fxmask.explain(model).rows[0]["reason"] == "Own has a forward of its own, which a mask would not reach"


def test_patterns_choose_layers():
    assert list(fxmask.masks(fxmask.apply(net(), NMMask(), include=nn.Conv2d))) == ["0.weight"]
    assert list(fxmask.masks(fxmask.apply(net(), NMMask(), exclude=nn.Conv2d))) == ["3.weight"]
    assert list(fxmask.masks(fxmask.apply(nn.Linear(32, 32), NMMask()))) == ["weight"]
    model = fxmask.apply(net(), NMMask(), exclude=())
    assert list(fxmask.masks(model)) == ["0.weight", "3.weight", "5.weight"]


def test_the_last_override_that_matches_wins_and_all_are_checked():
    model = fxmask.apply(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)), NMMask(), overrides={"*": {"n": 1}, "1": {"mode": "sr-ste"}})
    assert [r["block"] for r in fxmask.explain(model).rows] == ["1:4", "2:4"] and fxmask.explain(model).rows[1]["backward"] == "sr-ste"
    with pytest.warns(FxMaskWarning, match="'gone' matches nothing"), pytest.raises(fxmask.FxMaskError, match="1 <= n < m <= 32"):
        fxmask.apply(fxmask.restore(model), NMMask(), overrides={"gone": {"n": 9}})
    assert type(model[0]) is nn.Linear


def test_a_mask_that_is_given_out_is_a_copy():
    model = fxmask.apply(nn.Sequential(nn.Linear(32, 32)), NMMask())
    fxmask.freeze(model)
    fxmask.masks(model)["0.weight"].zero_()
    assert fxmask.masks(model)["0.weight"].sum() == 16 * 32


def test_a_parametrised_weight_is_masked_as_it_is_computed():
    lin = nn.utils.parametrizations.weight_norm(nn.Linear(32, 32, dtype=torch.float64))
    x, w = torch.randn(2, 32, dtype=torch.float64), lin.weight.detach().clone()
    fxmask.apply(lin, NMMask())
    torch.testing.assert_close(lin(x), F.linear(x, torch.where(nm.magnitude_mask(w, 2, 4), w, 0), lin.bias))
    with pytest.raises(fxmask.FxMaskError, match="this weight is computed"):
        fxmask.finalize(lin)


@pytest.mark.parametrize("mode", MODES)
def test_exports_and_analysis(mode):
    model, x = fxmask.apply(net(torch.float32), NMMask(**MODES[mode])), batch(torch.float32)
    coverage = fxmask.analyze(model, (x,)).summary["coverage"]
    assert coverage["nodes_pct"] == 100 and coverage["params_pct"] == 100
    assert torch.equal(torch.export.export(model.eval(), (x,)).module()(x), model(x))
    want = grads(model, x)
    model.zero_grad()
    graph = torch.export.export(model, (x,)).module()
    graph(x).square().sum().backward()
    for n, p in graph.named_parameters():
        assert p.grad is None if n not in want else torch.allclose(p.grad, want[n])


@pytest.mark.parametrize("back", [fxmask.finalize, fxmask.restore])
def test_the_way_back_of_a_learned_checkpoint(back):
    model = fxmask.apply(net(), NMMask(2, 4, mode="learned"))
    assert any(n.endswith("nm_logits") for n in model.state_dict())
    fxmask.freeze(model)
    net().load_state_dict(back(model).state_dict())


@pytest.mark.parametrize("config", [fxmask.NMMask(2, 4, mode="sr-ste"), fxmask.ActivationPruning(0.5, 16)], ids=["sr-ste", "pruned"])
def test_a_model_exported_without_gradients_has_no_op_of_training(config):
    model, x = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)), torch.randn(4, 32, 64)
    fxmask.apply(model, config, exclude=())
    with torch.no_grad():
        program = torch.export.export(model.eval(), (x,))
    ops = {str(n.target) for n in program.graph.nodes if n.op == "call_function"}
    assert not [op for op in ops if "pruned" in op or "sr_ste" in op]
    torch.testing.assert_close(program.module()(x), model(x))


def test_both_kinds_of_masks_are_made_permanent_one_by_one():
    model = nn.Sequential(fxmask.apply(nn.Sequential(nn.Linear(32, 32)), NMMask()), fxmask.apply(nn.Sequential(nn.Linear(32, 32)), ratio=0.75))
    weights = [p.clone() for p in model.parameters()]
    with pytest.raises(fxmask.FxMaskError, match=r"N:M masks and block masks in one model: expected one kind(?s:.*)fix: finalize the submodules .* one by one"):
        fxmask.finalize(model)
    assert len(fxmask.masks(model)) == 2 and all(map(torch.equal, weights, model.parameters()))
    for part in model:
        fxmask.finalize(part)
    assert [float((part[0].weight == 0).float().mean()) for part in model] == [0.5, 0.75] and type(model[0][0]) is type(model[1][0]) is nn.Linear


def test_masks_of_one_weight_that_were_frozen_apart_are_not_made_permanent():
    tied = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    tied[1].weight = tied[0].weight
    fxmask.apply(tied, NMMask())
    fxmask.freeze(tied[0])
    with torch.no_grad():
        tied[0].weight.copy_(tied[0].weight.flip(1))
    fxmask.freeze(tied)
    before = tied[0].weight.clone()
    with pytest.raises(fxmask.FxMaskError, match=r"have frozen different masks of it\.\n  where: 1\n  fix: untie them first"):
        fxmask.finalize(tied)
    assert torch.equal(tied[0].weight, before)
    tied[1].weight = nn.Parameter(before.clone())
    fxmask.finalize(tied)
    assert [int((m.weight == 0).sum()) for m in tied] == [512, 512] and not torch.equal(tied[0].weight, tied[1].weight)


@pytest.mark.parametrize("mode", MODES)
def test_a_failure_half_way_is_undone(mode, monkeypatch):
    model, swapped = net(), []
    before, real = snapshot(model), nm_masking.swap_nm

    def swap(m, config):
        real(m, config)
        swapped.append(m)
        if len(swapped) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(nm_masking, "swap_nm", swap)
    with pytest.raises(KeyboardInterrupt):
        fxmask.apply(model, NMMask(**MODES[mode]))
    assert same_snapshot(before, snapshot(model)) and all(p.requires_grad for p in model.parameters())


def test_parts_that_were_masked_apart_have_their_own_masks():
    model = nn.Sequential(fxmask.apply(nn.Sequential(nn.Linear(32, 32)), NMMask()), fxmask.apply(nn.Sequential(nn.Linear(32, 32)), ratio=0.5, block=(8, 8)))
    assert {name: tuple(mask.shape) for name, mask in fxmask.masks(model).items()} == {"0.0.weight": (32, 32), "1.0.weight": (4, 4)}


@pytest.mark.parametrize("mode", MODES)
def test_restore_takes_the_hook_of_loads_off_again(mode):
    model = fxmask.restore(fxmask.apply(net(), NMMask(**MODES[mode])))
    assert not any(m._load_state_dict_post_hooks for m in model.modules())
