"""Kinds of models, traces and compilers: outputs and gradients of a dense copy with W∘M written in, on the same device; see `flow_bodies.py`."""

from __future__ import annotations

import copy
import functools
import warnings

import torch
import torch.nn.functional as F
from gpu.flow_bodies import BLOCK, WIDTH, assert_masks_equal, check_training, net, train
from torch import nn
from torch.utils.checkpoint import checkpoint

import fxmask
from fxmask.kernels.grid import expand_mask

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3}
TRIPLE = (2, 16, WIDTH)
IMAGE = (2, 16, 8, 8)


class Functional(nn.Module):
    """Linears that are calls of a function."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.randn(WIDTH, WIDTH) / 8) for _ in range(2))
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x):
        return F.linear(F.gelu(F.linear(x, self.first, self.bias)), self.second)


class Tied(nn.Module):
    """Two layers of one weight, and a head tied to an embedding."""

    def __init__(self):
        super().__init__()
        self.table, self.a, self.b = nn.Embedding(32, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 32, bias=False)
        self.b.weight, self.head.weight = self.a.weight, self.table.weight

    def forward(self, x):
        return self.head(self.b(torch.relu(self.a(x))))


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 4, WIDTH, dropout=0.0, batch_first=True)

    def forward(self, x):
        return self.layer(self.attention(x, x, x, need_weights=False)[0])


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


def convolutions():
    return nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 1), nn.Flatten(), nn.Linear(64 * 64, 16))


def patches():
    return nn.Sequential(nn.Conv2d(16, 32, 2, 2), nn.ReLU(), nn.Conv2d(32, 64, 1))


def made(make, device, dtype=torch.float32):
    torch.manual_seed(0)
    return make().to(device, dtype)


def results(model, named, x):
    x = x.clone().requires_grad_()
    y = model(x)
    (y.float() - torch.linspace(-1, 1, y.shape[-1], device=y.device)).square().sum().backward()  # behind a LayerNorm the sum of squares alone is constant
    return {"y": y, "dX": x.grad, **{name: p.grad for name, p in named.named_parameters() if p.grad is not None}}


def assert_results(found, others, tolerance, kept):
    assert found.keys() == others.keys()
    for name, t in found.items():
        other = torch.where(kept[name], others[name], 0) if name in kept else others[name]
        assert (t.float() - other.float()).abs().max() <= tolerance * other.float().abs().max() + 1e-6, name


def twin_of(model, masked):
    """A dense copy with W∘M written in, and the kept elements of each masked weight."""
    twin, kept = copy.deepcopy(model), {}
    blocks = {name: site._fxmask_config.block for name, site, _ in fxmask.sites.sites(masked)}
    for name, mask in fxmask.masks(masked).items():
        p = dict(twin.named_parameters(remove_duplicate=False))[name]
        own = next(n for n, q in twin.named_parameters() if q is p)  # of weights that are shared, the first name
        kept[own] = expand_mask(mask, p.shape, blocks[name]).reshape(p.shape)
        p.data.mul_(kept[own])
    return twin, kept


def check_model(device, impl, make=net, shape=(32, WIDTH), run=lambda m, x: m, masked=None, count=None, dtype=torch.float32, **options):
    """`run(masked model, x)`: what computes, such as a compiled model."""
    change = masked or (lambda m, x, **more: fxmask.apply(m, **more))
    options = {"ratio": 0.5, "block": BLOCK, **options}
    x = torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(device, dtype)
    with warnings.catch_warnings(), torch.backends.cudnn.flags(allow_tf32=False):  # convolutions round to TF32 by default, matmuls do not
        warnings.filterwarnings("ignore", "Online softmax|.*TensorFloat32|.*side effects|.*treespec", UserWarning)
        warnings.filterwarnings("ignore", "`isinstance|.*TensorFloat|.*is deprecated", FutureWarning)
        model = change(made(make, device, dtype), x, impl=impl, **options)
        other = change(made(make, "cpu", dtype), x.cpu(), impl="reference", **options)
        assert_masks_equal(model, other)
        assert count is None or len(fxmask.masks(model)) == count
        twin, kept = twin_of(made(make, device, dtype), model)
        assert_results(results(run(model, x), model, x), results(twin, twin, x), TOLERANCE[dtype], kept)
        assert str(fxmask.explain(model))
    return model


def traced(model, x, **options):
    return fxmask.apply(torch.fx.symbolic_trace(model), **options)


def exported(model, x, **options):
    return fxmask.apply(torch.export.export(model, (x,)).module(), **options)


def check_choices(device, impl):
    """include, exclude and overrides."""
    overrides = {"0": {"ratio": 0.75}, "4": {"block": (5, 16)}}
    model = fxmask.apply(net(device), ratio=0.5, block=BLOCK, impl=impl, include=["0", "2", "4"], exclude="2", overrides=overrides)
    assert {name: (int(m.sum()), m.device.type) for name, m in fxmask.masks(model).items()} == {
        "0.weight": (4, torch.device(device).type),
        "4.weight": (4, torch.device(device).type),
    }
    train(model, device)


of = functools.partial
FLOWS = {
    "plain": of(check_model, count=2),
    "half weights": of(check_model, dtype=torch.float16),
    "bfloat16 weights": lambda device, impl: check_model(device, impl if torch.device(device).type == "cuda" else "auto", dtype=torch.bfloat16),
    "three axes": of(check_model, shape=TRIPLE),
    "functional linears, traced": of(check_model, make=Functional, masked=traced, count=2),
    "tied weights": of(check_model, make=Tied, include=["a", "b", "head"], count=3),
    "attention and an encoder": of(check_model, make=Attends, shape=TRIPLE, count=4),
    "checkpointing": of(check_model, make=Checkpointed, count=2),
    "convolutions": lambda device, impl: check_model(device, "auto", convolutions, IMAGE, layers=(nn.Linear, nn.Conv2d), count=3),
    "convolution of patches": of(check_model, make=patches, shape=IMAGE, layers=nn.Conv2d, count=2),
    "symbolic trace": of(check_model, masked=traced, count=2),
    "exported, then masked": of(check_model, masked=exported, count=2),
    "trained trace": of(check_training, make=lambda d, i, **o: traced(net(d), None, impl=i, ratio=0.5, block=BLOCK, refresh=2)),
    "choices": check_choices,
}
