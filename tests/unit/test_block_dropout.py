"""`BlockDropout` on modules and graphs: fusing, training and evaluation, checkpointing, restoring, wrong use."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fxmask
from fxmask import ActivationPruning, BlockDropout, FxMaskWarning, WeightMask
from fxmask.dropping import DroppedLinear
from fxmask.errors import ShapeError, StateError
from fxmask.fused import FusedDropout
from fxmask.kernels import draw_ops, dropout
from fxmask.kernels.cpu import dropout_runs


def net(p: float = 0.3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Dropout(p), nn.Linear(96, 64), nn.ReLU(), nn.Dropout(0.1))


def masks_drawn(monkeypatch) -> list:
    seen = []
    real = draw_ops.mask

    def noted(x, block, p, impl="auto"):
        seen.append(real(x, block, p, impl))
        return seen[-1]

    monkeypatch.setattr(draw_ops, "mask", noted)
    return seen


def test_a_dropout_before_a_linear_is_fused(monkeypatch):
    seen = masks_drawn(monkeypatch)
    model = net()
    model[5].p = 0.0
    dense = copy.deepcopy(model)
    fxmask.apply(model, BlockDropout(block=(8, 16)))
    assert type(model[0]) is nn.Linear and isinstance(model[3], DroppedLinear) and isinstance(model[2], FusedDropout)
    rows = {r["name"]: r for r in fxmask.explain(model).rows}
    assert rows["3"]["dropout"] == "p=0.3 in 8x16" and rows["0"]["dropout"] is None and "no p was given" in rows["0"]["reason"]
    x = torch.randn(32, 64, requires_grad=True)
    y = model(x)
    (keep,) = seen
    h = dense[1](dense[0](x))
    want = torch.relu(F.linear(dropout.drop(h, keep, (8, 16), 0.3), dense[3].weight, dense[3].bias))
    torch.testing.assert_close(y, want)
    a, b = torch.autograd.grad(y.sum(), x)[0], torch.autograd.grad(want.sum(), x)[0]
    torch.testing.assert_close(a, b)
    model.eval()
    dense.eval()
    assert torch.equal(model(x), dense(x)) and len(seen) == 1


def test_included_linears_are_dropped_and_other_dropouts_left_alone(monkeypatch):
    seen = masks_drawn(monkeypatch)
    model = fxmask.apply(net(), BlockDropout(0.5, (8, 16)))
    report = fxmask.explain(model)
    assert [r["dropout"] for r in report.rows] == ["p=0.5 in 8x16"] * 2 and "left alone: 5." in report.notes[-1]
    model(torch.randn(32, 64))
    assert [m.shape for m in seen] == [(4, 4), (4, 6)]
    only = fxmask.apply(net(), BlockDropout(0.5, (8, 16)), include="0", overrides={"0": {"p": 0.25}})
    assert [r["dropout"] for r in fxmask.explain(only).rows] == ["p=0.25 in 8x16", None] and type(only[2]) is nn.Dropout
    assert "left alone: 2, 5." in fxmask.explain(only).notes[-1]


def test_monte_carlo_and_p_of_zero():
    x = torch.randn(32, 64)
    model = fxmask.apply(net(), BlockDropout(0.5, (8, 8), mc=True)).eval()
    assert not torch.equal(model(x), model(x)) and "evaluation too" in fxmask.explain(model).rows[0]["dropout"]
    dense = net()
    zero = fxmask.apply(copy.deepcopy(dense), BlockDropout(0.0), include="0")
    torch.manual_seed(1)
    a = zero(x)
    torch.manual_seed(1)
    assert torch.equal(a, dense(x))  # and no number was drawn


def test_a_block_larger_than_the_input_is_all_of_it():
    model = fxmask.apply(nn.Linear(64, 64, bias=False), BlockDropout(0.5, (512, 512)))
    sums = {float((model(torch.ones(4, 64)) == 0).all()) for _ in range(40)}
    assert sums == {0.0, 1.0}


def test_the_seed_of_the_generator_decides_and_checkpointing_redraws():
    model = fxmask.apply(net(), BlockDropout(0.5, (8, 16)))
    x = torch.randn(32, 64)

    def grad(run) -> torch.Tensor:
        torch.manual_seed(3)
        model.zero_grad()
        run(x).square().sum().backward()
        return model[0].weight.grad.clone()

    plain = grad(model)
    assert torch.equal(plain, grad(model)) and torch.equal(plain, grad(lambda x: checkpoint(model, x, use_reentrant=False)))
    torch.manual_seed(4)
    model.zero_grad()
    model(x).square().sum().backward()
    assert not torch.equal(plain, model[0].weight.grad)


@pytest.mark.filterwarnings("ignore:what torch.export makes has no train:fxmask.FxMaskWarning")
@pytest.mark.parametrize("trace", ["fx", "export"])
def test_graphs(trace, monkeypatch):
    seen = masks_drawn(monkeypatch)
    dense = net()
    dense[5].p = 0.0
    x = torch.randn(32, 64)
    gm = torch.fx.symbolic_trace(copy.deepcopy(dense)) if trace == "fx" else torch.export.export(copy.deepcopy(dense), (x,)).module()
    before = [(n.op, str(n.target)) for n in gm.graph.nodes if n.op != "get_attr"]
    fxmask.apply(gm, BlockDropout(block=(8, 16)))
    assert [str(n.target) for n in gm.graph.nodes if "fxmask_dropped" in str(n.target)]
    assert {r["name"]: r["dropout"] for r in fxmask.explain(gm).rows} == {"0": None, "3": "p=0.3 in 8x16"}
    y = gm(x)
    (keep,) = seen
    h = dense[1](dense[0](x))
    torch.testing.assert_close(y, torch.relu(F.linear(dropout.drop(h, keep, (8, 16), 0.3), dense[3].weight, dense[3].bias)))
    if trace == "fx":
        assert torch.equal(gm.eval()(x), dense.eval()(x)) and len(seen) == 1
        gm.train()
    fxmask.restore(gm)
    assert [(n.op, str(n.target)) for n in gm.graph.nodes if n.op != "get_attr"] == before and "fxmask_dropped" not in gm._modules


def test_a_functional_dropout_in_a_graph_and_one_with_two_readers():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, x):
            h = F.dropout(x, 0.25, training=True)
            off = F.dropout(x, 0.9, training=False)
            return self.a(h) + self.b(h) + self.b(off)

    gm = torch.fx.symbolic_trace(Two())
    text = gm.code
    fxmask.apply(gm, BlockDropout(block=(8, 8)))
    calls = [n for n in gm.graph.nodes if "fxmask_dropped" in str(n.target)]
    assert len(calls) == 2 and sum(n.target is F.dropout for n in gm.graph.nodes) == 1  # the one that is off stays
    gm(torch.randn(16, 32))
    fxmask.restore(gm)
    assert sum(n.target is F.dropout for n in gm.graph.nodes) == 2 and len(gm.code.splitlines()) == len(text.splitlines())


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_and_autocast(backend):
    model = fxmask.apply(net(), BlockDropout(0.5, (8, 16)))
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    x = torch.randn(32, 64)
    out = compiled(x)
    out.sum().backward()
    assert model[0].weight.grad is not None and not torch.equal(compiled(x), out)
    with torch.autocast("cpu", torch.bfloat16):
        assert model[:4](x).dtype == torch.bfloat16


@pytest.mark.parametrize("trains", [True, False])
def test_an_input_is_saved_for_a_weight_that_asks_for_a_gradient(trains):
    model, x, seen = fxmask.apply(nn.Linear(32, 48), BlockDropout(0.5, (8, 8))), torch.randn(16, 32, requires_grad=True), []
    model.weight.requires_grad_(trains)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(tuple(t.shape)) or t, lambda t: t):
        model(x).sum().backward()
    assert ((16, 32) in seen) == trains and x.grad is not None


def test_with_weight_masks(monkeypatch):
    seen = masks_drawn(monkeypatch)
    model = fxmask.apply(net(), WeightMask(0.5, (16, 16)), BlockDropout(block=(8, 16)), overrides={"0": {"ratio": 0.75}})
    rows = fxmask.explain(model).rows
    assert [r["target_ratio"] for r in rows] == [0.75, 0.5] and [r["dropout"] for r in rows] == [None, "p=0.3 in 8x16"]
    x = torch.randn(32, 64)
    h = model[:2](x)
    y = model[3](model[2](h))
    weight = model[3].weight * fxmask.masks(model)["3.weight"].repeat_interleave(16, 0).repeat_interleave(16, 1)
    torch.testing.assert_close(y, F.linear(dropout.drop(h, seen[0], (8, 16), 0.3), weight, model[3].bias))
    y.sum().backward()
    assert model[3].weight.grad is not None
    fxmask.restore(model)
    assert repr(model) == repr(net())


def test_restore_copy_and_pickle():
    dense = net()
    model = fxmask.apply(copy.deepcopy(dense), BlockDropout(0.5, (8, 16)))
    assert list(model.state_dict()) == list(dense.state_dict())
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), model):
        torch.manual_seed(5)
        a = twin(torch.ones(32, 64))
        torch.manual_seed(5)
        assert torch.equal(a, model(torch.ones(32, 64)))
    for twin in (copy.deepcopy(model), model):
        fxmask.restore(twin)
        assert repr(twin) == repr(dense) and all(torch.equal(a, b) for a, b in zip(twin.parameters(), dense.parameters(), strict=True))
        assert not any(row["dropout"] for row in fxmask.explain(twin).rows)
        with pytest.raises(StateError, match="nothing is masked in this model"):
            fxmask.restore(twin)


def test_a_dropout_that_is_used_twice_is_left_alone():
    shared = nn.Dropout(0.3)
    model = nn.Sequential(shared, nn.Linear(32, 32), shared, nn.Linear(32, 32))
    with pytest.warns(FxMaskWarning, match="drops beside 0, 2, which stays"):
        fxmask.apply(model, BlockDropout(0.5, (8, 8)))
    assert type(model[0]) is nn.Dropout and "left alone" in fxmask.explain(model).notes[-1]


def test_a_dropout_before_a_linear_that_also_stands_elsewhere_is_left_alone():
    """There nothing is dropped."""
    shared = nn.Linear(32, 32)
    model = nn.Sequential(nn.Dropout(0.5), shared, nn.ReLU(), shared)
    with pytest.warns(FxMaskWarning, match="no active dropout before it"):
        fxmask.apply(model, BlockDropout(block=(8, 8)))
    assert type(model[0]) is nn.Dropout and type(shared) is nn.Linear


def test_analyze_and_the_counter_expect_what_p_says():
    model, x = fxmask.apply(nn.Sequential(nn.Linear(64, 96)), BlockDropout(0.25, (8, 16))), torch.randn(4, 10, 64, requires_grad=True)
    flop = fxmask.analyze(model, x).summary["flop"]
    assert [flop[k] for k in ("fwd", "bwd_dx", "bwd_dw")] == [round(0.75 * 2 * 40 * 64 * 96)] * 3
    with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
        model(x).sum().backward()
    assert counter.get_total_flops() % (3 * 2 * 96) == 0 and 0 < counter.get_total_flops() <= 3 * 2 * 40 * 64 * 96


def forced(impl: str) -> nn.Module:
    return fxmask.apply(net(), BlockDropout(0.5, (8, 16), impl=impl))


@pytest.mark.parametrize("impl", ["reference", "cpu"])
def test_an_impl_that_is_asked_for_runs(impl, monkeypatch):
    """Also where the other one is the faster: p below what strips pay from, and blocks that are too small for them."""
    ran, forms = [], {"reference": dropout, "cpu": dropout_runs}

    def noted(name, real):
        return lambda *a: ran.append(name) or real(*a)

    for name, form in forms.items():
        for op in ("linear", "dx", "dw"):
            monkeypatch.setattr(form, op, noted(name, getattr(form, op)))
    for p, block in ((0.1, (8, 16)), (0.6, (32, 32))):
        ran.clear()
        model = fxmask.apply(net(), BlockDropout(p, block, impl=impl), include="0")
        assert fxmask.explain(model).rows[0]["dropout"].endswith(f", impl={impl!r}")
        model(torch.randn(64, 64, requires_grad=True)).sum().backward()
        assert ran == [impl] * 3
        fxmask.restore(model)
    twin = pickle.loads(pickle.dumps(fxmask.apply(net(), BlockDropout(0.5, (8, 16)), overrides={"0": {"impl": impl}})))
    assert [r["dropout"] for r in fxmask.explain(twin).rows] == [f"p=0.5 in 8x16, impl={impl!r}", "p=0.5 in 8x16"]


def test_analyze_counts_the_kernels_that_leave_blocks_out():
    """Without values a mask of as many kept blocks as p lets one expect; asked for the reference, all dense FLOP are issued."""
    model, x = fxmask.apply(nn.Sequential(nn.Linear(128, 256)), BlockDropout(0.75, (64, 64))), torch.randn(512, 128, requires_grad=True)
    dense = 2 * 512 * 128 * 256
    for impl, issued, label in ((None, dense // 4, "triton"), ("reference", dense, None)):
        report = fxmask.analyze(model, x, device="h100-sxm", impl=impl)
        rows = [r for r in report.tables["nodes"] if r["op"].startswith("fxmask.dropped")]
        assert [r["flop"] for r in rows] == [dense // 4] * 3 and all(r["impl"] == label for r in rows)
        assert all(r["flop_executed"] >= issued if label else r["flop_executed"] == issued for r in rows)
        assert ("fxmask.strip_lists" in {r["op"] for r in report.tables["nodes"]}) == (impl is None)


WRONG = {
    "p of 1": (lambda: BlockDropout(1.0), r"number in \[0, 1\)"),
    "block": (lambda: BlockDropout(0.5, 128), r"two positive ints \(tokens, features\)"),
    "no features": (lambda: forced("auto")(torch.tensor(1.0)), r"expected floats \(\.\.\., K\), got torch.float32 of shape \(\)"),
    "ints": (lambda: forced("auto")(torch.ones(4, 64, dtype=torch.int64)), r"expected floats .* got torch.int64 of shape \(4, 64\)"),
    "mc": (lambda: BlockDropout(0.5, mc=1), "mc: expected a bool"),
    "impl": (lambda: BlockDropout(0.5, impl="cuda"), "unknown impl: expected one of auto, reference, cpu, triton"),
    "triton and float16": (lambda: forced("triton")(torch.randn(32, 64).half()), "impl='triton' (needs a CUDA device|cannot run on a tensor on cpu)"),
    "cpu and float16": (lambda: forced("cpu").half()(torch.randn(32, 64).half()), "expected float32 or float64"),
    "cpu beside a mask": (lambda: fxmask.apply(net(), WeightMask(), BlockDropout(0.5, impl="cpu")), "the mask's own impl multiplies"),
    "dropout of 1": (lambda: fxmask.apply(net(1.0), BlockDropout()), "behind a Dropout with p=1.0"),
    "with pruning": (lambda: fxmask.apply(net(), BlockDropout(0.5), ActivationPruning()), "saves its input whole"),
    "twice": (lambda: fxmask.apply(net(), BlockDropout(0.5), BlockDropout(0.5)), "one BlockDropout, got 2"),
    "again": (lambda: fxmask.apply(fxmask.apply(net(), BlockDropout(0.5)), BlockDropout(0.5)), "dropped already"),
    "option": (lambda: fxmask.apply(net(), BlockDropout(0.5), overrides={"0": {"ratio": 0.5}}), "unknown option .* got 'ratio'"),
    "both in a trace": (lambda: fxmask.apply(torch.fx.symbolic_trace(net()), WeightMask(), BlockDropout(0.5)), "instead of its trace"),
    "torch.func": (lambda: (m := fxmask.apply(net(), BlockDropout(0.5))) and torch.func.grad(lambda x: m(x).sum())(torch.randn(4, 64)), "function transform"),
    "tracing": (lambda: torch.fx.symbolic_trace(fxmask.apply(net(), BlockDropout(0.5))), "trace first"),
    "tracing a trace": (lambda: torch.fx.symbolic_trace(fxmask.apply(torch.fx.symbolic_trace(net()), BlockDropout(0.5))), "trace first"),
    "tracing it in eval": (lambda: torch.fx.symbolic_trace(fxmask.apply(torch.fx.symbolic_trace(net()), BlockDropout(0.5)).eval()), "trace first"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_use(case):
    call, words = WRONG[case]
    with pytest.raises(fxmask.FxMaskError, match=words):
        call()


def test_nothing_to_drop_is_said():
    with pytest.warns(FxMaskWarning, match="changed nothing: .*no active dropout before it"):
        fxmask.apply(nn.Sequential(nn.Linear(64, 64)), BlockDropout())


def test_an_encoder_layer_drops_in_training():
    layer = nn.TransformerEncoderLayer(64, 4, 96, dropout=0.0, batch_first=True)
    x = torch.randn(2, 16, 64)
    for configs in ((BlockDropout(0.5, (8, 8)),), (WeightMask(0.5, (16, 16)), BlockDropout(0.5, (8, 8)))):
        model = fxmask.apply(copy.deepcopy(layer), *configs)
        assert not torch.equal(model(x), model(x))
        model.eval()
        assert torch.equal(model(x), model(x))
    with pytest.raises(fxmask.FxMaskError, match="fast path"):
        fxmask.apply(copy.deepcopy(layer), BlockDropout(0.5, (8, 8), mc=True))


def test_export_with_a_batch_that_moves():
    model = fxmask.apply(nn.Sequential(nn.Linear(64, 64)), BlockDropout(0.5, (16, 16)))
    gm = torch.export.export(model, (torch.randn(4, 16, 64),), dynamic_shapes=({0: torch.export.Dim("b")},)).module()
    assert gm(torch.randn(9, 16, 64)).shape == (9, 16, 64)


def test_a_graphs_dropout_of_1_is_refused_before_anything_changes():
    model = nn.ModuleDict({"plain": net(), "graph": torch.fx.symbolic_trace(net(1.0))})
    with pytest.raises(fxmask.FxMaskError, match=r"dropout with p=1.0"):
        fxmask.apply(model, BlockDropout(block=(8, 8)))
    assert type(model["plain"][2]) is nn.Dropout and type(model["plain"][3]) is nn.Linear


def test_a_rest_can_be_restored_when_its_linear_is_gone():
    model = fxmask.apply(net(), BlockDropout(block=(8, 8)))
    model[3] = nn.Linear(96, 64)
    fxmask.restore(model)
    assert type(model[2]) is nn.Dropout


def test_a_sequential_with_a_forward_of_its_own_is_not_fused():
    class Other(nn.Sequential):
        def forward(self, x):
            return self[1](x) + self[0](x)

    model = Other(nn.Dropout(0.5), nn.Linear(32, 32))
    with pytest.warns(fxmask.FxMaskWarning, match="changed nothing"):
        fxmask.apply(model, BlockDropout(block=(8, 8)))
    assert type(model[0]) is nn.Dropout


def test_a_bias_of_another_length():
    x, w, keep = torch.randn(8, 8), torch.randn(6, 8), torch.ones(2, 2, dtype=torch.bool)
    for impl in ("reference", "cpu"):
        with pytest.raises(ShapeError, match=r"bias: expected \(6,\)"):
            torch.ops.fxmask.dropped_linear(x, w, torch.randn(8), keep, 4, 4, 0.5, impl)


def test_operands_that_do_not_belong_together():
    x, w, gy, keep, fx = torch.randn(8, 32), torch.randn(6, 32), torch.randn(8, 6), torch.ones(1, 2, dtype=torch.bool), torch.ops.fxmask
    for call, text in (
        (lambda: fx.dropped_linear(x, w, None, keep, 16, 16, 0.5, lists=torch.zeros(3, dtype=torch.int32)), "lists of a mask"),
        (lambda: fx.dropped_dx(gy[:, :5], w, keep, 16, 16, 0.5), "last axis of gy: expected 6"),
        (lambda: fx.dropped_dw(gy.view(2, 4, 6), x, keep, 16, 16, 0.5), "tokens of gy and x: expected the same leading axes"),
    ):
        with pytest.raises(ShapeError, match=text):
            call()


@pytest.mark.parametrize("kind", [nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout])
def test_every_kind_of_dropout_that_is_left_alone_is_named(kind):
    model = fxmask.apply(nn.Sequential(nn.Dropout(0.5), nn.Linear(32, 32), kind(0.5)), BlockDropout(block=(8, 16)))
    assert "left alone: 2." in fxmask.explain(model).notes[-1]
