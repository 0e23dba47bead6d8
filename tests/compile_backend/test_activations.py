"""`options={"activations": ...}`: inputs of linears and of products with parameters are saved pruned, in whatever graph Dynamo captures."""

import copy

import pytest
import torch
from compile_backend.helpers import OPTIONS, Wrap, compiled, failing, steps_of
from resmlp import PRESETS, ResMLP
from sample_models import mlp
from torch import fx, nn
from torch.utils.checkpoint import checkpoint

import fxmask
from fxmask import ActivationPruning, BlockDropout, WeightMask
from fxmask.compiler import backend
from fxmask.errors import ConfigError, FxMaskWarning, UnsupportedError

PRUNED = dict(ratio=0.5, block=16)


class Gained(nn.Module):
    """Linears, and products of several spellings."""

    def __init__(self):
        super().__init__()
        self.inner, self.gain = nn.Linear(64, 64), nn.Parameter(torch.rand(64))

    def forward(self, x):
        h = torch.mul(other=self.gain, input=self.inner(x))
        h *= self.gain
        h.mul_(self.gain)
        return torch.addcmul(x, self.gain.view(1, 1, -1), h.sin())


def grads(model, call, x):
    torch.manual_seed(1)  # of noise
    model.zero_grad()
    x = x.clone().requires_grad_()
    out = call(x)
    out.square().sum().backward()
    return {"y": out.detach(), "x": x.grad} | {n: p.grad.clone() for n, p in model.named_parameters()}


@pytest.mark.parametrize("inner", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("masks", [{}, OPTIONS, {**OPTIONS, "backward": "ste"}], ids=["alone", "with masks", "with masks of one's own backward"])
def test_as_apply(inner, masks):
    torch.manual_seed(0)
    model, x = Wrap(mlp()), torch.randn(4, 10, 64)
    want = copy.deepcopy(model)
    fxmask.apply(want, *([WeightMask(**masks)] if masks else []), ActivationPruning(**PRUNED))
    got = grads(model, compiled(model, inner, **masks, activations=PRUNED), x)
    for name, g in grads(want, want, x).items():
        torch.testing.assert_close(got[name], g)


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_products_are_those_of_a_trace(inner):
    """And so is the noise of their blocks, and of linears'."""
    torch.manual_seed(0)
    for model, x in ((ResMLP(PRESETS["digits"]), torch.randn(4, 1, 8, 8)), (Gained(), torch.randn(4, 10, 64))):
        config = ActivationPruning(**PRUNED, affine=True, noise=2.0)
        want = fxmask.apply(torch.fx.symbolic_trace(copy.deepcopy(model)), config)
        dense = grads(model, model, x)
        got = grads(model, compiled(model, inner, activations=config), x)
        for name, g in grads(want, want, x).items():
            torch.testing.assert_close(got[name], g)
        differ = {n for n, g in got.items() if not torch.equal(g, dense[n])}
        assert {n for n in got if n.endswith((".alpha", "gain", "gain1", "gain2"))} <= differ and "x" not in differ and "y" not in differ


def held(model, call, x):
    """Bytes of the storages that are saved for the backward, without parameters."""
    seen, own = {}, {p.untyped_storage()._cdata for p in model.parameters()}

    def pack(t):
        seen[t.untyped_storage()._cdata] = t.untyped_storage()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = call(x)
    assert out.requires_grad
    return sum(s.nbytes() for key, s in seen.items() if key not in own)


@pytest.mark.parametrize("inner", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_memory_is_really_less(inner):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.gain = nn.Linear(64, 64), nn.Parameter(torch.rand(64))

        def forward(self, x):
            return self.fc(x) * self.gain

    model, x = Scaled(), torch.randn(4, 10, 64)
    pruned = 4 * 8 * (16 * 4 + 2)
    assert held(model, model, x) == 2 * x.nbytes
    assert held(model, compiled(model, inner, activations=dict(ratio=0.8, block=16, affine=True)), x) == 2 * pruned
    torch._dynamo.reset()
    assert held(model, compiled(model, inner, activations=dict(ratio=0.8, block=16)), x) == x.nbytes + pruned


def test_overrides_checkpoints_and_no_gradients():
    model, x = Wrap(mlp()), torch.randn(4, 10, 64)
    dense = grads(model, model, x)
    other = {"*.2": {"ratio": 0.8, "block": 8}}
    got = grads(model, compiled(model, activations=PRUNED, overrides={"inner.0": False, **other}), x)
    assert [n for n, g in got.items() if not torch.equal(g, dense[n])] == ["inner.2.weight"]
    torch._dynamo.reset()
    recomputed = compiled(lambda x: checkpoint(model, x, use_reentrant=False), activations=PRUNED, overrides={"*inner.0": False, **other})
    again = grads(model, recomputed, x)
    torch.testing.assert_close(again["inner.2.weight"], got["inner.2.weight"])
    torch._dynamo.reset()
    call = compiled(model, activations=PRUNED)
    with torch.no_grad():
        assert torch.equal(call(x), model(x))
    for p in model.parameters():
        p.requires_grad_(False)
    torch._dynamo.reset()
    assert held(model, compiled(model, activations=PRUNED), x.requires_grad_()) == held(model, model, x)


def test_gradients_that_came_around_the_graph_are_told():
    model = Wrap(mlp())
    call = compiled(model, activations=PRUNED)
    call(torch.randn(4, 64)).sum().backward()
    with pytest.warns(FxMaskWarning, match=r"gradients of inner.0, inner.2 though no masked graph ran"):
        steps_of(model, model, 2)


class Closed(torch.autograd.Function):
    """A product with a backward of its own."""

    @staticmethod
    def forward(ctx, x, a):
        return x * a

    @staticmethod
    def backward(ctx, gy):
        return gy, gy.sum((0, 1))


def test_what_is_not_pruned_is_told():
    x = torch.randn(4, 10, 64)
    with pytest.warns(FxMaskWarning, match="backend='fxmask' pruned nothing in a graph: it has no linear"):
        compiled(Wrap(nn.Sequential(nn.ReLU())), activations={})(x)
    attention = nn.MultiheadAttention(64, 2, batch_first=True)
    with pytest.warns(FxMaskWarning, match=r"pruned nothing in a graph: .*out_proj"):
        compiled(lambda x: attention(x, x, x)[0], activations={})(x)
    gain = nn.Parameter(torch.rand(64))
    dense = {r"its result \(4, 10, 64\) is larger": lambda x: x[..., :1] * gain, "it stands in the body of autograd": lambda x: Closed.apply(x, gain)}
    for why, call in dense.items():
        with pytest.warns(FxMaskWarning, match=rf"l_gain_.*: {why}"):
            compiled(call, activations=dict(affine=True))(x)
    torch._dynamo.reset()
    error = failing(Wrap(mlp()), x, activations=PRUNED, exclude="inner.0", require="inner.0")
    assert isinstance(error, UnsupportedError) and "expected 'inner.0' to be pruned in this graph, got inner.2" in str(error)


@pytest.mark.parametrize(
    ("given", "kind", "text"),
    [
        (3, ConfigError, "activations: expected a fxmask.ActivationPruning or a dict of its options, got 3"),
        (dict(rato=0.5), ConfigError, r"unknown option in options\['activations'\]"),
        (dict(ratio=1.0), ConfigError, "finite number in"),
        (dict(start=3), UnsupportedError, "start and schedule of pruned activations count optimiser steps"),
    ],
    ids=str,
)
def test_wrong_options(given, kind, text):
    with pytest.raises(kind, match=text):
        backend.parse({"activations": given})


def test_a_schedule_in_overrides_is_refused():
    error = failing(Wrap(mlp()), torch.randn(4, 64), activations=PRUNED, overrides={"inner.0": {"start": 3}})
    assert isinstance(error, UnsupportedError) and "count optimiser steps" in str(error)


@pytest.mark.parametrize("form", [lambda m: m, fx.symbolic_trace], ids=["module", "trace"])
@pytest.mark.parametrize("config", [ActivationPruning(0.5, block=16), BlockDropout(0.5, block=(2, 16))])
def test_layers_whose_inputs_apply_has_changed_stay_dense_in_evaluation_too(config, form):
    model = fxmask.apply(form(mlp()), config, include=["0"])
    call, x = compiled(model, **OPTIONS), torch.randn(4, 64)
    words = r"0 stays dense: fxmask\.apply has changed what becomes of its input, and was asked for no mask of its weight; restore the model, and give"
    for mode in (True, False):
        call.train(mode)
        with pytest.warns(FxMaskWarning, match=words), torch.set_grad_enabled(mode):
            y = call(x)
        assert {(r["name"], r["masked"]) for r in fxmask.explain(call).rows} >= {("0", False), ("2", True)}  # which apply was not to change
    assert torch.equal(y, fxmask.apply(mlp(), **OPTIONS, exclude=["0"])(x))


@pytest.mark.parametrize("config", [ActivationPruning(0.5, block=16), BlockDropout(0.5, block=(2, 16))])
def test_such_a_layer_that_is_compiled_by_itself_stays_dense(config):
    call, x = compiled(fxmask.apply(nn.Linear(64, 64), config), **OPTIONS), torch.randn(4, 64)
    for mode in (True, False):
        call.train(mode)
        with pytest.warns(FxMaskWarning) as told, torch.set_grad_enabled(mode):
            call(x)
        assert all("fxmask.apply has changed what becomes of its input" in str(w.message) for w in told) and not fxmask.explain(call).rows[0]["masked"]


def test_what_a_graph_did_before_apply_changed_a_layers_input_is_past():
    call, x = compiled(model := mlp(), **OPTIONS), torch.randn(4, 64)
    call(x)
    fxmask.apply(model, ActivationPruning(0.5, block=16), include=["0"])
    assert [r["masked"] for r in fxmask.explain(call).rows] == [False, True, False]
