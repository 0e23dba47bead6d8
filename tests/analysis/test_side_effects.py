"""`fxmask.analyze` leaves everything as it was, whatever the model does and however it ends; and it takes models and inputs in every form."""

import copy
import random
from collections import OrderedDict

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from analysis.counted import SMALL, kept_of, on_meta
from torch import fx, nn

import fxmask
from fxmask.errors import UnsupportedError


def analyze(model, *inputs, **options):
    return fxmask.analyze(model, inputs, **{"device": "h100-sxm", **options})


WRITTEN = torch.zeros(2)  # of the program, not of the model


class Messy(nn.Module):
    """A forward that writes wherever it can: buffers, attributes, lists, dicts, its own parameters' places; and draws random numbers."""

    def __init__(self, fails=False):
        super().__init__()
        self.fc, self.norm, self.out = nn.Linear(16, 24), nn.BatchNorm1d(24), nn.Linear(24, 8)
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("absent", None)
        self.scale = torch.ones(24, requires_grad=True)  # no Parameter: its gradient is written to the tensor itself
        self.shift, self.calls, self.fails, self.last = torch.zeros(24), 0, fails, None
        self.cache, self.named, self.nested = [], {"first": 1}, ([torch.ones(2)], {"inner": [0]})
        self.ordered, self.held = OrderedDict(a=1, b=2), {"tensor": torch.ones(3)}

    def forward(self, x):
        self.calls += 1
        self.seen += 1
        self.absent = x.detach()
        x = self.norm(self.fc(x) * self.scale + self.shift)
        self.shift += 1
        self.held["tensor"].mul_(2)
        WRITTEN.add_(1)
        torch.add(WRITTEN, 1, out=WRITTEN)
        torch._foreach_add_([WRITTEN], 1)
        self.last, self.mask = x, torch.rand(24) < 0.5
        self.cache.append(x)
        self.named["first"], self.named["second"] = x, 2
        self.nested[0][0] = x
        self.nested[1]["inner"].append(x)
        self.ordered.move_to_end("a")
        self.training = not self.training
        self.register_parameter("late", nn.Parameter(torch.zeros(2)))
        self.register_buffer("later", torch.zeros(2))
        self.norm.extra = nn.Linear(2, 2)
        self.fc.register_forward_hook(lambda m, a, o: None)
        random.random(), np.random.rand()
        torch.manual_seed(7)
        if self.fails:
            raise RuntimeError("the model breaks")
        return self.out(F.dropout(x, 0.5))


def state_of(model):
    """Everything that could have changed, in a form that compares."""
    modules = {}
    for name, m in model.named_modules():
        plain = {k: id(v) for k, v in m.__dict__.items()}
        tables = {t: list(m.__dict__[t].items()) for t in m.__dict__ if isinstance(m.__dict__[t], dict)}
        modules[name] = (type(m), m.training, plain, {t: [(k, id(v)) for k, v in items] for t, items in tables.items()})
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    grads = {n: (id(p.grad), None if p.grad is None else p.grad.clone()) for n, p in model.named_parameters()}
    values = {n: (id(t), t._version, t.is_meta or t.clone(), t.requires_grad) for n, t in tensors.items()}
    return modules, values, grads, [(k, t if t.is_meta else t.clone()) for k, t in model.state_dict().items()]


def assert_same(a, b):
    assert a[0] == b[0]
    assert a[1].keys() == b[1].keys() and a[2].keys() == b[2].keys()
    for name in a[1]:
        (*x, values_x, rx), (*y, values_y, ry) = a[1][name], b[1][name]
        assert x == y and rx == ry, name
        assert values_x is True or torch.equal(values_x, values_y), name
    for name in a[2]:
        assert a[2][name][0] == b[2][name][0] and (a[2][name][1] is None or torch.equal(a[2][name][1], b[2][name][1])), name
    assert [k for k, _ in a[3]] == [k for k, _ in b[3]]
    assert all(x.is_meta or torch.equal(x, y) for (_, x), (_, y) in zip(a[3], b[3], strict=True))


def drawn():
    """NumPy's random state."""
    _, key, position, *_ = np.random.get_state()
    return key.tolist(), position


def unchanged(model, run):
    """Run something and look: the model, the random states, the modes, the switches of the backends."""
    before = state_of(model)
    states = random.getstate(), torch.get_rng_state(), drawn()
    modes = lambda: (  # noqa: E731
        torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype(), torch.get_num_threads(),
        torch.backends.mha.get_fastpath_enabled(), torch._C._get_mkldnn_enabled(), torch.backends.cudnn.enabled,
        torch.utils._python_dispatch._len_torch_dispatch_stack(), torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip
    found = modes()
    run()
    assert_same(before, state_of(model))
    assert random.getstate() == states[0] and torch.equal(torch.get_rng_state(), states[1]) and drawn() == states[2]
    assert modes() == found


@pytest.mark.parametrize("training", [True, False])
def test_a_model_that_writes_everywhere(training):
    model, x = Messy().train(training), torch.randn(4, 16)
    inner = {"scale": model.scale, "shift": model.shift, "cache": model.cache, "nested": model.nested}
    unchanged(model, lambda: analyze(model, x))
    assert model.scale.grad is None and torch.equal(model.scale, torch.ones(24))
    assert torch.equal(model.shift, torch.zeros(24)) and torch.equal(model.seen, torch.zeros(3))
    assert model.cache == [] and model.named == {"first": 1} and list(model.ordered) == ["a", "b"] and model.absent is None
    assert torch.equal(model.nested[0][0], torch.ones(2)) and model.nested[1] == {"inner": [0]}
    assert torch.equal(model.held["tensor"], torch.ones(3)) and torch.equal(WRITTEN, torch.zeros(2))
    assert all(getattr(model, k) is v for k, v in inner.items())
    assert not hasattr(model, "late") and not hasattr(model, "later") and not hasattr(model.norm, "extra") and not model.fc._forward_hooks
    assert model.norm.num_batches_tracked == 0 and model.calls == 0 and model.training is training
    model(x).sum().backward()  # and it still works
    WRITTEN.zero_()
    assert type(model.fc.weight.grad) is torch.Tensor and type(model.scale.grad) is torch.Tensor


def test_gradients_that_are_there_stay():
    model, x = SMALL["mixer"][0](), SMALL["mixer"][1]
    model(x).sum().backward()
    unchanged(model, lambda: analyze(model, x))


def test_a_model_that_breaks_in_the_middle():
    model, x = Messy(fails=True), torch.randn(4, 16)

    def run():
        with pytest.raises(UnsupportedError, match="RuntimeError: the model breaks"):
            analyze(model, x)

    unchanged(model, run)
    assert model.cache == [] and model.named == {"first": 1} and torch.equal(WRITTEN, torch.zeros(2))


def test_a_backward_that_breaks():
    class Breaks(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gy):
            raise RuntimeError("no gradient here")

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.log = nn.Linear(4, 4), nn.Linear(4, 4), []

        def forward(self, x):
            self.log.append(x)
            return self.b(Breaks.apply(self.a(x)))

    model, x = M(), torch.randn(2, 4)

    def run():
        with pytest.raises(UnsupportedError, match="no gradient here"):
            analyze(model, x)

    unchanged(model, run)
    assert model.log == []
    assert analyze(model, x, phases=("fwd",)).summary["flop"]["fwd"] == 2 * 2 * 2 * 16


def test_weights_held_in_other_places():
    """A list that the forward goes through instead of the attributes, as RNNs keep one; a tuple."""

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8, 8))
            self.table = [self.a, self.b]

        def forward(self, x):
            for w in self.table:
                x = F.linear(x, w)
            return x

    model, x = M(), torch.randn(3, 8)
    unchanged(model, lambda: analyze(model, x))
    report = analyze(model, x)
    assert all(p.grad is None for p in model.parameters())
    s = report.summary["flop"]
    assert (s["fwd"], s["bwd_dx"], s["bwd_dw"]) == (2 * 2 * 3 * 64, 2 * 3 * 64, 2 * 2 * 3 * 64)
    assert report.tables["footprint"][-1]["saved_activations"] == 4 * 3 * 8  # the weights are no activations


GUARDED = {
    "built": {},
    "cached": {"refresh": 2},
    "schedule": {"schedule": fxmask.Schedule("cubic", steps=10)},
    "rigl": {"backward": "rigl"},
    "random": {"criterion": "random"},
}


@pytest.mark.parametrize("options", GUARDED.values(), ids=GUARDED)
def test_masks_counters_and_guards(options):
    torch.manual_seed(0)
    model, x = fxmask.apply(Net(), ratio=0.5, block=(16, 16), **options), torch.randn(3, 70)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    guard = fxmask.guard(optimizer, model)
    for _ in range(3):
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()
    saved, masks, policies = copy.deepcopy(fxmask.state_dict(model)), fxmask.masks(model), guard.policies
    momenta = copy.deepcopy(optimizer.state_dict())

    def run():
        analyze(model, x)
        analyze(model, x, optimizer=optimizer)

    unchanged(model, run)
    after = fxmask.state_dict(model)
    for a, b in ((saved, after), (momenta, optimizer.state_dict())):
        leaves = zip(torch.utils._pytree.tree_leaves(a), torch.utils._pytree.tree_leaves(b), strict=True)
        assert all(torch.equal(v, w) if isinstance(v, torch.Tensor) else v == w for v, w in leaves)
    assert all(torch.equal(a, fxmask.masks(model)[n]) for n, a in masks.items()) and guard.policies == policies


@pytest.mark.parametrize("how", ["schedule", "refresh"])
def test_cached_masks_count_as_they_are_now(how):
    """With a schedule on its way, or a mask of some steps ago: the blocks that the next forward keeps, not the target's."""
    torch.manual_seed(0)
    options = {"schedule": fxmask.Schedule("linear", steps=10)} if how == "schedule" else {"refresh": 5}
    model = fxmask.apply(nn.Sequential(nn.Linear(70, 90), nn.Linear(90, 40)), ratio=0.8, block=(16, 16), **options)
    fxmask.step(model, 0)
    shares = []
    for _ in range(4):
        with torch.no_grad():
            for p in model.parameters():
                p.normal_()  # the cached mask is no longer the one of the weight
        kept = kept_of(model, (16, 16))
        report = analyze(model, torch.randn(5, 70))
        assert report.summary["flop"]["fwd"] == 2 * 5 * sum(k for k, _ in kept.values())
        assert report.summary["params_kept"] == 130 + sum(k for k, _ in kept.values())
        shares.append(report.summary["flop"]["fwd"])
        fxmask.step(model)
    assert (shares[0] > shares[1] > shares[3]) == (how == "schedule")
    assert (shares[0] == 2 * 5 * (70 * 90 + 90 * 40)) == (how == "schedule")


def test_hooks_run_and_stay():
    model, seen = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), []
    model[0].register_forward_hook(lambda m, a, o: seen.append(tuple(o.shape)))
    model.register_forward_pre_hook(lambda m, a: (a[0][:1],))  # it changes what runs, and that is what counts
    model[1].register_full_backward_hook(lambda m, gi, go: None)
    x = torch.randn(3, 4)
    unchanged(model, lambda: analyze(model, x))
    assert seen == [(1, 4)] and analyze(model, torch.randn(3, 4)).summary["flop"]["fwd"] == 2 * (16 + 8)


# ---- inputs and models in every form -----------------------------------------------------------------------------------------------------------------------


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


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(70, 96), nn.Linear(96, 40)
        self.body = nn.Sequential(nn.Linear(40, 40), nn.ReLU())

    def forward(self, x):
        return self.body(self.fc2(F.gelu(self.fc1(x))))


@pytest.fixture(params=["symbolic", "exported", "unlifted", "dynamo", "compiled", "compiled in place", "data parallel"])
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
        torch.compile(model, backend=backend)(x)
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
    assert before[0] == after[0] or form.kind in ("dynamo", "compiled", "compiled in place")  # the compiler's own attributes
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
    products = {r["node"] for r in report.tables["nodes"] if r["op"] == "fxmask.masked_linear"}
    assert products == {n.name for n in gm.graph.nodes if n.target is torch.ops.fxmask.masked_linear.default or n.target is torch.ops.fxmask.masked_linear}


def test_names_of_nodes():
    model, x = Net(), torch.randn(6, 70)
    gm = torch.export.export(model, (x,)).module()
    rows = analyze(gm, x).tables["nodes"]
    assert {r["node"] for r in rows if r["flop"]} == {n.name for n in gm.graph.nodes if n.target is torch.ops.aten.linear.default}
    assert {r["module"] for r in rows if r["flop"]} == {"fc1", "fc2", "body.0"}
    plain = analyze(model, x).tables["nodes"]
    assert {r["node"] for r in plain if r["flop"]} == {"fc1:addmm", "fc2:addmm", "body.0:addmm"}
    assert "fc2:addmm" in {r["node"] for r in plain if r["phase"] == "dW"}


def test_under_autocast():
    model, x = Net(), torch.randn(6, 70)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        report = analyze(model, x)
    assert {r["dtype_in"] for r in report.tables["nodes"] if r["m"]} == {"bfloat16"}
    assert report.summary["flop"] == analyze(model, x).summary["flop"]
