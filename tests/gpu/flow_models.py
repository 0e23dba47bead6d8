"""Kinds of models, traces and compilers: outputs and gradients of a dense copy with W∘M written in, on the same device; see `flow_bodies.py`."""

from __future__ import annotations

import copy
import functools
import warnings

import torch
import torch.nn.functional as F
from gpu.flow_bodies import BLOCK, WIDTH, adamw, assert_masks_equal, assert_same_weights, batch, check_training, loss_of, masked_net, net, train
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
    y.float().square().sum().backward()
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
    with warnings.catch_warnings():
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


def check_export(device, impl):
    model = masked_net(device, impl).eval()
    x, _ = batch(device)
    with torch.no_grad():
        program = torch.export.export(model, (x,))
        torch.testing.assert_close(program.module()(x), model(x), rtol=1e-4, atol=1e-4)


def check_finalize(device, impl, form):
    model = masked_net(device, impl)
    with torch.no_grad():
        x, _ = batch(device)
        before = model(x)
        kept = {name: mask.clone() for name, mask in fxmask.masks(model).items()}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Sparse BSR", UserWarning)
            fxmask.finalize(model, form)
            close = 1e-4 if form == "dense" else 1e-2  # PyTorch's kernels of BSR weights may multiply in tf32
            torch.testing.assert_close(model(x), before, rtol=close, atol=close)
    if form == "dense":
        assert torch.equal(model[0].weight != 0, expand_mask(kept["0.weight"], (WIDTH, WIDTH), BLOCK))


def check_semi_structured(device, impl):
    """2:4 weights in float16, on CUDA alone; on a CPU it says so."""
    model = fxmask.apply(net(device, torch.float16), fxmask.NMMask(2, 4), include=["0", "2"]).eval()
    x, _ = batch(device, torch.float16)
    with torch.no_grad():
        before = model(x)
        if not x.is_cuda:
            try:
                fxmask.finalize(model, "2:4")
            except fxmask.FxMaskError as error:
                assert "CUDA" in str(error)
                return
        fxmask.finalize(model, "2:4")
        torch.testing.assert_close(model(x), before, rtol=1e-2, atol=1e-2)


def check_compiled_training(device, impl):
    """Inductor, one compile for a ramp of the ratio: the weights and masks of an eager run."""
    torch._dynamo.reset()
    options = {"schedule": fxmask.Schedule("cubic", steps=4), "ratio": 0.8}
    model, other = masked_net(device, impl, **options), masked_net("cpu", "reference", **options)
    opts = [adamw(m.parameters()) for m in (model, other)]
    for opt, m in zip(opts, (model, other), strict=True):
        fxmask.guard(opt, m)
    compiled = torch.compile(model, fullgraph=True)
    with warnings.catch_warnings(), torch._dynamo.config.patch(error_on_recompile=True):
        warnings.simplefilter("ignore")
        for _ in range(4):
            for opt, m, d in ((opts[0], compiled, device), (opts[1], other, "cpu")):
                opt.zero_grad()
                loss_of(m, *batch(d)).backward()
                opt.step()
    assert_same_weights(model, other)
    assert_masks_equal(model, other)


def check_backend(device, impl):
    """torch.compile(backend="fxmask"): the outputs and gradients of `apply`."""
    torch._dynamo.reset()
    dense, masked = net(device), masked_net(device, "reference")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = torch.compile(dense, backend="fxmask", options={"ratio": 0.5, "block": BLOCK, "impl": impl})
        x, _ = batch(device)
        assert_results(results(compiled, dense, x), results(masked, masked, x), 1e-4, {})
        assert len(fxmask.explain(compiled).rows) == 3


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
    "exported": check_export,
    "finalize": of(check_finalize, form="dense"),
    "finalize bsr": of(check_finalize, form="bsr"),
    "finalize 2:4": check_semi_structured,
    "compiled by Inductor": check_compiled_training,
    "backend": check_backend,
    "choices": check_choices,
}
