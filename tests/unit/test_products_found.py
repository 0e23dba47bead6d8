"""Which products with parameters `ActivationPruning(affine=True)` finds: in modules, inside forwards, in traces; what stays dense is named. Wrong use."""

import copy
import functools

import pytest
import torch
from resmlp import PRESETS, Affine, ResMLP
from torch import nn

import fxmask
from fxmask import ActivationPruning, WeightMask
from fxmask.kernels import scale_ops
from fxmask.passes.finding.plain_forward import Product, product_of
from fxmask.passes.finding.products import ADDCMUL, MUL, MUL_, find_products
from fxmask.pruning import pruned_layers

CONFIG = ActivationPruning(0.5, 16, affine=True)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.g = nn.Parameter(torch.full((64,), 0.5))
        self.register_buffer("fixed", torch.ones(64))

    def forward(self, x):
        return x * self.g


class Twice(Scaled):
    def forward(self, x):
        return x * self.g * self.fixed


class ByView(Scaled):
    def forward(self, x):
        g = self.g.view(1, -1)
        return torch.mul(g.exp(), x) + self.add(x)

    def add(self, x):
        return self.g.reshape(1, 64).mul(x)


class ByPart(Scaled):
    def forward(self, x):
        return x * self.g[None] + x * self.g.data.T[0]


class ByBuffer(Scaled):
    def forward(self, x):
        return x * self.fixed


class Wrong(Scaled):
    def forward(self, x):
        return self.fixed * self.g + x


class InPlace(Scaled):
    def forward(self, x):
        h = x + 1
        h *= self.g
        return h


class Written(Scaled):
    """What is read afterwards is what the product was written into."""

    def forward(self, x):
        h = x + 1
        h.mul_(self.g)
        return h


class Larger(Scaled):
    def forward(self, x):
        return x.sum(-1, keepdim=True) * self.g


class Added(Scaled):
    def forward(self, x):
        return torch.addcmul(self.g, x, x) + self.g.addcmul(x, x)


class Residual(Scaled):
    def forward(self, x):
        return torch.addcmul(x, self.g, x.sin())


class ByName(Scaled):
    def forward(self, x):
        h = torch.mul(input=x, other=self.g) + torch.mul(other=x, input=self.g).mul(other=self.g)
        return torch.addcmul(x, tensor2=h, tensor1=self.g) + torch.addcmul(input=self.g, tensor1=x, tensor2=self.g, value=1)


def test_what_a_forward_says():
    assert product_of(Affine) == Product(a="alpha", b="beta", fused=True) and product_of(Scaled) == Product(a="g")
    assert [product_of(c) for c in (Twice, ByView, Wrong, InPlace, nn.LayerNorm, nn.Linear, ResMLP)] == [None] * 7
    classes = (Scaled, Twice, ByView, ByPart, ByBuffer, Wrong, InPlace, Added, Residual)
    shown = {c: [(p.name, bool(p.skip)) for p in find_products(c())] for c in classes}
    inside = [("g", True)]
    inside_of = dict.fromkeys((Twice, ByView, ByPart, Wrong, InPlace, Residual), inside)
    assert shown == {Scaled: [("g", False)], ByBuffer: [], Added: [], **inside_of}
    replaced = Scaled()
    replaced.forward = lambda x: x
    assert "replaced on the instance" in find_products(replaced)[0].skip
    made = Scaled()
    nn.utils.parametrize.register_parametrization(made, "g", nn.Tanh())
    assert [(p.name, p.skip) for p in find_products(made)] == [("g", "a parametrisation makes it from another parameter")]
    model = fxmask.apply(nn.Sequential(Scaled(), nn.Linear(64, 64)), CONFIG)
    assert [p.name for p in find_products(model)] == ["0.g"]  # what is pruned is still one


def test_what_is_around_a_product_computes_too():
    class Halved(Scaled):
        @functools.wraps(Scaled.forward)
        def forward(self, x, inner=Scaled.forward):
            return inner(self, x) / 2

    model, x = nn.Sequential(Halved(), Scaled()), torch.randn(2, 16, 64)
    want = model(x)
    with pytest.warns(fxmask.FxMaskWarning, match=r"dense: 0\.g: it stands inside a forward that does more"):
        fxmask.apply(model, CONFIG)
    assert product_of(Halved) is None and torch.equal(model(x), want)


def test_products_inside_a_forward_are_named_and_stay_dense():
    model = ResMLP(PRESETS["digits"])
    named = r"(?s)leaves products .* dense: blocks.0.gain1, blocks.0.gain2, blocks.1.gain1, blocks.1.gain2: it stands inside.*symbolic_trace"
    with pytest.warns(fxmask.FxMaskWarning, match=named):
        fxmask.apply(model, CONFIG)
    rows = {r["name"]: r for r in fxmask.explain(model).rows}
    assert rows["blocks.0.gain1"]["activations"] is None and "stands inside a forward" in rows["blocks.0.gain1"]["reason"]
    assert rows["norm.alpha"]["activations"] == rows["blocks.1.norm2.alpha"]["activations"] == "50 % of 1x16"


@pytest.mark.parametrize("form", ["fx", "export"])
def test_a_trace_has_all_of_them(form):
    torch.manual_seed(0)
    dense, x = ResMLP(PRESETS["digits"]).double(), torch.randn(3, 1, 8, 8, dtype=torch.float64)
    given = copy.deepcopy(dense)
    gm = torch.fx.symbolic_trace(given) if form == "fx" else torch.export.export(given, (x,)).module()
    before = [(n.op, str(n.target)) for n in gm.graph.nodes if n.op != "get_attr"]
    fxmask.apply(gm, ActivationPruning(0.5, 16, affine=True), exclude=["embed", "*patch_mix"])  # token mixing has another layout, and mean() another order
    pruned = [r["name"] for r in fxmask.explain(gm).rows if r["activations"]]
    products = [f"blocks.{i}.{n}" for i in range(2) for n in ("norm1.alpha", "gain1", "norm2.alpha", "gain2")]
    assert set(pruned) == {*products, "norm.alpha", *(f"blocks.{i}.{n}" for i in range(2) for n in ("fc1", "fc2"))}
    assert torch.equal(gm(x), dense(x))
    for m in (gm, dense):
        m(x).square().sum().backward()
    want = dict(dense.named_parameters())
    exact = {n for n, p in gm.named_parameters() if torch.equal(p.grad, want[n].grad)}
    assert exact == {n for n in want if n.endswith((".bias", ".beta", "patch_mix.weight")) or n.split(".")[0] in ("embed", "head")}
    fxmask.restore(gm)
    assert [(n.op, str(n.target)) for n in gm.graph.nodes if n.op != "get_attr"] == before and torch.equal(gm(x), dense(x))


@pytest.mark.parametrize("kind", [Scaled, Twice, ByView, Wrong, InPlace, Written, Residual, ByName])
def test_products_of_every_spelling_in_a_trace(kind):
    torch.manual_seed(0)
    dense, x = kind().double(), torch.randn(3, 10, 64, dtype=torch.float64, requires_grad=True)
    gm = torch.fx.symbolic_trace(dense)
    if kind is Wrong:  # a parameter by a buffer is no activation's product
        with pytest.warns(fxmask.FxMaskWarning, match="changed nothing: it has no linear"):
            fxmask.apply(gm, CONFIG)
        return
    fxmask.apply(gm, CONFIG)
    assert [r["activations"] for r in fxmask.explain(gm).rows] == ["50 % of 1x16"] and torch.equal(gm(x), dense(x))
    compiled = torch.compile(gm, backend="aot_eager", fullgraph=True)
    got, want, again = (torch.autograd.grad(f(x).square().sum(), (x, m.g)) for f, m in ((gm, gm), (dense, dense), (compiled, gm)))
    assert torch.equal(got[0], want[0]) and not torch.equal(got[1], want[1])
    torch.testing.assert_close(again, got)


@pytest.mark.parametrize("kind", [Scaled, Twice, ByView, InPlace, Written, Residual, ByName])
def test_a_trace_is_given_back_as_it_was(kind):
    """Names of nodes and spelling of calls included."""
    gm = torch.fx.symbolic_trace(kind())
    before = str(gm.graph)
    calls = sum(n.target in (*MUL, *MUL_, *ADDCMUL) for n in gm.graph.nodes)
    assert str(fxmask.apply(gm, CONFIG).graph).count("fxmask_scaled.") == calls - (kind is Twice)  # one is by a buffer
    assert str(fxmask.restore(gm).graph) == before


def test_two_traces_in_one_model():
    model = nn.Sequential(torch.fx.symbolic_trace(Scaled()), torch.fx.symbolic_trace(Residual()))
    fxmask.apply(model, CONFIG)
    assert [str(gm.graph).count("fxmask_scaled.") for gm in model] == [1, 1]
    for m, names in ((model, ["0.g", "1.g"]), (model[1], ["g"]), (nn.Sequential(nn.Identity(), model), ["1.0.g", "1.1.g"])):
        assert [(c.name, c.weight) for c in find_products(m)] == [(name, m.get_parameter(name)) for name in names]
        assert [name for name, _ in pruned_layers(m)] == names
    for m, names in ((nn.Sequential(nn.Identity(), model), ("1.0.g", "1.1.g")), (model[1], ("g",))):  # a part of what was given, too
        rows = {(r["name"], r["reason"], r["activations"]) for r in fxmask.explain(m).rows}
        assert rows == {(name, "dense; its input is saved pruned", "50 % of 1x16") for name in names}


@pytest.mark.parametrize("call", [lambda x, g: torch.mul(x, g, out=x), lambda x, g: torch.addcmul(x, x, g, value=2), lambda x, g: torch.mul(x, other=2.0) + g])
def test_calls_that_are_no_such_products(call):
    class Other(Scaled):
        def forward(self, x):
            return call(x, self.g)

    gm = torch.fx.symbolic_trace(Other())
    assert not find_products(gm)


def test_a_result_that_is_larger_stays_dense():
    x = torch.randn(3, 10, 64)
    traced = torch.export.export(nn.Sequential(nn.Linear(64, 64), Larger(), nn.Linear(64, 64), Scaled()), (x,)).module()
    with pytest.warns(fxmask.FxMaskWarning, match=r"its result \(3, 10, 64\) is larger than what it multiplies, \(3, 10, 1\)"):
        fxmask.apply(traced, CONFIG)
    gm = fxmask.apply(torch.fx.symbolic_trace(Larger()), CONFIG)  # no shapes are known
    with pytest.warns(fxmask.FxMaskWarning, match=r"stays dense: expected a floating input of its result's shape, got torch.float32 \(3, 10, 1\)"):
        assert torch.equal(gm(x), Larger()(x))


def test_a_block_wider_than_the_tensor_is_a_row():
    layer, x = fxmask.apply(Scaled(), ActivationPruning(0.5, 1024, affine=True)), torch.randn(2, 10, 64)
    held = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: held.append(t) or t, lambda t: t):
        layer(x).sum().backward()
    assert {tuple(t.shape) for t in held} == {(2, 5, 64), (2, 5)}
    rows = x.norm(dim=-1) >= x.norm(dim=-1).median(dim=-1, keepdim=True).values
    assert rows.sum() >= 10 and torch.allclose(layer.g.grad, (x * (x.norm(dim=-1).argsort(dim=-1, descending=True).argsort(dim=-1) < 5)[..., None]).sum((0, 1)))


def test_what_drops_nothing_says_so():
    layer = fxmask.apply(Scaled(), ActivationPruning(0.5, 64, affine=True))
    with pytest.warns(fxmask.FxMaskWarning, match=r"drops nothing of an input \(8, 64\)"):
        layer(torch.randn(8, 64))


def test_a_second_derivative_through_da_raises():
    layer, x = fxmask.apply(Scaled(), CONFIG), torch.randn(4, 10, 64)
    (g,) = torch.autograd.grad(layer(x).square().sum(), layer.g, create_graph=True)
    with pytest.raises((fxmask.FxMaskError, RuntimeError), match=r"second derivative|does not require grad"):
        g.square().sum().backward()


def mlp() -> nn.Sequential:
    return nn.Sequential(Scaled(), nn.Linear(64, 64))


X = torch.randn(4, 10, 64)
WRONG = {
    "affine": (lambda: ActivationPruning(affine=1), "affine, .*: expected a bool, got 1"),
    "ratio": (lambda: ActivationPruning(1.0, affine=True), "finite number in"),
    "block": (lambda: ActivationPruning(0.5, 0, affine=True), "positive int"),
    "in overrides": (lambda: fxmask.apply(mlp(), ActivationPruning(), overrides={"*": {"affine": True}}), "affine says what is looked for"),
    "again": (lambda: fxmask.apply(fxmask.apply(mlp(), CONFIG), CONFIG), "both configs in one call"),
    "torch.func": (lambda: (m := fxmask.apply(Scaled(), CONFIG)) and torch.func.grad(lambda x: m(x).sum())(X), "function transform"),
    "tracing": (lambda: torch.fx.symbolic_trace(fxmask.apply(Scaled(), CONFIG)), "trace"),
    "masks in a trace": (lambda: fxmask.apply(torch.fx.symbolic_trace(mlp()), WeightMask(), CONFIG), "instead of its trace"),
    "shape": (lambda: scale_ops.pruned_scale(X[..., :1], torch.ones(64), None, 16, 5, False), r"x that has its result's shape, got .*\(4, 10, 1\)"),
    "kept": (lambda: scale_ops.pruned_scale(X, torch.ones(64), None, 16, 41, False), "kept blocks of a sample: expected 1 to 40, got 41"),
    "gy": (lambda: scale_ops.pruned_scale_da(X, torch.ones(4, 5, 16), torch.zeros(4, 5).short(), [4, 10, 32], False, [64]), "gy: expected the shape"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_use(case):
    call, words = WRONG[case]
    with pytest.raises(fxmask.FxMaskError, match=words):
        call()


def test_a_model_without_products_says_so():
    with pytest.warns(fxmask.FxMaskWarning, match="affine=True prunes no product: expected a selected product with a parameter, got 0"):
        fxmask.apply(nn.Sequential(nn.Linear(64, 64)), CONFIG)
    with pytest.warns(fxmask.FxMaskWarning, match="got 1, none of them selected"):
        fxmask.apply(mlp(), CONFIG, include="1")
