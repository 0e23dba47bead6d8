"""Bodies of the GPU tests of `impl="auto"`, each for any device; see `bodies.py`."""

from __future__ import annotations

import torch
from gpu.bodies import forward_and_gradients, make, poisoned
from torch import nn

import fxmask
from fxmask.kernels.dispatch import MASKED_DENSE
from fxmask.kernels.triton.device import LAUNCHES

MATMULS = ("list_matmul_kernel", "sampled_matmul_kernel")


def layer(device, dtype, width=4096, **options):
    """One masked Linear with the default `impl`."""
    torch.manual_seed(0)
    options = {"ratio": 0.8, "block": (64, 64), **options}
    return fxmask.apply(nn.Sequential(nn.Linear(width, width, device=device, dtype=dtype)), **options)


def launched(call, x):
    """Launches of the list matmul and of the sampled one in a forward and a backward."""
    LAUNCHES.clear()
    x.grad = None
    call(x).square().mean().backward()
    assert x.grad.isfinite().all()
    return tuple(LAUNCHES[name] for name in MATMULS)


def check_choice(device, dtype, width, tokens, kernels, **options):
    """The default runs kernels or not, says so, and gives the reference's numbers."""
    model, other = layer(device, dtype, width, **options), layer(device, dtype, width, impl="reference", **options)
    x = torch.randn(tokens, width, device=device, dtype=dtype, requires_grad=True)
    skipped = options.get("backward", "masked") in ("masked", "rigl")  # whose dW skips blocks, too
    assert launched(model, x) == ((2, int(skipped)) if kernels else (0, 0))
    mine = x.grad.float()
    assert launched(other, x) == (0, 0)
    assert (mine - x.grad.float()).abs().max() <= 0.05 * x.grad.float().abs().max()
    scale = other[0].weight.grad.float().abs().max()
    assert (model[0].weight.grad.float() - other[0].weight.grad.float()).abs().max() <= 0.05 * scale
    row = fxmask.explain(model).rows[0]
    assert (row["impl"] == "triton" and "predicted" in row["why"]) == kernels, row


def check_masked_dense(device, dtype, shape, block):
    """Where kernels do not pay: the bits of the reference, outputs poisoned before, by one pass over W twice and one over dW."""
    x, w, b, gy, mask = make(device, shape, block, 0.5, dtype)
    LAUNCHES.clear()
    with poisoned():
        got = forward_and_gradients(MASKED_DENSE, x, w, b, gy, mask, block)
    assert [LAUNCHES[f"{name}_kernel"] for name in ("mask_cast", "zero_masked", "list_matmul", "sampled_matmul")] == [2, 1, 0, 0]
    for what, ours, theirs in zip(("y", "dx", "dw", "db"), got, forward_and_gradients("reference", x, w, b, gy, mask, block), strict=True):
        assert torch.equal(ours, theirs), what


def check_auto_compiled(device, dtype, width, tokens, backend, **options):
    """One whole graph, with the kernels in it; a step more compiles nothing."""
    model = layer(device, dtype, width, refresh=2, **options)
    fxmask.step(model, 0)
    x = torch.randn(tokens, width, device=device, dtype=dtype, requires_grad=True)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    assert launched(compiled, x) == (2, 1)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(3):
            fxmask.step(model)
            assert launched(compiled, x) == (2, 1)


def check_auto_autocast(device, dtype, width, tokens, **options):
    """Float32 parameters, multiplied in 16 bits."""
    model = layer(device, torch.float32, width, **options)
    x = torch.randn(tokens, width, device=device, requires_grad=True)
    with torch.autocast(torch.device(device).type, dtype):
        assert launched(model, x) == (2, 1)
    assert launched(model, x) == (0, 0)  # float32 is not recorded
