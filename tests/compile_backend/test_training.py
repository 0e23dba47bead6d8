"""torch.compile(backend="fxmask") trains as fxmask.apply does."""

import warnings

import fresh_process
import pytest
import torch
import torch.nn.functional as F
from compile_backend.helpers import OPTIONS, compiled, train
from resmlp import PRESETS, ResMLP
from sample_models import Attention, Residual, Twice, mlp
from torch import nn
from torch._dynamo.callback import callback_handler
from torch.utils.checkpoint import checkpoint

import fxmask


def resmlp():
    torch.manual_seed(0)
    return ResMLP(PRESETS["digits"])


class Checkpointed(nn.Module):
    """A body inside the graph."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inside, self.outside = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        return self.outside(checkpoint(lambda t: F.gelu(self.inside(t)), x, use_reentrant=False))


def encoder():
    torch.manual_seed(0)
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True), 2, enable_nested_tensor=False)


MODELS = {
    "mlp": (mlp, (8, 64)),
    "residual": (Residual, (8, 32, 32)),
    "resmlp": (resmlp, (8, 1, 8, 8)),
    "attention": (Attention, (4, 6, 32)),
    "encoder": (encoder, (4, 6, 32)),
    "checkpoint": (Checkpointed, (8, 32)),
    "tied": (Twice, (8, 32)),
}


SELDOM = pytest.mark.slow
PAIRS = [pytest.param(name, backward, marks=() if backward == "masked" or name == "residual" else SELDOM) for name in MODELS for backward in ("masked", "ste")]


@pytest.mark.parametrize(("name", "backward"), PAIRS)
def test_training_has_the_bits_of_apply(name, backward):
    make, shape = MODELS[name]
    options = dict(OPTIONS, backward=backward)
    ours, applied = make(), fxmask.apply(make(), **options)
    more = dict(exclude="proj") if name == "residual" else {}  # a functional linear, which no class swap reaches and this graph shows
    assert train(ours, compiled(ours, **options, **more), lambda: torch.randn(shape)) == train(applied, applied, lambda: torch.randn(shape))
    assert all(torch.equal(p, q) for p, q in zip(ours.parameters(), applied.parameters(), strict=True))
    dense = make()
    train(dense, dense, lambda: torch.randn(shape))
    assert not all(torch.equal(p, q) for p, q in zip(ours.parameters(), dense.parameters(), strict=True))


@pytest.mark.parametrize("options", [dict(criterion="random", seed=3), dict(backward="unmasked"), dict(criterion="l1", ties="keep"), dict(impl="cpu")], ids=str)
def test_every_option_of_the_mask_means_what_apply_means(options):
    options = dict(OPTIONS, **options)
    ours, applied = mlp(), fxmask.apply(mlp(), fxmask.WeightMask(**options))
    assert train(ours, compiled(ours, **options), lambda: torch.randn(8, 64)) == train(applied, applied, lambda: torch.randn(8, 64))


@pytest.mark.parametrize("block", [(24, 20), (64, 8)], ids=str)
@pytest.mark.parametrize("backward", ["masked", "ste"])
def test_ragged_and_wide_blocks_of_a_weight_that_is_an_argument(block, backward):
    options = dict(ratio=0.6, block=block, backward=backward)
    ours, applied = MODELS["attention"][0](), fxmask.apply(MODELS["attention"][0](), **options)
    assert train(ours, compiled(ours, **options), lambda: torch.randn(4, 6, 32)) == train(applied, applied, lambda: torch.randn(4, 6, 32))


@pytest.mark.parametrize(("options", "kept"), [({}, "11110000"), (dict(ties="keep"), "11111111"), (dict(cover=True), "10101001")], ids=str)
def test_blocks_that_are_alike(options, kept):
    """Which of them stay is what ties and cover say: of a weight that is 1 everywhere."""
    options = dict(ratio=0.5, block=(16, 16), **options)
    ours, applied = nn.Linear(32, 64, bias=False), nn.Linear(32, 64, bias=False)
    for fc in (ours, applied):
        nn.init.ones_(fc.weight)
    x = torch.rand(8, 32)
    found, expected = compiled(ours, **options)(x), fxmask.apply(applied, **options)(x)
    assert torch.equal(found, expected)
    assert "".join(str(int(b)) for b in fxmask.masks(applied)["weight"].flatten()) == kept


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_training_through_aot_and_inductor(inner):
    ours, applied = resmlp(), fxmask.apply(resmlp(), **OPTIONS)
    found = train(ours, compiled(ours, inner, **OPTIONS), lambda: torch.randn(8, 1, 8, 8))
    assert found == pytest.approx(train(applied, applied, lambda: torch.randn(8, 1, 8, 8)), rel=1e-5)
    for p, q in zip(ours.parameters(), applied.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


def test_evaluation_of_an_encoder_takes_its_fast_path_masked():
    ours, applied = encoder().eval(), fxmask.apply(encoder().eval(), **OPTIONS)
    x = torch.randn(4, 6, 32)
    with torch.no_grad():
        torch.testing.assert_close(compiled(ours, **OPTIONS)(x), applied(x), rtol=1e-5, atol=1e-6)


FRESH = {
    "mlp": """
make = lambda: torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.GELU(), torch.nn.Linear(96, 32))
inputs = lambda: torch.randn(8, 64)
""",
    "resmlp": """
from resmlp import PRESETS, ResMLP
make = lambda: ResMLP(PRESETS["digits"])
inputs = lambda: torch.randn(8, 1, 8, 8)
""",
}


CASES = [pytest.param(n, i, marks=() if (n, i) == ("mlp", "eager") else pytest.mark.slow) for n in FRESH for i in ("eager", "inductor")]


@pytest.mark.parametrize(("name", "inner"), CASES)
def test_a_process_that_never_imports_fxmask(name, inner):
    fresh_process.check(FRESH[name], inner)


class Watched:
    """A lock that says so where a thread would wait for itself."""

    def __init__(self, lock):
        self.lock = lock

    def __enter__(self):
        assert self.lock.acquire(timeout=60), "Dynamo compiles what it asks under its own lock"

    def __exit__(self, *exc):
        self.lock.release()


def whole_step(model, optimizer, x):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def test_a_whole_step_that_is_compiled(monkeypatch):
    """Its graph breaks at backward(), which is compiled inside: what looks at compilations is asked there, and is none to compile. That would hang."""
    name = "_CompilationCallbackHandler__pending_callbacks_counter_lock"
    monkeypatch.setattr(callback_handler, name, Watched(getattr(callback_handler, name)))
    ours, applied = mlp(), fxmask.apply(mlp(), **OPTIONS)
    run = compiled(whole_step, inner="aot_eager", **OPTIONS)
    for model, how in ((ours, run), (applied, whole_step)):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        torch.manual_seed(1)
        for _ in range(2):
            how(model, optimizer, torch.randn(4, 64))
    torch.testing.assert_close([*ours.parameters()], [*applied.parameters()])


class Looked(nn.Module):
    """A table, and what comes of it: the linears, one of them behind a break in a loop where `skips`, so that Dynamo gives no graph of it."""

    def __init__(self, skips):
        super().__init__()
        self.table, self.first, self.second, self.skips = nn.Embedding(8, 64), mlp(), nn.ModuleList([nn.Linear(64, 64)]), skips

    def forward(self, x):
        x = self.table((x[:, 0] > 0).long())
        return self.first(x).sum() + self.loop(x).sum()

    def loop(self, x):
        for layer in self.second:
            if self.skips:
                torch._dynamo.graph_break()
            x = layer(x)
        return x


@pytest.mark.parametrize("how", ["masked", "required", "applied"])
def test_the_optimisers_graphs_of_a_whole_step_have_nothing_to_mask(how):
    """Any warning is an error."""
    model = fxmask.apply(Looked(False), **OPTIONS) if how == "applied" else Looked(False)
    options = {} if how == "applied" else {**OPTIONS, "require": how == "required"}
    compiled(whole_step, **options)(model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), torch.randn(4, 64))


def test_the_optimisers_graph_of_a_whole_step_tells_of_weights_that_no_graph_has_met():
    model = Looked(True)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", fxmask.FxMaskWarning)
        compiled(whole_step, **OPTIONS)(model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), torch.randn(4, 64))
    last = whole_step.__code__.co_firstlineno + 4  # optimizer.step()
    assert any("masked nothing in a graph" in str(w.message) and (w.filename, w.lineno) == (__file__, last) for w in told)


def biases_alone(model):
    return [p for p in model.parameters() if p.dim() == 1]


@pytest.mark.parametrize("which", [biases_alone, lambda model: [*model.parameters()]], ids=["biases", "met in evaluation"])
def test_the_optimisers_graph_of_weights_that_no_graph_trains_is_required_to_have_masks(which):
    """Of biases alone it says nothing of weights, and a graph that was evaluated nothing of what trains."""
    model = mlp()
    with torch.no_grad():
        compiled(model, **OPTIONS)(torch.randn(4, 64))
    model(torch.randn(4, 64)).square().mean().backward()
    optimizer = torch.optim.SGD(which(model), 0.1, momentum=0.9)
    run = compiled(lambda: optimizer.step(), **OPTIONS, require=True)
    with pytest.raises(Exception, match="expected anything at all to be masked"):
        run()


class NamedGrad(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Module()
        self.inner.grad = nn.Parameter(torch.randn(2, 64, 64))

    def forward(self, x):
        return x @ self.inner.grad


def test_a_parameter_of_that_name_is_no_gradient():
    with pytest.warns(fxmask.FxMaskWarning, match="masked nothing in a graph"):
        compiled(NamedGrad(), **OPTIONS)(torch.randn(4, 64))
