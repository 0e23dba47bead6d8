"""Bodies of the GPU tests that train a model, each for any device; see `bodies.py`."""

from __future__ import annotations

import copy
import threading
from contextlib import nullcontext
from unittest import mock

import torch
from torch import nn

import fxmask
from fxmask.kernels.grid import expand_mask
from fxmask.kernels.triton import aside
from fxmask.kernels.triton.device import LAUNCHES
from fxmask.passes.stepping import set_aside


def model_pair(device, dtype=torch.float32, width=64, **options):
    """The same masked model twice: by Triton, and by the reference."""
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)).to(device, dtype)
    options = {"ratio": 0.7, "block": (16, 16), **options}
    return tuple(fxmask.apply(copy.deepcopy(dense), impl=impl, **options) for impl in ("triton", "reference"))


def train_step(model, x, gy):
    """Forward, backward, and the rebuilding of cached masks."""
    y = model(x)
    y.backward(gy)
    fxmask.refresh(model)
    return y


def assert_same_training(model, other, y, other_y, tolerance):
    assert torch.allclose(y.float(), other_y.float(), atol=tolerance, rtol=tolerance)
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        scale = q.grad.float().abs().max()
        assert (p.grad.float() - q.grad.float()).abs().max() <= tolerance * scale, name
    masks, others = fxmask.masks(model), fxmask.masks(other)
    assert all(torch.equal(masks[name].cpu(), others[name].cpu()) for name in masks)


def check_training(device, dtype=torch.float32, tolerance=1e-3, tokens=33, **options):
    """One step by Triton equals one by the reference; returns the Triton model."""
    model, other = model_pair(device, dtype, **options)
    x, gy = (torch.randn(tokens, 64, device=device, dtype=dtype) for _ in range(2))
    assert_same_training(model, other, train_step(model, x, gy), train_step(other, x, gy), tolerance)
    return model


def check_optimiser_steps(device, during, steps=3, guard=None, **options):
    """Steps of an optimiser, inside the context manager `during` from the second on; the masks move on: by `fxmask.step`, or by a guard with these options."""
    model, _ = model_pair(device, **options)
    if guard is None:
        optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
        fxmask.step(model, 0)
    else:
        optimiser = torch.optim.AdamW(model.parameters(), lr=0.01)
        fxmask.guard(optimiser, model, **guard)
    data = [torch.randn(32, 64, device=device) for _ in range(steps + 1)]

    def one(x):
        optimiser.zero_grad(set_to_none=True)
        model(x).square().mean().backward()
        optimiser.step()
        if guard is None:
            fxmask.step(model)

    one(data[0])  # compiles kernels, makes workspaces
    with during():
        for x in data[1:]:
            one(x)
    assert all(p.isfinite().all() for p in model.parameters())


def check_backward_thread(device, expect_other):
    """The backward's kernels run on autograd's thread for the device: where was the gradient made?"""
    model, _ = model_pair(device)
    seen = []
    x = torch.randn(9, 64, device=device, requires_grad=True)
    x.register_hook(lambda g: seen.append(threading.get_ident()))
    model(x).sum().backward()
    assert x.grad.isfinite().all() and len(seen) == 1
    assert (seen[0] != threading.get_ident()) == expect_other


def check_compiled(device, backend):
    """torch.compile takes the whole graph, forward and backward, and computes the same."""
    model, other = model_pair(device)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    x, gy = torch.randn(33, 64, device=device), torch.randn(33, 64, device=device)
    assert_same_training(model, other, train_step(compiled, x, gy), train_step(other, x, gy), 1e-3)


def check_autocast(device, dtype):
    """Inside autocast the kernels get its dtype, and float32 parameters get float32 gradients."""
    model, other = model_pair(device)
    x = torch.randn(33, 64, device=device)
    with torch.autocast(torch.device(device).type, dtype):
        y, z = model(x), other(x)
    assert y.dtype == z.dtype == dtype
    for out in (y, z):
        out.float().square().sum().backward()
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
    assert_same_training(model, other, y, z, 0.05)


def check_usable_after(device, fail):
    """`fail(model)` raises out of memory; then the model computes what it did before."""
    model, _ = model_pair(device)
    x = torch.randn(33, 64, device=device)
    before = model(x).detach()
    masks = {k: v.clone() for k, v in fxmask.masks(model).items()}
    fail(model)
    assert torch.equal(model(x), before)
    assert all(torch.equal(v, masks[k]) for k, v in fxmask.masks(model).items())
    model(x).sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def check_set_aside(device, dtype=torch.float32, block=(16, 16), steps=4, **options):
    """Guarded steps by the kernel have the bits of guarded steps by clones, from the same gradients; ragged weights, and momenta that the first step makes."""

    def trained(by_kernel):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(72, 150), nn.GELU(), nn.Linear(150, 33), nn.GELU(), nn.Linear(33, 64)).to(device, dtype)
        fxmask.apply(model, ratio=0.6, block=block, impl="triton", **options)
        opt = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1, fused=torch.device(device).type == "cuda")
        fxmask.guard(opt, model)
        launched = LAUNCHES["aside_kernel"]
        with nullcontext() if by_kernel else mock.patch.object(set_aside, "fits", return_value=False):
            for i in range(steps):
                model(torch.ones(2, 72, device=device, dtype=dtype))
                masks = fxmask.masks(model)
                for j, (name, p) in enumerate(model.named_parameters()):
                    grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * i + j)).to(device, dtype)
                    p.grad = grad * expand_mask(masks[name], p.shape, block) if name in masks else grad
                opt.step()
        widths = {aside.width(m.weight) for m in model if isinstance(m, nn.Linear)}  # rows of one alignment go together
        return [*model.parameters(), *(t for state in opt.state.values() for t in state.values())], LAUNCHES["aside_kernel"] - launched, len(widths)

    (ours, launched, widths), (theirs, none, _) = trained(True), trained(False)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert (launched, none) == (2 * steps * widths, 0)
