"""Masked convolutions whose windows do not overlap, by the Triton kernels: the masked linear of their patches, in both memory formats."""

import copy

import pytest
import torch
from torch import nn

import fxmask
from fxmask.kernels.grid import expand_mask


@pytest.mark.parametrize(("dtype", "last"), [(torch.float32, True), (torch.float16, False)], ids=["channels_last", "contiguous"])
def test_1x1_and_patches(dtype, last):
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Conv2d(32, 48, 1), nn.Conv2d(48, 32, 2, 2), nn.Conv2d(32, 32, 3)).to(dtype)
    x = torch.randn(2, 32, 8, 8).to(dtype).to(memory_format=torch.channels_last if last else torch.contiguous_format)
    model, kept = fxmask.apply(copy.deepcopy(dense), fxmask.WeightMask(0.5, (16, 16), impl="triton"), layers=nn.Conv2d), {}
    for name, mask in fxmask.masks(model).items():
        w = dense.get_parameter(name)
        kept[name] = expand_mask(mask, w.shape, (16, 16))
        w.data.mul_(kept[name])
    assert [r["impl"] for r in fxmask.explain(model).rows] == ["triton", "triton", "masked_dense"]
    results = []
    for m in (model, dense):
        given = x.clone().requires_grad_()
        y = m(given)
        y.float().square().sum().backward()
        results.append([y.detach(), given.grad, *(p.grad * kept[n] if n in kept else p.grad for n, p in m.named_parameters())])
        assert y.stride() == results[0][0].stride()
    for a, b in zip(*results, strict=True):
        assert (a.float() - b.float()).abs().max() <= (1e-5 if dtype == torch.float32 else 4e-3) * b.float().abs().max()
    assert all(not model.get_parameter(n).grad[~k].any() for n, k in kept.items())
