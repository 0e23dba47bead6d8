"""The FX pass: equal to the class swap bit for bit, whatever the trace, and reversible."""

import copy
import pickle
import re

import pytest
import torch
import torch.nn.functional as F
from resmlp import PRESETS, ResMLP
from sample_models import Computed, Residual, mlp, same_snapshot, snapshot, with_zeros
from torch import fx, nn

import fxmask
from fxmask.errors import UnsupportedError
from fxmask.passes.graphs.graph_calls import MASKED_LINEAR
from fxmask.passes.infra import Pass, run_passes


def vit(torchvision):
    torch.manual_seed(0)
    model = torchvision.models.VisionTransformer(32, 8, 2, 4, 64, 128, num_classes=24, dropout=0.0)
    torch.nn.init.normal_(model.heads.head.weight, std=0.1)  # torchvision starts it at zero, and then nothing could differ
    return model


MODELS = {
    "mlp": (lambda tv: mlp(), (6, 64)),
    "residual": (lambda tv: Residual(), (3, 32, 32)),
    "resmlp": (lambda tv: _resmlp(), (2, 1, 8, 8)),
    "vit": (vit, (2, 3, 32, 32)),
}


def _resmlp():
    torch.manual_seed(0)
    return ResMLP(PRESETS["digits"])


def traced(model, x, how):
    return fx.symbolic_trace(model) if how == "symbolic_trace" else torch.export.export(model, (x,)).module()


@pytest.mark.parametrize("how", ["symbolic_trace", "export"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("options", [dict(ratio=0.6), dict(ratio=0.8, block=(8, 4), backward="ste")], ids=["masked-16x16", "ste-8x4"])
def test_a_rewritten_trace_equals_the_class_swap(torchvision, name, how, options):
    make, shape = MODELS[name]
    x = torch.randn(shape)
    swapped = fxmask.apply(make(torchvision), **options)
    beyond = {"residual": "proj", "vit": "*in_proj*" if how == "export" else None}.get(name)  # linear calls that no nn.Linear makes
    gm = fxmask.apply(traced(make(torchvision), x, how), exclude=beyond, **options)
    masks, graph_masks = fxmask.masks(swapped), fxmask.masks(gm)
    assert masks.keys() == graph_masks.keys()
    assert all(torch.equal(masks[k], graph_masks[k]) for k in masks)
    for train in (True, False):
        if how == "symbolic_trace":
            swapped.train(train), gm.train(train)
        results = []
        for m in (swapped, gm):
            m.zero_grad()
            y = m(x)
            y.square().sum().backward()
            results.append((y, {k: p.grad for k, p in m.named_parameters()}))
        assert torch.equal(results[0][0], results[1][0]) and results[0][0].abs().sum() > 0
        assert sum(g.abs().sum() > 0 for g in results[0][1].values()) > 0.8 * len(results[0][1])
        for k, grad in results[0][1].items():
            assert torch.equal(grad, results[1][1][k]), k


def test_a_functional_linear_on_a_parameter():
    """Which no module is, so that only a trace shows it."""
    x, model = torch.randn(3, 32, 32), Residual()
    gm = fxmask.apply(fx.symbolic_trace(model), include="proj", ratio=0.75)
    assert list(fxmask.masks(gm)) == ["proj"]
    assert torch.equal(gm(x), with_zeros(Residual(), ["proj"], (16, 16), 0.75)(x))


@torch.fx.wrap
def opaque(x, weight, scale):
    return F.linear(x, weight) * scale


class Opaque(nn.Module):
    def __init__(self):
        super().__init__()
        self.seen, self.inside, self.norm = nn.Linear(32, 32), nn.Linear(32, 32), nn.LayerNorm(32)

    def forward(self, x):
        return opaque(self.seen(x), self.inside.weight, self.norm.weight)


def test_a_weight_inside_of_a_wrapped_function_is_never_silently_dense():
    gm = torch.fx.symbolic_trace(Opaque())
    with pytest.warns(fxmask.FxMaskWarning, match=r"inside.*opaque\(\) reads it"):
        fxmask.apply(gm, ratio=0.5, block=(16, 16))
    rows = {row["name"]: row["masked"] for row in fxmask.explain(gm).rows}
    assert rows == {"seen": True, "inside": False}
    assert list(fxmask.masks(gm)) == ["seen.weight"]
    fxmask.restore(gm)


def test_the_graph_shows_the_ops():
    gm = fxmask.apply(fx.symbolic_trace(mlp()), ratio=0.7)
    nodes = list(gm.graph.find_nodes(op="call_function", target=MASKED_LINEAR))
    assert len(nodes) == 2
    assert [n.args[4:] for n in nodes] == [(16, 16, "masked")] * 2
    assert "torch.ops.fxmask.masked_linear.default" in gm.code
    assert list(gm.state_dict()) == list(mlp().state_dict())


@pytest.mark.parametrize("how", ["symbolic_trace", "export"])
@pytest.mark.parametrize("make", [mlp, Residual], ids=["mlp", "residual"])
def test_restore(how, make):
    x = torch.randn(6, 64) if make is mlp else torch.randn(3, 32, 32)
    gm = traced(make(), x, how)
    y, before = gm(x), snapshot(gm)
    fxmask.restore(fxmask.apply(gm, ratio=0.9, refresh=0))
    after = snapshot(gm)
    assert torch.equal(gm(x), y)
    assert same_snapshot((*before[:3], ""), (*after[:3], ""))
    kinds = [sorted((n.op, str(n.target)) for n in g.graph.nodes) for g in (gm, traced(make(), x, how))]
    assert kinds[0] == kinds[1]
    fxmask.apply(gm, ratio=0.9)  # and again


@pytest.mark.parametrize("backward", ["masked", "rigl"])
@pytest.mark.parametrize("copier", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_copies_are_masked_alike(copier, backward):
    gm = fxmask.apply(fx.symbolic_trace(Residual()), ratio=0.8, backward=backward, refresh=3)
    fxmask.step(gm, 4)
    other = copier(gm)
    x = torch.randn(3, 32, 32)
    assert torch.equal(gm(x), other(x))
    for m in (gm, other):
        with torch.no_grad():
            m.fc1.weight.copy_(torch.randn(64, 32, generator=torch.Generator().manual_seed(1)))
        fxmask.step(m, 3)
    assert torch.equal(gm(x), other(x))
    dense = copier(fx.symbolic_trace(Residual()))
    dense.load_state_dict(gm.state_dict())
    assert torch.equal(fxmask.restore(other)(x), dense(x))


def test_torch_save(tmp_path):
    gm = fxmask.apply(fx.symbolic_trace(mlp()), ratio=0.7)
    torch.save(gm, tmp_path / "gm.pt")
    x = torch.randn(2, 64)
    assert torch.equal(torch.load(tmp_path / "gm.pt", weights_only=False)(x), gm(x))


class TwoUses(nn.Module):
    def __init__(self):
        super().__init__()
        self.w, self.table = nn.Parameter(torch.randn(32, 32)), torch.randn(32, 32)
        self.fc = nn.Linear(32, 32)

    def forward(self, x):
        return F.linear(F.linear(input=x, weight=self.w), self.w, bias=None) + self.fc(self.fc(x)) + F.linear(x, self.table)


def test_one_weight_has_one_mask_and_constants_stay():
    with pytest.warns(fxmask.FxMaskWarning, match="table stays dense: its weight is a constant"):
        gm = fxmask.apply(fx.symbolic_trace(TwoUses()), ratio=0.75)
    assert sorted(fxmask.masks(gm)) == ["fc.weight", "w"]
    assert len(gm.graph.find_nodes(op="call_function", target=MASKED_LINEAR)) == 4
    assert sum(n.op == "call_module" for n in gm.graph.nodes) == 2  # the two masks
    fxmask.restore(gm)
    assert sum(n.op == "call_module" for n in gm.graph.nodes) == 2  # the two calls of fc


class OfTable(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.randn(32, 32))
        self.fc = nn.Linear(32, 32)

    def forward(self, x):
        return self.fc(x) + F.linear(x, self.table.T * 2)


class OfTables(OfTable):
    def forward(self, x):
        return self.fc(x) + F.linear(x, F.linear(self.table, self.table))


@pytest.mark.parametrize("cls", [OfTable, OfTables])
@pytest.mark.filterwarnings("ignore:table stays dense:fxmask.FxMaskWarning")
def test_a_weight_that_a_graph_makes_of_constants_is_one(cls):
    model, x = cls(), torch.randn(4, 32)
    with pytest.warns(fxmask.FxMaskWarning, match="linear_[12] stays dense: its weight is a constant, not a parameter"):
        gm = fxmask.apply(torch.export.export(model, (x,)).module(), ratio=0.75)
    assert sorted(fxmask.masks(gm)) == ["fc.weight"]
    assert torch.equal(gm(x), fxmask.apply(model, ratio=0.75)(x))


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.re, self.im = nn.Parameter(torch.randn(32, 32)), nn.Parameter(torch.randn(32, 32))

    def forward(self, x):
        return F.linear(x.to(torch.complex64), torch.complex(self.re, self.im)).abs()


def test_a_complex_weight_that_a_graph_makes_is_refused_as_others_are():
    gm = torch.export.export(Complex(), (torch.randn(4, 32),)).module()
    with pytest.raises(UnsupportedError, match=r"cannot change 'linear': its weight is complex \(torch.complex64\), and masks are for real weights"):
        fxmask.apply(gm, ratio=0.75)


class Dequantised(OfTable):
    def forward(self, x):
        x = self.fc(x)
        return F.linear(x, (self.table.to(x.dtype) * 2).to(x.device))


def test_a_constant_that_a_trace_casts_to_an_inputs_dtype_stays_one():
    with pytest.warns(fxmask.FxMaskWarning, match="linear stays dense: its weight is a constant, not a parameter"):
        gm = fxmask.apply(fx.symbolic_trace(Dequantised()), ratio=0.75)
    assert sorted(fxmask.masks(gm)) == ["fc.weight"]


class Maker(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(32, 32))

    def forward(self):
        return self.w * 2


class OfModule(nn.Module):
    def __init__(self):
        super().__init__()
        self.maker = Maker()

    def forward(self, x):
        return F.linear(x, self.maker())


def test_a_weight_that_a_module_makes_of_no_input_is_no_constant():
    class Tracer(fx.Tracer):
        def is_leaf_module(self, m, name):
            return True

    model = OfModule()
    with pytest.raises(UnsupportedError, match="the graph computes its weight, and the trace does not say its shape"):
        fxmask.apply(fx.GraphModule(model, Tracer().trace(model)), ratio=0.75)


def test_hooks_and_parametrisations_survive_by_swapping_the_module():
    model = mlp()
    seen = []
    model[0].register_forward_hook(lambda m, a, y: seen.append(1))
    torch.nn.utils.parametrizations.weight_norm(model[2])
    gm, swapped = fxmask.apply(fx.symbolic_trace(copy.deepcopy(model)), ratio=0.7), fxmask.apply(model, ratio=0.7)
    x = torch.randn(2, 64)
    assert torch.equal(gm(x), swapped(x))
    assert seen == [1] * 2
    assert sorted(fxmask.masks(gm)) == sorted(fxmask.masks(swapped)) == ["0.weight", "2.weight"]
    fxmask.restore(gm)


def test_a_graph_module_inside_a_model():
    model = nn.Sequential(fx.symbolic_trace(Residual()), nn.Linear(32, 32))
    fxmask.apply(model, ratio=0.75)
    assert sorted(fxmask.masks(model)) == ["0.fc1.weight", "0.fc2.weight", "0.mix.weight", "0.proj", "1.weight"]
    assert {r["name"] for r in fxmask.explain(model).rows} == {"0.fc1", "0.fc2", "0.mix", "0.proj", "1"}
    fxmask.restore(model)


def test_load_state_dict_rewrites_cached_masks_of_a_graph():
    gm = fxmask.apply(fx.symbolic_trace(mlp()), ratio=0.7, refresh=0)
    new = fxmask.apply(mlp(seed=5), ratio=0.7)
    gm.load_state_dict(new.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(fxmask.masks(gm).values(), fxmask.masks(new).values(), strict=True))


def test_so_it_does_in_a_copy_of_one_that_holds_its_weights_itself():
    """Pickling loses hooks of a graph module; whatever looks at its masks brings them back."""
    gm = pickle.loads(pickle.dumps(fxmask.apply(fx.symbolic_trace(TwoUses()), include="w", ratio=0.5, block=(4, 4), refresh=0)))
    (before,) = fxmask.masks(gm).values()
    gm.load_state_dict({**gm.state_dict(), "w": torch.randn(32, 32)})
    (after,) = fxmask.masks(gm).values()
    assert not torch.equal(before, after)


@pytest.mark.parametrize("train", [True, False])
def test_frozen_randomness_is_said(train):
    class Functional(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(32, 32)

        def forward(self, x):
            return F.dropout(self.fc(x), 0.5, self.training)

    gm = fx.symbolic_trace(Functional().train(train))
    with pytest.warns(fxmask.FxMaskWarning, match=rf"no longer follows train\(\) and eval\(\) here: dropout \(as in {'train' if train else 'eval'}\)"):
        fxmask.apply(gm)
    exported = torch.export.export(nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.5)).train(train), (torch.randn(2, 32),)).module()
    if train:
        with pytest.warns(fxmask.FxMaskWarning, match=r"dropout \(as in train\)"):
            fxmask.apply(exported)


def test_a_dropout_module_keeps_its_mode_and_nothing_is_said():
    gm, model = fxmask.apply(fx.symbolic_trace(Residual(p=0.5)), exclude="proj", ratio=0.7), fxmask.apply(Residual(p=0.5), ratio=0.7)
    x = torch.randn(3, 32, 32)
    for train in (True, False):
        outputs = []
        for m in (gm.train(train), model.train(train)):
            torch.manual_seed(1)
            outputs.append(m(x))
        assert torch.equal(*outputs)
    assert torch.equal(gm(x), gm(x))


def test_forward_mode_over_a_graph_raises_instead_of_being_zero():
    gm = fxmask.apply(fx.symbolic_trace(mlp()), ratio=0.7)
    x = torch.randn(2, 64)
    with pytest.raises(UnsupportedError, match="would silently see a zero tangent"):
        torch.func.jvp(gm, (x,), (x,))
    y, tangent = torch.func.jvp(fxmask.apply(mlp(), ratio=0.7), (x,), (x,))
    assert torch.equal(y, gm(x)) and tangent.abs().sum() > 0


def test_a_computed_weight_needs_refresh_1():
    x = torch.randn(2, 32)
    gm = torch.export.export(Computed(), (x,)).module()
    with pytest.raises(UnsupportedError, match=re.escape("a cached mask (refresh=0) needs the parameter, and this graph computes the weight")):
        fxmask.apply(gm, refresh=0)
    fxmask.apply(gm, ratio=0.75)
    assert len(gm.graph.find_nodes(op="call_function", target=MASKED_LINEAR)) == 1
    y = gm(x)
    y.sum().backward()
    assert gm.v.grad.abs().sum() > 0
    assert fxmask.masks(gm) == {}  # it has a mask only while the graph runs
    assert [(r["masked"], r["achieved_ratio"]) for r in fxmask.explain(gm).rows] == [(True, None)]
    with pytest.raises(UnsupportedError, match="the trace does not say its shape"):
        fxmask.apply(fx.symbolic_trace(Computed()))


def test_a_pass_of_ones_own():
    class ReluToGelu(Pass):
        def run(self, gm):
            names = []
            for node in gm.graph.find_nodes(op="call_function", target=F.relu):
                node.target, node.kwargs = F.gelu, {}
                names.append(node.name)
            return names

    gm = fx.symbolic_trace(lambda x: F.relu(x + 1))
    (result,) = run_passes(gm, [ReluToGelu()])
    assert result.modified and result.rewritten == ["relu"]
    x = torch.randn(5)
    assert torch.equal(gm(x), F.gelu(x + 1))
    assert not run_passes(gm, [ReluToGelu()])[0].modified


def test_a_computed_weight_is_excluded_by_the_name_that_explain_gives_it():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 32, 48))

        def forward(self, x):
            return sum(F.linear(x, self.weight[i]) for i in range(3))

    class Mixture(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = Experts()

        def forward(self, x):
            return self.experts(x)

    def graph():
        torch.manual_seed(0)
        return torch.export.export(Mixture(), (torch.randn(4, 48),)).module()

    names = [str(r["name"]) for r in fxmask.explain(fxmask.apply(graph(), ratio=0.5, block=(16, 16))).rows]
    assert len(set(names)) == 3
    gm = fxmask.apply(graph(), ratio=0.5, block=(16, 16), exclude=names[1])
    assert [r["masked"] for r in sorted(fxmask.explain(gm).rows, key=lambda r: not r["masked"])] == [True, True, False]
    assert names[1] not in {r["name"] for r in fxmask.explain(gm).rows if r["masked"]}
    gm = fxmask.apply(graph(), ratio=0.5, block=(16, 16), overrides={names[0]: {"ratio": 0.8}})
    assert {r["name"] for r in fxmask.explain(gm).rows if r["target_ratio"] == 0.8} == {names[0]}


def test_hooks_of_loads_do_not_pile_up():
    """Every question about masks makes sure of them, as pickling loses some."""
    gm = fxmask.apply(fx.symbolic_trace(Residual()), ratio=0.75, refresh=2)
    counts = [len(m._load_state_dict_post_hooks) for m in gm.modules()]
    assert sum(counts) == 4  # three layers, and the root for a parameter of its own
    for _ in range(2):
        fxmask.masks(gm)
    assert [len(m._load_state_dict_post_hooks) for m in gm.modules()] == counts
