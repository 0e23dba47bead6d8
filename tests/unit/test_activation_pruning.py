"""`ActivationPruning`: exact forward, dX and db, dW of the pruned input, real memory, and everything that apply promises."""

import copy
import gc
import pickle
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from unit.pruned_models import grads, mlp, pruned_input, saved_bytes

import fxmask
from fxmask import ActivationPruning, WeightMask
from fxmask.kernels import reference
from fxmask.kernels.cpu import prune_strips
from fxmask.pruning import PrunedLinear


@pytest.mark.parametrize("ratio", [0.0, 0.5, 0.8])
@pytest.mark.parametrize("form", ["module", "fx", "export"])
def test_only_dw_changes(ratio, form):
    x, dense = torch.randn(3, 10, 64, dtype=torch.float64), mlp()
    inputs = {0: x, 2: dense[1](dense[0](x)).detach()}
    model = copy.deepcopy(dense)
    model = {"module": lambda: model, "fx": lambda: torch.fx.symbolic_trace(model), "export": lambda: torch.export.export(model, (x,)).module()}[form]()
    fxmask.apply(model, ActivationPruning(ratio, 16))
    assert torch.equal(model(x), dense(x))
    want, got = grads(dense, x), grads(model, x)
    assert torch.equal(got["x"], want["x"])
    out = dense(x)
    gy = {2: 2 * out.detach()}
    gy[0] = (gy[2] @ dense[2].weight) * torch.autograd.functional.jvp(F.gelu, dense[0](x).detach(), torch.ones(3, 10, 96, dtype=torch.float64))[1]
    for i in (0, 2):
        assert torch.equal(got[f"{i}.bias"], want[f"{i}.bias"])
        exact = gy[i].reshape(-1, gy[i].shape[-1]).t() @ pruned_input(inputs[i], ratio, 16).reshape(-1, inputs[i].shape[-1])
        torch.testing.assert_close(got[f"{i}.weight"], exact, rtol=1e-12, atol=1e-12)
        assert torch.equal(got[f"{i}.weight"], want[f"{i}.weight"]) == (ratio == 0)


def test_token_mixing_is_cut_along_its_channels():
    lin = nn.Linear(20, 20, dtype=torch.float64)
    x = torch.randn(3, 20, 48, dtype=torch.float64)
    fxmask.apply(lin, ActivationPruning(0.5, 16))
    y = lin(x.transpose(1, 2))
    gy = torch.randn_like(y)
    y.backward(gy)
    kept = pruned_input(x, 0.5, 16)  # (batch, tokens, channels): one token high, 16 channels wide
    torch.testing.assert_close(lin.weight.grad, torch.einsum("bco,btc->ot", gy, kept))
    assert 0.45 < float((kept == 0).double().mean()) < 0.55


def test_the_dense_input_is_freed_after_the_forward(little_garbage):
    lin = nn.Linear(64, 64)

    def held(layer: nn.Module) -> bool:
        x = torch.randn(8, 64, requires_grad=True) * 1  # nothing else holds it
        ref, y = weakref.ref(x), layer(x)
        del x
        gc.collect()
        assert y.grad_fn is not None
        return ref() is not None

    assert held(lin)
    fxmask.apply(lin, ActivationPruning(0.5, 16))
    assert not held(lin)


def test_autograd_holds_what_the_formula_says_and_analyze_knows_it():
    model, x = nn.Sequential(nn.Linear(64, 96)), torch.randn(4, 10, 64)
    dense = saved_bytes(model, x)
    fxmask.apply(model, ActivationPruning(0.8, 16))
    n = 10 * 64 // 16
    assert (dense, saved_bytes(model, x)) == (4 * 10 * 64 * 4, 4 * (n - 32) * (16 * 4 + 2))
    report = fxmask.analyze(model, x)
    assert report.tables["footprint"][-1]["saved_activations"] == 4 * (n - 32) * (16 * 4 + 2)
    flop = report.summary["flop"]
    assert (flop["fwd"], flop["bwd_dw"]) == (2 * 40 * 64 * 96, 2 * 96 * 4 * (n - 32) * 16)
    assert report.summary["coverage"]["nodes_pct"] == 100


@pytest.mark.parametrize("turned", [False, True])
def test_a_block_wider_than_a_row_is_saved_as_wide_as_the_row(turned):
    """Padded to 64 features, half of the rows of 24 would take more than all of them."""
    x = torch.randn(2, 10, 24, dtype=torch.float64)
    model = nn.Sequential(nn.Linear(10 if turned else 24, 16).double())
    fxmask.apply(model, ActivationPruning(0.5, 64), exclude=())
    x = x.transpose(1, 2) if turned else x
    assert saved_bytes(model, x.clone(memory_format=torch.preserve_format)) == 2 * 5 * (24 * 8 + 2)
    model(x).sum().backward()
    torch.testing.assert_close(model[0].weight.grad, pruned_input(x, 0.5, 64).sum((0, 1)).expand(16, -1))


def test_pytorchs_counter_counts_the_kept_blocks():
    model, x = nn.Sequential(nn.Linear(64, 96)), torch.randn(4, 10, 64, requires_grad=True)
    fxmask.apply(model, ActivationPruning(0.5, 16))
    with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
        model(x).sum().backward()
    assert counter.get_total_flops() == 2 * 40 * 64 * 96 * 2.5


def test_pytorchs_counter_counts_both():
    """A training loop counts under a weight mask, too: a quarter of the weights, half of the input, evenly spread."""
    model, x = nn.Sequential(nn.Linear(64, 96)), torch.randn(4, 10, 64, requires_grad=True)
    fxmask.apply(model, fxmask.WeightMask(ratio=0.75, block=(16, 16)), ActivationPruning(0.5, 16))
    with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
        model(x).sum().backward()
    assert counter.get_total_flops() == 2 * 40 * 64 * 96 * 0.25 * 2.5


def test_without_gradients_nothing_is_saved():
    model, x = mlp(torch.float32), torch.randn(4, 64, requires_grad=True)
    want = model(x)
    fxmask.apply(model, ActivationPruning(0.5, 16))
    with torch.no_grad():
        assert torch.equal(model(x), want)
    for p in model.parameters():
        p.requires_grad_(False)
    assert saved_bytes(model, x) == saved_bytes(fxmask.restore(copy.deepcopy(model)), x)
    model(x).sum().backward()
    assert x.grad is not None


def test_accumulation_checkpointing_and_autocast():
    torch.manual_seed(0)
    x = torch.randn(6, 10, 64)
    model = fxmask.apply(mlp(torch.float32), ActivationPruning(0.5, 16))
    whole = grads(copy.deepcopy(model), x)
    parts = copy.deepcopy(model)
    for half in x.split(3):
        parts(half).square().sum().backward()
    again = copy.deepcopy(model)
    checkpoint(again, x, use_reentrant=False).square().sum().backward()
    for n, p in parts.named_parameters():
        torch.testing.assert_close(p.grad, whole[n])
        assert torch.equal(again.get_parameter(n).grad, whole[n])
    with torch.autocast("cpu", torch.bfloat16):
        out = model(x)
        assert out.dtype == torch.bfloat16
        assert saved_bytes(model, x) < saved_bytes(fxmask.restore(copy.deepcopy(model)), x)
    out.float().sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled(backend):
    x, model = torch.randn(4, 10, 64), fxmask.apply(mlp(torch.float32), ActivationPruning(0.5, 16))
    want = grads(copy.deepcopy(model), x)
    got = grads(torch.compile(copy.deepcopy(model), backend=backend, fullgraph=True), x)
    for n, g in want.items():
        assert torch.equal(got[n if n == "x" else f"_orig_mod.{n}"], g)


def test_noise_is_the_checkpoints_too():
    model = fxmask.apply(mlp(torch.float32), ActivationPruning(0.5, 16, noise=1.0))
    x = torch.randn(6, 10, 64)
    torch.manual_seed(1)
    first = grads(copy.deepcopy(model), x)
    torch.manual_seed(2)
    other = grads(copy.deepcopy(model), x)
    assert not torch.equal(first["0.weight"], other["0.weight"]) and torch.equal(first["0.bias"], other["0.bias"])
    again = copy.deepcopy(model)
    torch.manual_seed(1)
    checkpoint(again, x, use_reentrant=False).square().sum().backward()
    assert torch.equal(again[0].weight.grad, first["0.weight"])


def test_with_weight_masks():
    x = torch.randn(3, 10, 64, dtype=torch.float64)
    for backward in ("masked", "ste", "unmasked"):
        dense = nn.Linear(64, 96, dtype=torch.float64)
        model = fxmask.apply(copy.deepcopy(dense), WeightMask(0.5, (16, 16), backward=backward), ActivationPruning(0.8, 16))
        plain = fxmask.apply(copy.deepcopy(dense), WeightMask(0.5, (16, 16), backward=backward))
        mask = fxmask.masks(model)["weight"]
        a, b = grads(model, x), grads(plain, x)
        assert torch.equal(model(x), plain(x)) and torch.equal(a["x"], b["x"]) and torch.equal(a["bias"], b["bias"])
        gy = 2 * model(x).detach()
        exact = gy.reshape(-1, 96).t() @ pruned_input(x, 0.8, 16).reshape(-1, 64)
        exact = reference.masked(exact, mask, (16, 16)) if backward == "masked" else exact
        torch.testing.assert_close(a["weight"], exact)


def test_on_a_soft_ramp_the_input_is_saved_pruned_too():
    mask, x = WeightMask(0.5, (16, 16), schedule=fxmask.Schedule("linear", steps=2), soft=True), torch.randn(10, 64)
    model = fxmask.apply(nn.Linear(64, 96), mask, ActivationPruning(0.5, 16))
    fxmask.step(model, 0)
    kept = reference.masked(torch.ones(96, 64), fxmask.masks(model)["weight"], (16, 16)).bool()
    exact = (2 * model(x).detach()).t() @ pruned_input(x, 0.5, 16)
    assert model._fxmask_softening
    torch.testing.assert_close(grads(model, x)["weight"][kept], exact[kept])


def test_with_weight_masks_a_guard_and_a_soft_ramp():
    torch.manual_seed(0)
    model = mlp(torch.float32)
    fxmask.apply(model, WeightMask(0.5, (16, 16), schedule=fxmask.Schedule("linear", steps=2), soft=True), ActivationPruning(0.5, 16))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    fxmask.guard(optimizer, model)
    x, losses = torch.randn(8, 64), []
    for _ in range(6):
        optimizer.zero_grad()
        loss = (model(x) - 1).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] and fxmask.explain(model).rows[0]["achieved_ratio"] == 0.5


def test_implementations_agree_and_explain_names_them(monkeypatch):
    by_strips, strips = [], prune_strips.dw
    monkeypatch.setattr(prune_strips, "dw", lambda *args: by_strips.append(args) or strips(*args))
    x, dense = torch.randn(3, 20, 64, dtype=torch.float64), nn.Linear(64, 96, dtype=torch.float64)
    for masks in ((), (WeightMask(0.5, (16, 16)),)):
        found = {impl: fxmask.apply(copy.deepcopy(dense), *masks, ActivationPruning(0.5, 16, impl=impl)) for impl in ("auto", "reference", "cpu")}
        got = {impl: grads(m, x) for impl, m in found.items()}
        for name, g in got["reference"].items():
            torch.testing.assert_close(got["cpu"][name], g)
            assert torch.equal(got["auto"][name], g)
    assert len(by_strips) == 2  # of `cpu` alone: where half of the blocks are kept, strips do not pay. The bits tell it on some processors only
    assert fxmask.explain(found["cpu"]).rows[0]["activations"] == "50 % of 1x16, dW by cpu"
    assert fxmask.explain(found["auto"]).rows[0]["activations"] == "50 % of 1x16"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_an_implementation_that_cannot_run_is_refused():
    with pytest.raises(fxmask.FxMaskError, match="impl='triton' needs a CUDA device"):
        ActivationPruning(0.5, 16, impl="triton")


def test_overrides_include_and_explain():
    model = fxmask.apply(mlp(), ActivationPruning(0.5, 16), overrides={"2": {"ratio": 0.8, "block": 32}})
    assert [r["activations"] for r in fxmask.explain(model).rows] == ["50 % of 1x16", "80 % of 1x32"]
    assert "activations: 80 % of 1x32" in repr(model) and all(not r["masked"] for r in fxmask.explain(model).rows)
    model = fxmask.apply(mlp(), ActivationPruning(0.5, 16), include="0")
    assert [r["activations"] for r in fxmask.explain(model).rows] == ["50 % of 1x16", None]
    mixed = {"0": {"activations": False}, "2": {"ratio": 0.75, "activations": {"ratio": 0.2}}}
    both = fxmask.apply(mlp(), WeightMask(0.5, (16, 16)), ActivationPruning(0.5, 16), overrides=mixed)
    rows = fxmask.explain(both).rows
    assert [r["activations"] for r in rows] == [None, "20 % of 1x16"] and [r["target_ratio"] for r in rows] == [0.5, 0.75]


def test_restore_copy_and_pickle():
    dense = mlp()
    for configs in ((ActivationPruning(0.5, 16),), (WeightMask(0.5, (16, 16)), ActivationPruning(0.5, 16))):
        model = fxmask.apply(copy.deepcopy(dense), *configs)
        assert list(model.state_dict()) == list(dense.state_dict())
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            x = torch.randn(2, 64, dtype=torch.float64)
            assert all(torch.equal(a, b) for a, b in zip(grads(twin, x).values(), grads(copy.deepcopy(model), x).values(), strict=True))
            fxmask.restore(twin)
            assert type(twin[0]) is nn.Linear and "_fxmask_pruning" not in twin[0].__dict__
        fxmask.restore(model)
        assert repr(model) == repr(dense) and all(torch.equal(a, b) for a, b in zip(model.parameters(), dense.parameters(), strict=True))


def test_a_graph_is_restored_call_for_call():
    for gm in (torch.fx.symbolic_trace(mlp()), torch.export.export(mlp(), (torch.randn(2, 64, dtype=torch.float64),)).module()):
        before = [(n.op, str(n.target)) for n in gm.graph.nodes]
        fxmask.apply(gm, ActivationPruning(0.5, 16))
        assert any("fxmask_pruned" in str(n.target) for n in gm.graph.nodes)
        fxmask.restore(gm)
        after = [(n.op, str(n.target)) for n in gm.graph.nodes]
        assert [t for t in after if t[0] != "get_attr"] == [t for t in before if t[0] != "get_attr"]
        assert "fxmask_pruned" not in gm._modules


def test_a_layer_that_its_owner_reads_is_named():
    model = nn.MultiheadAttention(64, 2)
    with pytest.warns(fxmask.FxMaskWarning, match="changed nothing: .*never calls it"):
        fxmask.apply(model, ActivationPruning(0.5, 16))


def test_ragged_two_axes_and_one():
    lin = fxmask.apply(nn.Linear(40, 24, dtype=torch.float64), ActivationPruning(0.5, 16))
    for shape in ((40,), (6, 40), (2, 3, 40), (2, 3, 2, 40), (0, 40)):
        x = torch.randn(*shape, dtype=torch.float64)
        lin.weight.grad = None
        y = lin(x)
        gy = torch.randn_like(y)
        y.backward(gy)
        want = gy.reshape(-1, 24).t() @ (pruned_input(x, 0.5, 16) if x.numel() else x).reshape(-1, 40)
        torch.testing.assert_close(lin.weight.grad, want)


def test_a_second_derivative_through_dw_raises():
    model, x = fxmask.apply(mlp(), ActivationPruning(0.5, 16)), torch.randn(4, 64, dtype=torch.float64, requires_grad=True)
    out = model(x).square().sum()
    (gw,) = torch.autograd.grad(out, model[0].weight, create_graph=True)
    with pytest.raises((fxmask.FxMaskError, RuntimeError), match=r"second derivative|does not require grad"):
        gw.square().sum().backward()
    dx = mlp()
    a, b = torch.randn(4, 64, dtype=torch.float64, requires_grad=True), torch.zeros(())
    b = a.detach().clone().requires_grad_()
    for m, v in ((dx, a), (model, b)):
        (g,) = torch.autograd.grad(m(v).square().sum(), v, create_graph=True)
        g.square().sum().backward()
    torch.testing.assert_close(a.grad, b.grad)


def test_a_subclass_keeps_what_it_adds():
    class Named(nn.Linear):
        tag = "mine"

    model = nn.Sequential(Named(64, 64))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fxmask.apply(model, ActivationPruning(0.5, 16))
    assert isinstance(model[0], PrunedLinear) and isinstance(model[0], Named) and model[0].tag == "mine" and type(model[0]).__name__ == "PrunedNamed"


def test_a_layer_that_its_owner_reads_and_calls_is_pruned():
    layer = nn.TransformerEncoderLayer(64, 4, 96, dropout=0.0, batch_first=True, dtype=torch.float64)
    for configs in ((ActivationPruning(0.5, 16),), (WeightMask(0.5, (16, 16)), ActivationPruning(0.5, 16))):
        model = fxmask.apply(copy.deepcopy(layer), *configs)
        plain = fxmask.apply(copy.deepcopy(layer), *configs[:-1]) if configs[:-1] else copy.deepcopy(layer)
        rows = {r["name"]: r["activations"] for r in fxmask.explain(model).rows}
        assert rows["linear1"] == rows["linear2"] == "50 % of 1x16" and rows["self_attn.out_proj"] is None
        x = torch.randn(2, 10, 64, dtype=torch.float64)
        a, b = grads(model, x), grads(plain, x)
        assert torch.equal(a["x"], b["x"]) and not torch.equal(a["linear1.weight"], b["linear1.weight"])
        with torch.no_grad():
            assert torch.equal(model.eval()(x), plain.eval()(x))  # its fast path


def test_the_last_override_wins():
    model = fxmask.apply(mlp(), ActivationPruning(0.5, 16), overrides={"*": False, "0": {"ratio": 0.25}})
    assert [r["activations"] for r in fxmask.explain(model).rows] == ["25 % of 1x16", None]
    both = {"*": {"activations": False}, "0": {"activations": {"ratio": 0.25}}}
    model = fxmask.apply(mlp(), WeightMask(0.5, (16, 16)), ActivationPruning(0.5, 16), overrides=both)
    assert [r["activations"] for r in fxmask.explain(model).rows] == ["25 % of 1x16", None]


def test_compiled_lengths_move():
    model = fxmask.apply(mlp(torch.float32), ActivationPruning(0.8, 16))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for rows in (4, 8, 12, 5):
        x = torch.randn(3, rows, 64)
        model.zero_grad()
        compiled(x).square().sum().backward()
        got = model[0].weight.grad.clone()
        model.zero_grad()
        model(x).square().sum().backward()
        torch.testing.assert_close(got, model[0].weight.grad)


def test_what_drops_nothing_says_so_and_saves_the_input_itself():
    model, x = fxmask.apply(nn.Sequential(nn.Linear(64, 96)), ActivationPruning(0.8)), torch.randn(8, 64)
    with pytest.warns(fxmask.FxMaskWarning, match=r"drops nothing of an input \(8, 64\): 0.8 of 1 blocks"):
        held = saved_bytes(model, x)
    assert held == saved_bytes(nn.Sequential(nn.Linear(64, 96)), x)


@pytest.mark.parametrize("dynamic", [False, True])
def test_what_drops_nothing_says_so_where_it_is_compiled(dynamic):
    model, x = fxmask.apply(nn.Sequential(nn.Linear(64, 96)), ActivationPruning(0.8)), torch.randn(8, 64)
    torch._dynamo.reset()
    with pytest.warns(fxmask.FxMaskWarning, match="drops nothing of an input of a compiled layer") as said:
        y = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=dynamic)(x)
    assert len([w for w in said if w.category is fxmask.FxMaskWarning]) == 1 or dynamic
    torch.testing.assert_close(y, nn.functional.linear(x, model[0].weight, model[0].bias))
    with pytest.warns(fxmask.FxMaskWarning, match="drops nothing of an input of a compiled layer"):
        torch.export.export(model, (x,))


@pytest.mark.parametrize("masks", [(), (WeightMask(0.5, (16, 16)),)])
def test_restore_checks_before_it_changes(masks):
    model = fxmask.apply(mlp(torch.float32), *masks, ActivationPruning(0.5, 16))
    nn.utils.parametrizations.weight_norm(model[0])
    with pytest.raises(fxmask.FxMaskError, match="was changed after"):
        fxmask.restore(model)
    assert [r["activations"] for r in fxmask.explain(model).rows] == ["50 % of 1x16"] * 2
    if masks:
        model = fxmask.apply(mlp(), *masks, ActivationPruning(0.5, 16))
        with fxmask.dense(model), pytest.raises(fxmask.FxMaskError, match="inside fxmask"):
            fxmask.restore(model)
        assert [r["activations"] for r in fxmask.explain(model).rows] == ["50 % of 1x16"] * 2
