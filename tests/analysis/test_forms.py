"""`fxmask.analyze` takes models and inputs in every form: modules, graphs, exports, meta tensors, nested inputs."""

import pytest
import torch
from analysis.counted import SMALL, analyze, kept_of, on_meta
from analysis.unchanged import Net, assert_same, state_of, unchanged
from torch import fx, nn

import fxmask


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(16, 24), nn.Linear(8, 24)

    def forward(self, x, y, *, scale=1.0, extra=None):
        z = self.a(x) * scale + self.b(y)
        return {"z": z, "more": (z + extra["t"],)} if extra is not None else z


def test_forms_of_inputs():
    model, x, y, t = Pair(), torch.randn(3, 16), torch.randn(3, 8), torch.randn(24)
    expected = 2 * 3 * 24 * (16 + 8)
    forms = [
        ((x, y), {}), ([x, y], {}), ({"x": x, "y": y}, {}), ((x,), {"kwargs": {"y": y}}), ({"x": x}, {"kwargs": {"y": y}}),
        ((x, y), {"kwargs": {"scale": 2.0, "extra": {"t": t}}}), ((), {"kwargs": {"x": x, "y": y}}),
        ((x.to("meta"), y.to("meta")), {}), ((x, y.to("meta")), {}),
    ]  # fmt: skip
    for inputs, options in forms:
        report = fxmask.analyze(model, inputs, device="h100-sxm", **options)
        assert report.summary["flop"]["fwd"] == expected, inputs
        assert report.meta["inputs"][:2] == ["3x16:float32", "3x8:float32"]
    assert fxmask.analyze(nn.Linear(16, 4), x, device="h100-sxm").summary["flop"]["fwd"] == 2 * 3 * 64
    assert x.grad is None and not x.requires_grad


def test_meta_models():
    make, x = SMALL["gpt"]
    real = analyze(make(), x)
    for model, tokens in ((on_meta(make), x), (on_meta(make), x.to("meta")), (make(), x.to("meta"))):
        unchanged(model, lambda model=model, tokens=tokens: analyze(model, tokens))
        assert analyze(model, tokens).tables["nodes"] == real.tables["nodes"]


def test_meta_constants():
    """Made under torch.device("meta"), a plain tensor attribute has no values either."""

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.scale, self.index = nn.Linear(8, 8), torch.ones(8), torch.arange(4)

        def forward(self, x):
            return self.fc(x[self.index]) * self.scale

    model, x = on_meta(M), torch.randn(5, 8)
    unchanged(model, lambda: analyze(model, x))
    assert analyze(model, x).summary["flop"]["fwd"] == 2 * 4 * 64


def test_buffers_make_constants():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 8)
            self.register_buffer("mean", torch.zeros(8))
            self.register_buffer("scratch", torch.zeros(8), persistent=False)

        def forward(self, x):
            return self.fc((x - self.mean) / (self.scratch.exp() + 1))

    report = analyze(M(), torch.randn(5, 8))
    assert report.tables["footprint"][-1]["buffers"] == 2 * 32
    assert report.tables["footprint"][-1]["saved_activations"] == 4 * 40  # fc's input alone


@pytest.fixture(params=["symbolic", "exported", "unlifted", "dynamo", "dynamo, a bound method", "compiled", "compiled in place", "data parallel"])
def form(request):
    """A model as others give it: (of the model, what analyze says of it)."""

    def run(model, x, **options):
        if request.param == "symbolic":
            return analyze(fx.symbolic_trace(model), x, **options)
        if request.param == "exported":
            return analyze(torch.export.export(model, (x,)), x, **options)
        if request.param == "unlifted":
            return analyze(torch.export.export(model, (x,)).module(), x, **options)
        if request.param == "compiled":
            return analyze(torch.compile(model), x, **options)
        if request.param == "compiled in place":
            model.compile()
            return analyze(model, x, **options)
        if request.param == "data parallel":
            return analyze(nn.DataParallel(model), x, **options)
        found = []

        def backend(gm, inputs):
            found.append((fxmask.analyze(gm, inputs, device="h100-sxm", **options), [n.name for n in gm.graph.nodes]))
            return gm.forward

        torch._dynamo.reset()
        bound = "bound" in request.param  # as a container's own compile() is from PyTorch 2.14 on
        torch.compile(torch._dynamo.external_utils.wrap_inline(model._call_impl) if bound else model, backend=backend)(x)
        assert len(found) == 1
        return found[0][0]

    run.kind = request.param
    return run


def of_modules(report):
    return {r["module"]: tuple(r[c] for c in ("params", "params_kept", "flop", "flop_dense", "bytes_min")) for r in report.tables["modules"]}


def test_models_in_every_form(form):
    model, x = Net(), torch.randn(6, 70)
    plain = analyze(model, x)
    before = state_of(model)
    report = form(model, x)
    after = state_of(model)
    assert_same(({}, *before[1:]), ({}, *after[1:]))
    assert before[0] == after[0] or form.kind.startswith(("dynamo", "compiled"))  # the compiler's own attributes
    for quantity in ("params", "flop", "flop_executed", "bytes_min", "bytes_req", "mac", "weights_loaded"):
        assert report.summary[quantity] == plain.summary[quantity], quantity
    assert [r["total"] for r in report.tables["footprint"] if r["module"] == "(total)"] == [plain.tables["footprint"][-1]["total"]]
    ours, theirs = of_modules(plain), of_modules(report)
    assert list(theirs) == list(ours) == ["(model)", "fc1", "fc2", "body", "body.0", "body.1"] or form.kind == "symbolic"
    assert {n: v for n, v in ours.items() if v[0]} == {n: v for n, v in theirs.items() if v[0]}


def test_masked_models_in_every_form(form):
    torch.manual_seed(0)
    model, x = fxmask.apply(Net(), ratio=0.5, block=(16, 16)), torch.randn(6, 70)
    if form.kind == "symbolic":
        with pytest.raises(fxmask.FxMaskError, match="symbolic_trace of a masked model"):
            form(model, x)
        return
    plain, report = analyze(model, x), form(model, x)
    assert plain.summary["flop"]["fwd"] < plain.summary["flop_dense"]["fwd"]
    for quantity in ("flop", "flop_dense", "params_kept", "weights_loaded"):
        assert report.summary[quantity] == plain.summary[quantity], quantity
    assert report.summary["flop"]["fwd"] == 2 * 6 * sum(k for k, _ in kept_of(model, (16, 16)).values())


@pytest.mark.parametrize("trace", ["symbolic", "exported"])
@pytest.mark.parametrize("options", [{}, {"refresh": 3}], ids=["built", "cached"])
def test_masked_graphs(trace, options):
    """fxmask.apply on a graph: the kept count, and the nodes' own names."""
    torch.manual_seed(0)
    model, x = Net(), torch.randn(6, 70)
    gm = fx.symbolic_trace(model) if trace == "symbolic" else torch.export.export(model, (x,)).module()
    gm = fxmask.apply(gm, ratio=0.5, block=(16, 32), **options)
    if options:
        fxmask.step(gm, 0)
    code = gm.code
    unchanged(gm, lambda: analyze(gm, x))
    assert gm.code == code
    report = analyze(gm, x)
    kept = kept_of(gm, (16, 32))
    assert len(kept) == 3 and report.summary["flop"]["fwd"] == 2 * 6 * sum(k for k, _ in kept.values()) < report.summary["flop_dense"]["fwd"]
    nodes = {n.name for n in gm.graph.nodes}
    named = {r["node"] for r in report.tables["nodes"] if r["phase"] in ("fwd", "dX", "dW")}
    assert named and named <= nodes
    assert report.tables["footprint"][-1]["metadata"] == (sum(m.numel() for m in fxmask.masks(gm).values()) if options else 0)
    products = {r["node"] for r in report.tables["nodes"] if r["op"] == "fxmask.masked_linear"}
    assert products == {n.name for n in gm.graph.nodes if n.target is torch.ops.fxmask.masked_linear.default or n.target is torch.ops.fxmask.masked_linear}


class Reader(nn.Module):
    """Multiplies by W∘M, which a trace computes."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(64, 48)

    def forward(self, x):
        return x @ self.fc.weight.T


@pytest.mark.parametrize("block", [(16, 32), (32, 128)], ids=["fits", "wider than the weight"])
@pytest.mark.parametrize("refresh", [1, 3])
def test_traces_of_masked_models_that_multiply_by_masked_weights(refresh, block):
    torch.manual_seed(0)
    model, x = fxmask.apply(Reader(), ratio=0.5, block=block, refresh=refresh), torch.randn(6, 64, requires_grad=True)
    fxmask.step(model, 0)
    gm = torch.export.export(model, (x,)).module()
    unchanged(gm, lambda: analyze(gm, x))
    flop, expected = analyze(gm, x).summary["flop"], analyze(model, x).summary["flop"]
    ((kept, size),) = kept_of(model, block).values()
    assert flop["fwd"] == expected["fwd"] == flop["bwd_dx"] == expected["bwd_dx"] == 2 * 6 * kept < 2 * 6 * size


TRACED = {
    "a weight of two": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(64, 48)), torch.randn(6, 64), {"ratio": 0.5}),
    "a convolution": (lambda: nn.Conv2d(32, 32, 3), torch.randn(2, 32, 8, 8), {"ratio": 0.5, "layers": nn.Conv2d}),
    "N:M": (lambda: nn.Linear(64, 48), torch.randn(6, 64), None),
}


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("kind", TRACED)
def test_traces_of_masked_layers_cost_what_the_layers_do(kind, cached):
    make, x, options = TRACED[kind]
    if options is None:
        model = fxmask.apply(nn.Sequential(make()), fxmask.NMMask(mode="permuted" if cached else "sr-ste"))
    else:
        model = fxmask.apply(nn.Sequential(make()), **options, refresh=3 if cached else 1)
        fxmask.step(model, 0)
    gm = torch.export.export(model, (x,)).module()
    flop, expected = analyze(gm, x).summary["flop"], analyze(model, x).summary["flop"]
    assert flop == expected


HELD = {
    "cached": (lambda: nn.Sequential(nn.Linear(64, 48), nn.Linear(48, 64)), torch.randn(6, 64), {"refresh": 10}),
    "convolutions": (lambda: nn.Sequential(nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 1)), torch.randn(2, 32, 8, 8), {"layers": nn.Conv2d}),
    "a graph": (lambda: fx.symbolic_trace(nn.Sequential(nn.Linear(64, 48), nn.Linear(48, 64))), torch.randn(6, 64), {"refresh": 10}),
    "read by its owner": (lambda: nn.TransformerEncoderLayer(64, 4, 96, dropout=0.0, batch_first=True), torch.randn(2, 5, 64), {}),
}


def held(make, options, whole):
    torch.manual_seed(0)
    model = nn.Sequential(make(), nn.Identity())
    fxmask.apply(model if whole else model[0], ratio=0.5, **options)
    fxmask.step(model, 0)
    return model


@pytest.mark.parametrize("kind", HELD)
def test_masks_are_those_of_the_model_that_is_analysed(kind):
    """Whatever `apply` was given: the model, the one that holds it now, or the one that it is taken from."""
    make, x, options = HELD[kind]
    alone, around, inside = held(make, options, False)[0], held(make, options, False), held(make, options, True)[0]
    for step in (False, True):
        plain = analyze(alone, x, masked_step=step)
        assert plain.summary["params_kept"] < plain.summary["params"]
        for other in (around, inside):
            report = analyze(other, x, masked_step=step)
            assert report.summary == plain.summary and len(report.notes) == len(plain.notes)
            assert report.tables["footprint"][-1] == plain.tables["footprint"][-1]
            assert not step or set(fxmask.masks(other)) == {r["node"] for r in report.tables["nodes"] if r["impl"] == "masked_step"}


def test_masks_of_two_parts():
    """Both were masked by themselves, so that their weights have the same names in them."""
    make, x, options = HELD["cached"]
    both = nn.Sequential(held(make, options, False)[0], held(make, options, False)[0])
    one, report = analyze(both[0], x, masked_step=True), analyze(both, x, masked_step=True)
    assert report.summary["optimizer_bytes"] == {k: 2 * v for k, v in one.summary["optimizer_bytes"].items()}
    assert report.tables["footprint"][-1]["metadata"] == 2 * one.tables["footprint"][-1]["metadata"] > 0


class Lifted(nn.Module):
    """A mask as a graph of Dynamo has it: the number of kept blocks is an input."""

    def __init__(self):
        super().__init__()
        self.weight, self.count = nn.Parameter(torch.randn(64, 64)), torch.tensor(0)

    def forward(self, x, keep):
        mask = torch.ops.fxmask.block_index(self.weight, keep, self.count, 16, 16, "fro", "lowest", 0)
        return torch.ops.fxmask.masked_linear(x, self.weight, None, mask, 16, 16, "masked")


@pytest.mark.parametrize("form", [lambda m, *inputs: m, lambda m, *inputs: torch.export.export(m, inputs).module()], ids=["module", "trace"])
def test_a_number_of_kept_blocks_without_a_value(form):
    """Then nothing says how many; the weight that has values does not help."""
    x = torch.randn(6, 64)
    model = form(Lifted(), x, torch.tensor(4))
    known = analyze(model, x, torch.tensor(4))
    assert known.summary["flop"]["fwd"] == 2 * 6 * 4 * 256 and "number of their kept blocks" not in str(known.notes)
    report = analyze(model, x, torch.tensor(4, device="meta"))
    assert report.summary["flop"]["fwd"] == report.summary["flop_dense"]["fwd"] == 2 * 6 * 64 * 64
    assert "1 masked weights come without the number of their kept blocks" in str(report.notes) and "drawn at random" not in str(report.notes)


@pytest.mark.parametrize("trace", [fx.symbolic_trace, lambda m: torch.export.export(m, (torch.randn(6, 70),))], ids=["symbolic", "exported"])
def test_modules_of_a_graph_are_told_as_those_that_were_traced(trace):
    """Not as what holds their parameters in the graph, which is a bare Module; one that the graph calls is what it is."""
    gm = trace(Net())
    types = {r["module"]: r["type"] for r in analyze(gm, torch.randn(6, 70)).tables["modules"]}
    assert types.pop("(model)") == ("GraphModule" if isinstance(gm, torch.export.ExportedProgram) else "Net")
    assert types == {"fc1": "Linear", "fc2": "Linear", "body": "Sequential", "body.0": "Linear", "body.1": "ReLU"}
    graph = fx.symbolic_trace(Net())
    graph.fc1 = fxmask.apply(nn.Sequential(graph.fc1), ratio=0.5)[0]
    assert {r["module"]: r["type"] for r in analyze(graph, torch.randn(6, 70)).tables["modules"]}["fc1"] == type(graph.fc1).__name__ != "Linear"


def test_names_of_nodes():
    model, x = Net(), torch.randn(6, 70)
    gm = torch.export.export(model, (x,)).module()
    rows = analyze(gm, x).tables["nodes"]
    assert {r["node"] for r in rows if r["flop"]} == {n.name for n in gm.graph.nodes if n.target is torch.ops.aten.linear.default}
    assert {r["module"] for r in rows if r["flop"]} == {"fc1", "fc2", "body.0"}
    called = analyze(fx.symbolic_trace(model), x).tables["nodes"]
    assert {(r["node"], r["module"]) for r in called if r["flop"]} == {("fc1", "fc1"), ("fc2", "fc2"), ("body_0", "body.0")}
    plain = analyze(model, x).tables["nodes"]
    assert {r["node"] for r in plain if r["flop"]} == {"fc1:addmm", "fc2:addmm", "body.0:addmm"}
    assert "fc2:addmm" in {r["node"] for r in plain if r["phase"] == "dW"}


def test_under_autocast():
    model, x = Net(), torch.randn(6, 70)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        report = analyze(model, x)
    assert {r["dtype_in"] for r in report.tables["nodes"] if r["m"]} == {"bfloat16"}
    assert report.summary["flop"] == analyze(model, x).summary["flop"]


def test_progress_is_told_after_every_op():
    told = []
    report = analyze(nn.Linear(16, 4), torch.randn(3, 16), progress=told.append)
    assert told == list(range(1, len(told) + 1)) and len(told) >= len([r for r in report.tables["nodes"] if r["phase"] != "opt"]) > 2
