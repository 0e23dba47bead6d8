"""Bodies of the GPU tests of pruned inputs and N:M masks, for any device: `rehearse.py` runs them in Triton's interpreter."""

from __future__ import annotations

import torch
from gpu.bodies import DTYPES, assert_close, poisoned, tf32
from torch import nn

import fxmask
from fxmask.kernels import nm, nm_ops, prune, prune_ops, reference
from fxmask.kernels.grid import grid_shape
from fxmask.kernels.lists import LISTED
from fxmask.kernels.triton.device import LAUNCHES


def check_pruned_dw(device, shape, out_features, features, ratio, precision, mask_block=None, times=3):
    """Against float64, outputs poisoned; the same bits again. `ratio`: of a sample's blocks; an int: how many of them are kept, from the end where negative."""
    g = torch.Generator().manual_seed(0)
    x, gy = (torch.randn(*shape[:2], f, generator=g).to(DTYPES[precision]).to(device) for f in (shape[2], out_features))
    blocks = prune.block_count(shape[1], shape[2], features)
    kept = (ratio if ratio > 0 else blocks + ratio) if isinstance(ratio, int) else blocks - prune.dropped_count(blocks, ratio)
    values, index = prune.compress(x, features, kept, False)
    mask = None
    if mask_block is not None:
        mask = torch.rand(grid_shape((out_features, shape[2]), mask_block), generator=g) < 0.4
        mask[-1, 0] = True
        mask = mask.to(device)
    given = (index, list(shape), False, mask, *(mask_block or (1, 1)))

    def run(impl, gy, values):
        return prune_ops.pruned_dw(gy, values, *given, impl)

    LAUNCHES.clear()
    with tf32(precision == "tf32"):
        with poisoned():
            got = run("triton", gy, values)
        low = run("reference", gy, values)
        assert LAUNCHES["pruned_matmul_kernel"] == (features in LISTED)
        for _ in range(times):
            assert torch.equal(got, run("triton", gy, values))
    assert_close(got, run("reference", gy.double(), values.double()), low, "dW", shape[0] * shape[1], precision == "tf32")
    assert mask is None or (reference.masked(got, ~mask, mask_block) == 0).all()


def check_layer(device, masked):
    """A step of a layer with nothing read back to the host, on CUDA; dW equal to that of plain PyTorch on the same pruned input."""
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(96, 64)).to(device)
    masks = [fxmask.WeightMask(0.5, (16, 16), impl="triton")] if masked else []
    fxmask.apply(layer, *masks, fxmask.ActivationPruning(0.5, 16, impl="triton"))
    x, gy = torch.randn(4, 30, 96, device=device), torch.randn(4, 30, 64, device=device)
    layer(x).backward(gy)  # compiles
    layer.zero_grad()
    if x.is_cuda:
        torch.cuda.set_sync_debug_mode("error")
    try:
        layer(x).backward(gy)
    finally:
        if x.is_cuda:
            torch.cuda.set_sync_debug_mode("default")
    blocks = prune.block_count(30, 96, 16)
    packed = prune.compress(x.double(), 16, blocks - prune.dropped_count(blocks, 0.5), False)
    exact = prune.dw(gy.double(), *packed, x.shape, False)
    exact = reference.masked(exact, fxmask.masks(layer)["0.weight"], (16, 16)) if masked else exact
    torch.testing.assert_close(layer[0].weight.grad.double(), exact, rtol=1e-4, atol=1e-4)


def check_nm(device, shape, n, m, dtype, out):
    """Mask and W∘M are the CPU's to the bit, ties, zeros, NaN and Inf among them."""
    w = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    w[::2] = (2 * w[::2]).round()
    w[1, : 2 * m], w[2, 1], w[3, -1] = float("nan"), float("inf"), float("-inf")
    w = w.to(DTYPES[dtype])
    want = nm.magnitude_mask(w, n, m)
    with poisoned():
        got, mask = nm_ops.nm_magnitude(w.to(device), n, m, False, 0.0, DTYPES[out])
    assert torch.equal(mask.cpu(), want)
    torch.testing.assert_close(got.cpu(), torch.where(want, w, 0).to(DTYPES[out]), rtol=0, atol=0, equal_nan=True)
