"""torch.compile(backend="fxmask"): the same training as fxmask.apply, and no silence about what it cannot see."""

import copy
import os
import shutil
import subprocess
import sys
from pathlib import Path

import fresh_process
import pytest
import torch
import torch.nn.functional as F
from resmlp import PRESETS, ResMLP
from sample_models import Residual, mlp
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.testing import FileCheck
from torch.utils.checkpoint import checkpoint

import fxmask
from fxmask import backend, backend_watch
from fxmask.errors import ConfigError, FxMaskWarning, StateError, UnsupportedError

OPTIONS = dict(ratio=0.75, block=(8, 16))


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(model, inner="eager", **options):
    return torch.compile(model, backend=backend.fxmask_backend, options={**options, "inner": inner})


def train(model, call, make_x, steps=5, optimizer=torch.optim.AdamW):
    torch.manual_seed(1)
    optimizer, losses = optimizer(model.parameters(), 0.01), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = call(make_x()).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def graph_of(model, *args, **options):
    """The code of the rewritten graphs."""
    texts = []

    def keep(gm, inputs):
        texts.append(gm.print_readable(print_output=False))
        return gm.forward

    torch.compile(model, backend=backend.fxmask_backend, options={**options, "inner": keep})(*args)
    return texts


def resmlp():
    torch.manual_seed(0)
    return ResMLP(PRESETS["digits"])


class Attention(nn.Module):
    """Multi-head attention, whose out_proj is an argument of one call."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.attention, self.fc = nn.MultiheadAttention(32, 2, batch_first=True), nn.Linear(32, 48)

    def forward(self, x):
        return self.fc(self.attention(x, x, x, need_weights=False)[0])


class Checkpointed(nn.Module):
    """A body inside the graph."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inside, self.outside = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        return self.outside(checkpoint(lambda t: F.gelu(self.inside(t)), x, use_reentrant=False))


class Tied(nn.Module):
    """One weight, two calls."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(32, 32, bias=False)

    def forward(self, x):
        return self.fc(F.gelu(self.fc(x)))


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
    "tied": (Tied, (8, 32)),
}


@pytest.mark.parametrize("backward", ["masked", "ste"])
@pytest.mark.parametrize("name", MODELS)
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


def test_a_functional_linear_is_masked_too():
    (text,) = graph_of(Residual(), torch.randn(4, 32, 32), **OPTIONS)
    FileCheck().check_count("masked_linear.default", 4, exactly=True).run(text)
    FileCheck().check("block_index.default(l_self_parameters_proj_").run(text)


# ---- which layers --------------------------------------------------------------------------------------------------------------------------------------------


def test_layers_are_selected_by_name():
    (text,) = graph_of(mlp(), torch.randn(4, 64), **OPTIONS, include=["0", "2"], exclude="re:^2$")
    FileCheck().check_count("torch.ops.fxmask.masked_linear", 1, exactly=True).run(text)
    (text,) = graph_of(mlp(), torch.randn(4, 64), **OPTIONS, overrides={"2": dict(block=(4, 4))})
    FileCheck().check("block_index.default").check(", 8, 16,").check("block_index.default").check(", 4, 4,").run(text)


def test_a_weight_that_is_used_twice_has_one_mask():
    (text,) = graph_of(Tied(), torch.randn(4, 32), **OPTIONS)
    FileCheck().check_count("block_index.default", 1, exactly=True).run(text)
    FileCheck().check_count("masked_linear.default", 2, exactly=True).run(text)


class Products(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        for name in "abcdef":
            setattr(self, name, nn.Parameter(torch.randn(32, 32) / 6))
        self.bias = nn.Parameter(torch.randn(32))

    def forward(self, x):
        x = torch.addmm(self.bias, torch.mm(torch.matmul(x @ self.a.t(), self.b.T), self.c.transpose(0, 1)), self.d.permute(1, 0))
        return (x @ self.e) @ (x.t() @ x) @ self.f.mT


def test_products_with_transposed_parameters_are_linears_when_asked():
    x = torch.randn(4, 32)
    with pytest.warns(FxMaskWarning, match="masked nothing in a graph: it has no linear"):
        (text,) = graph_of(Products(), x, **OPTIONS)
    FileCheck().check_not("fxmask").run(text)
    (text,) = graph_of(Products(), x, **OPTIONS, match="matmul")
    FileCheck().check_count("masked_linear.default", 5, exactly=True).run(text)
    code = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    assert not [line for line in code if "permute" in line or "transpose" in line]  # nothing uses them any more
    model = Products()
    torch.testing.assert_close(compiled(model, ratio=0.0, match="matmul")(x), model(x))


class Norm(nn.Module):
    """Writes into buffers, whose results nobody uses."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.norm = nn.Linear(32, 32), nn.BatchNorm1d(32)
        self.register_buffer("last", torch.zeros(4, 32))

    def forward(self, x):
        y = self.norm(self.fc(x))
        self.last.copy_(y.detach())
        return y


def test_writes_into_buffers_stay():
    ours, applied, x = Norm(), fxmask.apply(Norm(), **OPTIONS), torch.randn(4, 32)
    call = compiled(ours, **OPTIONS)
    for _ in range(2):
        assert torch.equal(call(x), applied(x))
    assert ours.norm.num_batches_tracked == 2 and all(torch.equal(a, b) for a, b in zip(ours.buffers(), applied.buffers(), strict=True))


class Keywords(nn.Module):
    """Multi-head attention by keywords, of four Linears, as CLIP pools."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.q_proj, self.k_proj, self.v_proj, self.c_proj = (nn.Linear(32, 32) for _ in range(4))

    def forward(self, x):
        return F.multi_head_attention_forward(
            query=x, key=x, value=x, embed_dim_to_check=32, num_heads=2, in_proj_weight=None, use_separate_proj_weight=True, add_zero_attn=False,
            q_proj_weight=self.q_proj.weight, k_proj_weight=self.k_proj.weight, v_proj_weight=self.v_proj.weight, dropout_p=0.0, bias_k=None, bias_v=None,
            in_proj_bias=torch.cat([self.q_proj.bias, self.k_proj.bias, self.v_proj.bias]), out_proj_weight=self.c_proj.weight,
            out_proj_bias=self.c_proj.bias, training=self.training, need_weights=False,
        )[0]  # fmt: skip


def test_weights_that_are_given_by_keyword():
    ours, applied = Keywords(), fxmask.apply(Keywords(), **OPTIONS)
    make_x = lambda: torch.randn(6, 2, 32)  # noqa: E731
    call = compiled(ours, **OPTIONS, require=["q_proj", "k_proj", "v_proj", "c_proj"])
    assert train(ours, call, make_x) == train(applied, applied, make_x)


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = (nn.Parameter(torch.randn(32, 32)) for _ in range(2))

    def forward(self, x):
        return F.linear(F.linear(x, self.a), self.b)


def test_parameters_of_one_module_have_names_of_their_own():
    (text,) = graph_of(Wrap(Named()), torch.randn(4, 32), **OPTIONS, exclude="inner.b")
    FileCheck().check_count("masked_linear.default", 1, exactly=True).check("l_self_modules_inner_parameters_b_").run(text)


class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return F.linear(x, w)

    @staticmethod
    def backward(ctx, gy):
        x, w = ctx.saved_tensors
        return gy @ w, gy.t() @ x


class OwnBackward(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.other = nn.Linear(32, 32, bias=False), nn.Linear(32, 32)

    def forward(self, x):
        return self.other(Own.apply(x, self.fc.weight))


def test_a_linear_with_a_backward_of_its_own_stays_dense_and_says_so():
    with pytest.warns(FxMaskWarning, match="stands in the body of autograd_function_apply"):
        (text,) = graph_of(OwnBackward(), torch.randn(4, 32), **OPTIONS)
    FileCheck().check_count("masked_linear.default", 1, exactly=True).run(text)


class Region(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(32, 32, bias=False)

    @torch.compiler.nested_compile_region
    def forward(self, x):
        return F.gelu(self.fc(x))


def test_a_region_that_several_layers_share_stays_dense_and_says_so():
    torch.manual_seed(0)
    model, x = Wrap(nn.Sequential(*(Region() for _ in range(3)))), torch.randn(4, 32)
    with pytest.warns(FxMaskWarning, match=r"inner\.1\.fc stays dense: it stands in a region that is compiled once for several layers"):
        found = compiled(model, "aot_eager", **OPTIONS)(x)
    first = fxmask.apply(copy.deepcopy(model), **OPTIONS, include="inner.0.fc")  # the first one is traced by itself
    torch.testing.assert_close(found, first(x))


def test_a_tied_head_in_a_graph_of_its_own_stays_dense():
    table = nn.Embedding(64, 32)
    head = nn.Linear(32, 64, bias=False)
    head.weight = table.weight
    with pytest.warns(FxMaskWarning, match="masked nothing"):
        compiled(Wrap(table), **OPTIONS)(torch.arange(4))
    with pytest.warns(FxMaskWarning, match="default exclusion: weight tied to an Embedding"):
        compiled(Wrap(head), **OPTIONS)(torch.randn(4, 32))


# ---- coverage ------------------------------------------------------------------------------------------------------------------------------------------------


def failing(model, *args, **options):
    with pytest.raises(BackendCompilerFailed) as caught:
        compiled(model, **options)(*args)
    return caught.value.inner_exception


def test_nothing_to_mask_is_a_warning_and_with_require_an_error():
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU())
    x = torch.randn(2, 1, 8, 8)
    with pytest.warns(FxMaskWarning, match=r"masked nothing in a graph: it has no linear\.\n.*\n.*a graph break splits a model"):
        compiled(Wrap(model), **OPTIONS)(x)
    error = failing(Wrap(model), x, **OPTIONS, require=True)
    assert isinstance(error, UnsupportedError) and "expected anything at all to be masked in this graph, got nothing" in str(error)


class Wrap(nn.Module):
    """A class that Dynamo does not skip, as it does containers."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


def test_a_layer_that_one_block_covers_is_a_gap():
    with pytest.warns(FxMaskWarning, match="so these stay dense: inner"):
        compiled(Wrap(nn.Linear(32, 32)), ratio=0.9, block=(64, 64))(torch.randn(4, 32))
    torch._dynamo.reset()
    with pytest.warns(FxMaskWarning, match="choose a smaller block"):
        error = failing(Wrap(nn.Linear(32, 32)), torch.randn(4, 32), ratio=0.9, block=(64, 64), require=True)
    assert "require: expected inner to be masked in this graph" in str(error)


def test_a_layer_that_is_required_has_to_be_there():
    x = torch.randn(4, 64)
    compiled(Wrap(mlp()), **OPTIONS, require=["inner.0", "*.2"])(x)
    error = failing(Wrap(mlp()), x, **OPTIONS, require="inner.9")
    assert isinstance(error, UnsupportedError) and "expected 'inner.9' to be masked in this graph, got inner.0, inner.2" in str(error)
    error = failing(Wrap(mlp()), x, **OPTIONS, exclude="inner.0", require="inner.0")
    assert "dense: inner.0: in exclude" in str(error)


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        (dict(rato=0.5), ConfigError, "unknown option: expected some of ratio, block"),
        (dict(max_autotune=True), ConfigError, "options of Inductor go into options={'inductor'"),
        (dict(ratio=1.5), ConfigError, "expected a finite number in"),
        (dict(refresh=10), UnsupportedError, "keeps no state between calls, and refresh counts optimiser steps"),
        (dict(schedule=fxmask.Schedule(steps=3)), UnsupportedError, "use fxmask.apply"),
        (dict(backward="rigl"), UnsupportedError, "backward=rigl counts optimiser steps"),
        (dict(match="all"), ConfigError, "expected linear or matmul, got 'all'"),
        (dict(inductor=3), ConfigError, "expected a dict of Inductor's options"),
        (dict(inductor={"max_autotune": True}, inner="eager"), ConfigError, "expected one of them"),
        (dict(require=[3]), ConfigError, "require: expected a glob"),
        (dict(passes=3), ConfigError, "passes: expected a list of"),
    ],
    ids=lambda v: str(v)[:40],
)
def test_wrong_options(options, kind, text):
    with pytest.raises(kind, match=text.replace("(", r"\(").replace("{", r"\{")):
        backend.parse(options)


@pytest.mark.parametrize("change", [dict(start=100), dict(schedule=fxmask.Schedule(steps=9)), dict(backward="rigl")], ids=str)
def test_options_that_need_state_are_refused_in_overrides_too(change):
    error = failing(Wrap(mlp()), torch.randn(4, 64), **OPTIONS, overrides={"inner.0": change})
    assert isinstance(error, UnsupportedError) and "the options of 'inner.0' count optimiser steps or cache a mask" in str(error)


def test_a_mode_of_inductor_needs_inductor():
    call = torch.compile(Wrap(mlp()), backend=backend.fxmask_backend, options={**OPTIONS, "inner": "eager"})
    with pytest.raises(ConfigError, match="mode='max-autotune' is Inductor's, and inner='eager'"):
        backend._inner(backend.parse({"inner": "eager"}), "max-autotune")
    call(torch.randn(4, 64))


def test_options_that_contradict_apply():
    model = Wrap(fxmask.apply(mlp(), ratio=0.5, block=(16, 16)))
    error = failing(model, torch.randn(4, 64), **OPTIONS)
    assert isinstance(error, StateError) and "masked by fxmask.apply, and the backend got options of its own" in str(error)
    torch._dynamo.reset()
    x = torch.randn(4, 64)
    assert torch.equal(compiled(model)(x), model(x))  # without options: what apply has decided, head and all


def test_a_layer_that_apply_left_out_stays_dense_in_a_graph_of_its_own():
    torch.manual_seed(0)
    layer = nn.Linear(32, 32)
    model = fxmask.apply(nn.ModuleDict({"a": nn.Linear(32, 32), "b": layer}), ratio=0.75, exclude="b")
    x = torch.randn(4, 32)
    assert torch.equal(compiled(Wrap(layer))(x), F.linear(x, layer.weight, layer.bias))
    torch._dynamo.reset()
    fxmask.restore(model)
    assert not torch.equal(compiled(Wrap(layer), ratio=0.75)(x), layer(x))


@pytest.mark.parametrize("transform", ["grad", "vmap", "jvp"])
def test_function_transforms_raise(transform):
    model, x = Wrap(nn.Linear(32, 32)), torch.randn(4, 32)
    call = {
        "grad": lambda: torch.func.grad(lambda t: model(t).sum())(x),
        "vmap": lambda: torch.func.vmap(model)(x),
        "jvp": lambda: torch.func.jvp(model, (x,), (x,)),
    }[transform]
    error = failing(call, **OPTIONS)
    assert isinstance(error, UnsupportedError) and "use fxmask.apply" in str(error)


# ---- eager code is dense, and says so ------------------------------------------------------------------------------------------------------------------------


def steps_of(model, call, n):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for i in range(n):
        optimizer.zero_grad()
        call(torch.randn(4 + i, 64)).sum().backward()
        optimizer.step()


def test_a_step_around_the_graph_is_a_warning():
    model = Wrap(mlp())
    call = compiled(model, **OPTIONS)
    steps_of(model, call, 3)
    with torch.compiler.set_stance("force_eager"), pytest.warns(FxMaskWarning, match=r"gradients of inner\.0, inner\.2 though no masked graph ran") as seen:
        steps_of(model, call, 1)
    assert "fxmask.apply(model, ...) is masked in eager code, too" in str(seen[0].message)
    steps_of(model, call, 1)


def test_one_gradient_in_two_steps_is_no_warning():
    model = Wrap(mlp())
    call, optimizer = compiled(model, **OPTIONS), torch.optim.SGD(model.parameters(), 0.1)
    call(torch.randn(4, 64)).sum().backward()
    optimizer.step()
    optimizer.step()


def test_the_recompile_limit_is_a_warning():
    model = Wrap(mlp())
    call = torch.compile(model, backend=backend.fxmask_backend, dynamic=False, options={**OPTIONS, "inner": "eager"})
    with torch._dynamo.config.patch(recompile_limit=2), pytest.warns(FxMaskWarning, match="the recompile limit"):
        steps_of(model, call, 4)


def test_a_backend_that_no_graph_reaches_is_a_warning(monkeypatch):
    """nn.Sequential.compile never calls its backend."""
    monkeypatch.setattr(backend_watch, "state", backend_watch.State())
    model = mlp()
    model.compile(backend=backend.fxmask_backend, options=OPTIONS)
    with pytest.warns(FxMaskWarning, match="no graph has reached it"):
        steps_of(model, model, 1)
    steps_of(model, model, 1)  # once


# ---- artefacts -----------------------------------------------------------------------------------------------------------------------------------------------


def test_graphs_are_dumped_before_and_after_every_pass(tmp_path, monkeypatch):
    monkeypatch.setenv("FXMASK_DUMP", str(tmp_path / "dump"))
    compiled(Wrap(mlp()), **OPTIONS)(torch.randn(4, 64))
    files = {p.name.split(".", 2)[2]: p.read_text() for p in (tmp_path / "dump").iterdir()}
    assert sorted(files) == ["CleanUp.after.py", "CleanUp.before.py", "MaskLifted.after.py", "MaskLifted.before.py"]
    FileCheck().check_not("fxmask").check("torch._C._nn.linear").run(files["MaskLifted.before.py"])
    FileCheck().check("# 2 rewritten: inner.0, inner.2").check("torch.ops.fxmask.masked_linear").run(files["MaskLifted.after.py"])


STALE = """
import sys
sys.path.insert(0, {root!r})
import torch, fxmask
torch.manual_seed(0)
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(32, 32)
    def forward(self, x):
        return self.fc(x)
model = Model()
if {apply}:
    call = torch.compile(fxmask.apply(model, ratio=0.5))
else:
    from fxmask.backend import fxmask_backend
    call = torch.compile(model, backend=fxmask_backend, options={{"ratio": 0.5}})
call(torch.ones(4, 32)).sum().backward()
counters = torch._dynamo.utils.counters
print(model.fc.weight.grad.abs().sum().item(), counters["aot_autograd"]["autograd_cache_hit"])
"""


@pytest.mark.slow
@pytest.mark.parametrize("apply", [True, False], ids=["apply and stock Inductor", "backend"])
def test_a_changed_backward_is_never_taken_from_a_cache(tmp_path, apply):
    """Three processes over one cache: cold, warm, and after an edit of the backward."""
    root, source = tmp_path / "copy", Path(fxmask.__file__).parent.parent
    for folder in ("fxmask", "passes", "kernels"):
        shutil.copytree(source / folder, root / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), "FXMASK_TUNE": "0", "TORCHINDUCTOR_FX_GRAPH_CACHE": "1"}
    env.pop("TORCHINDUCTOR_FORCE_DISABLE_CACHES", None)

    def run():
        code = STALE.format(root=str(root), apply=apply)
        done = subprocess.run([sys.executable, "-c", code], env=env, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        gradient, hits = done.stdout.split()
        return float(gradient), int(hits)

    cold, hits = run()
    assert hits == 0 and cold > 0
    assert run() == (cold, 1)
    ops = root / "kernels" / "ops.py"
    text = ops.read_text()
    edited = text.replace("return gx, gw, gb, *[None] * 7", "return gx, 7 * gw, gb, *[None] * 7")
    assert edited != text
    ops.write_text(edited)
    assert run() == (pytest.approx(7 * cold), 0)
