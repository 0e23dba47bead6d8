"""Layers that read one input, as q, k and v, hold its kept blocks once."""

import copy
import gc
import pickle

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils.checkpoint import checkpoint

import fxmask
from fxmask import ActivationPruning, WeightMask
from fxmask.kernels import compress_ops, prune_ops

X = torch.randn(4, 10, 64, generator=torch.Generator().manual_seed(1))
CONFIG = ActivationPruning(0.5, 4)


def kept_bytes(item: int = 4) -> int:
    """Values and 16-bit numbers of half of the 160 blocks that each of X's samples has."""
    return 4 * 80 * (4 * item + 2)


class Reader(nn.Module):
    """Three linears behind one sum; `between` sees the input between the first and the others."""

    def __init__(self, between=None):
        super().__init__()
        torch.manual_seed(0)
        self.g = nn.Parameter(torch.rand(64))
        self.q, self.k, self.v = (nn.Linear(64, 64) for _ in range(3))
        self.between = between

    def forward(self, x):
        x = x + self.g
        q = self.q(x)
        if self.between:
            self.between(x)
        return q.sin() + self.k(x).cos() + self.v(x).sin()


def held(call) -> int:
    """Bytes of unique storages that autograd saves, without parameters and the three results."""
    seen = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.setdefault(t.untyped_storage().data_ptr(), t), lambda t: t):
        y = call()
    return sum(t.untyped_storage().nbytes() for t in seen.values() if not (t.is_leaf and t.requires_grad)) - 3 * y.numel() * y.element_size()


def grads(model, call):
    model.zero_grad()
    call(X).square().sum().backward()
    return [p.grad.clone() for p in model.parameters()]


@pytest.fixture
def packed(monkeypatch):
    """The inputs that are packed, one by one."""
    calls, real = [], compress_ops.compress
    monkeypatch.setattr(compress_ops, "compress", lambda *a: (calls.append(a), real(*a))[1])
    return calls


def alone(model, monkeypatch):
    """Gradients where every layer packs its input for itself."""
    with monkeypatch.context() as m:
        m.setattr(prune_ops, "shared", lambda x, cast, *a: compress_ops.compress(cast, *a))
        return grads(model, model)


def equal(a, b):
    return all(torch.equal(p, q) for p, q in zip(a, b, strict=True))


@pytest.mark.parametrize("masks", [(), (WeightMask(0.5, (16, 16)),)], ids=["alone", "with masks"])
def test_saved_once_with_the_same_gradients(masks, packed, monkeypatch):
    model = fxmask.apply(Reader(), *masks, CONFIG)
    assert held(lambda: model(X)) == kept_bytes() + (3 * 16 if masks else 0) and len(packed) == 1
    assert equal(grads(model, model), alone(model, monkeypatch)) and len(packed) == 1 + 1 + 3


def test_analyze_counts_it_once():
    model = fxmask.apply(Reader(), CONFIG)
    report = fxmask.analyze(model, X)
    assert report.tables["footprint"][-1]["saved_activations"] == kept_bytes() + 3 * 4 * X.numel()
    assert [r["op"] for r in report.tables["nodes"]].count("fxmask.compress") == 1


def test_under_autocast(packed, monkeypatch):
    model = fxmask.apply(Reader(), CONFIG)

    def call(x=X):
        with torch.autocast("cpu", torch.bfloat16):
            return model(x)

    weights = 3 * 2 * 64 * 64  # cast for each layer
    assert held(call) == kept_bytes(2) + weights and len(packed) == 1 and packed[0][0].dtype == torch.bfloat16
    got = grads(model, call)
    with monkeypatch.context() as m:
        m.setattr(prune_ops, "shared", lambda x, cast, *a: compress_ops.compress(cast, *a))
        assert equal(got, grads(model, call))


def test_in_another_dtype_it_is_another_form(packed):
    """A layer under autocast, and one that is kept out of it, read one input."""
    model, x = fxmask.apply(Reader(), CONFIG), X.clone().requires_grad_() * 1
    with torch.autocast("cpu", torch.bfloat16):
        y = model.q(x).float()
    (y + model.k(x)).sum().backward()
    assert [a[0].dtype for a in packed] == [torch.bfloat16, torch.float32] and model.q.weight.grad is not None


def test_as_many_blocks_of_another_width_are_another_form(packed, monkeypatch):
    """Half of 160 blocks, and all but three quarters of 320, of each sample."""
    model = fxmask.apply(Reader(), CONFIG, overrides={"k": {"ratio": 0.75, "block": 2}})
    model(X)
    assert [a[1:3] for a in packed] == [(4, 80), (2, 80)]
    assert equal(grads(model, model), alone(model, monkeypatch))


def test_an_input_that_changes_between_is_packed_anew(packed, monkeypatch):
    model = fxmask.apply(Reader(between=lambda x: x.detach().mul_(-torch.arange(64))), CONFIG)
    assert held(lambda: model(X)) == 2 * kept_bytes() and len(packed) == 2
    assert equal(grads(model, model), alone(model, monkeypatch))


def test_an_input_that_is_given_other_memory_is_packed_anew(packed, monkeypatch):
    def turn(x):
        x.data = x.data.flip(-1)

    model = fxmask.apply(Reader(between=turn), CONFIG)
    assert held(lambda: model(X)) == 2 * kept_bytes() and len(packed) == 2
    assert equal(grads(model, model), alone(model, monkeypatch))


def test_another_ratio_is_another_form(packed, monkeypatch):
    model = fxmask.apply(Reader(), CONFIG, overrides={"k": {"ratio": 0.25}})
    model(X)
    assert len(packed) == 2
    assert equal(grads(model, model), alone(model, monkeypatch))


def test_blocks_drawn_by_lot_are_each_layers_own(packed):
    fxmask.apply(Reader(), ActivationPruning(0.5, 4, noise=1.0))(X)
    assert len(packed) == 3 and len({tuple(c[4].flatten().tolist()) for c in packed}) == 3


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed(reentrant, monkeypatch):
    model = fxmask.apply(Reader(), CONFIG)
    want = alone(model, monkeypatch)
    assert equal(grads(model, lambda x: checkpoint(model, x.clone().requires_grad_(), use_reentrant=reentrant)), want)


def test_two_forwards_before_a_backward(monkeypatch):
    model = fxmask.apply(Reader(), CONFIG)
    want = alone(model, monkeypatch)
    first, second = model(X), model(2 * X)
    model.zero_grad()
    second.sum().backward()
    model.zero_grad()
    first.square().sum().backward()
    assert equal([p.grad for p in model.parameters()], want)


def test_memory_that_is_filled_again_is_packed_again(packed):
    """No op's result: what changes it need not show in its version."""
    layer, x = fxmask.apply(nn.Linear(64, 64), CONFIG, include=lambda *_: True, exclude=()), X.clone()
    y = layer(x)
    x.numpy()[:] = 0
    z = layer(x)
    assert len(packed) == 2
    z.sum().backward()
    assert y is not None and not layer.weight.grad.any()


def test_nothing_is_held_for_it_and_the_input_stays_an_ordinary_tensor(little_garbage):
    model, inputs = fxmask.apply(Reader(between=lambda x: inputs.append(x)), CONFIG), []
    y = model(X)
    assert inputs[0] in compress_ops._seen and not vars(inputs[0])
    pickle.dumps(inputs[0].detach()), copy.copy(inputs[0])
    ((values, _),) = compress_ops._seen[inputs[0]].values()
    assert values() is not None
    y.sum().backward()
    del y
    gc.collect()
    assert values() is None
    before = len(compress_ops._seen)
    inputs.clear()
    gc.collect()
    assert len(compress_ops._seen) < before


@pytest.mark.parametrize("how", ["apply", "backend"])
def test_compiled(how):
    """The compiler keeps one of equal calls."""
    ops = []

    def count(gm, _):
        ops.extend(str(n.target) for n in gm.graph.nodes if n.op == "call_function")
        return make_boxed_func(gm)

    inner = aot_autograd(fw_compiler=count, partition_fn=min_cut_rematerialization_partition)
    torch._dynamo.reset()
    model = Reader()
    if how == "apply":
        call = torch.compile(fxmask.apply(model, CONFIG), backend=inner, fullgraph=True)
    else:
        call = torch.compile(model, backend="fxmask", fullgraph=True, options={"activations": CONFIG, "inner": inner})
    y = call(X)
    assert ops.count("fxmask.compress.default") == 1 and ops.count("fxmask.pruned_linear.default") == 3
    y.square().sum().backward()


def test_on_the_meta_device():
    model = fxmask.apply(Reader(), CONFIG).to("meta")
    model(X.to("meta")).sum().backward()
    assert model.q.weight.grad.shape == (64, 64)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_compiled_under_autocast(dtype, monkeypatch):
    model = fxmask.apply(Reader(), CONFIG)

    def call(x):
        with torch.autocast("cpu", dtype):
            return model(x)

    want = grads(model, call)
    torch._dynamo.reset()
    for got, g in zip(grads(model, torch.compile(call, backend="aot_eager", fullgraph=True)), want, strict=True):
        torch.testing.assert_close(got, g)


@pytest.mark.parametrize(
    ("values", "index", "match"),
    [
        ((4, 3, 4), (4, 2), "kept blocks of x: expected"),
        ((5, 3, 4), (5, 3), "expected 4 samples, got 5"),
        ((4, 161, 4), (4, 161), "expected 1 to 160, got 161"),
        ((4, 3, 0), (4, 3), "expected 1 or more, got 0"),
    ],
)
def test_kept_blocks_of_another_input(values, index, match):
    with pytest.raises(fxmask.FxMaskError, match=match):
        torch.ops.fxmask.pruned_linear(X, torch.randn(8, 64), None, torch.randn(values), torch.zeros(index, dtype=torch.int16), False)
