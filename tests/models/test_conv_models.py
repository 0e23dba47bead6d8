"""torchvision's convolutional models with masked convolutions and linears, in float64: outputs and gradients of a dense copy with W∘M written in."""

import copy
from math import ceil

import pytest
import torch
from models.dense_copy import images, stirred
from torch import nn

import fxmask
from fxmask.kernels.grid import expand_mask, matrix_shape

BOTH = (nn.Linear, nn.Conv2d)


def run(model, x, gy=None):
    torch.manual_seed(3)
    x = x.clone().requires_grad_()
    model.zero_grad()
    y = model(x)
    gy = torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(4)) if gy is None else gy
    y.backward(gy)
    return {"y": y.detach(), "x": x.grad, **{n: p.grad for n, p in model.named_parameters() if p.grad is not None}}


def check(model, x, block, ratio, impl, expected_dense):
    """Masked against its dense copy, in train() and eval(): all within 1e-10 of the largest value; exact k; restore to the bit."""
    dense, before = copy.deepcopy(model), {k: v.clone() for k, v in model.state_dict().items()}
    fxmask.apply(model, fxmask.WeightMask(ratio, block, impl=impl), layers=BOTH)
    masks = fxmask.masks(model)
    wanted = {
        f"{n}.weight" for n, m in model.named_modules()
        if isinstance(m, BOTH) and getattr(m, "groups", 1) == 1 and min(matrix_shape(m.weight.shape)) >= 16
    }  # fmt: skip
    assert masks.keys() == wanted and {r["name"] for r in fxmask.explain(model).rows if not r["masked"]} == expected_dense
    twin, kept = copy.deepcopy(dense), {}
    for name, mask in masks.items():
        w = twin.get_parameter(name)
        rows, cols = matrix_shape(w.shape)
        assert mask.shape == (ceil(rows / block[0]), ceil(cols / block[1])) and int(mask.sum()) == ceil(mask.numel() * round(10 * (1 - ratio)) / 10)
        kept[name] = expand_mask(mask, w.shape, block)
        w.data.mul_(kept[name])
    for training in (True, False):
        found, expected = run(model.train(training), x), run(twin.train(training), x)
        assert found.keys() == expected.keys() and wanted <= found.keys()
        for name, b in expected.items():
            b = b * kept[name] if name in kept else b
            assert b.any() and (found[name] - b).abs().max() <= 1e-10 * b.abs().max(), name
    model.load_state_dict(before)  # the batch norms have moved
    fxmask.restore(model)
    assert all(type(a) is type(b) for a, b in zip(model.modules(), dense.modules(), strict=True)) and list(model.state_dict()) == list(before)
    found, expected = run(model.train(), x), run(dense.train(), x)
    assert all(torch.equal(found[n], expected[n]) for n in expected) and all(torch.equal(v, before[k]) for k, v in model.state_dict().items() if "weight" in k)


@pytest.mark.parametrize("impl", ["auto", pytest.param("cpu", marks=pytest.mark.slow)])
def test_resnet_18(torchvision, impl):
    torch.manual_seed(0)
    model = stirred(torchvision.models.resnet18(num_classes=20)).double()
    check(model, images(2, 3, 64, 64).double(), (16, 16), 0.5, impl, set())


@pytest.mark.slow
def test_resnet_50_in_channels_last(torchvision):
    torch.manual_seed(0)
    model = stirred(torchvision.models.resnet50(num_classes=20)).double().to(memory_format=torch.channels_last)
    with pytest.warns(fxmask.FxMaskWarning, match=r"these stay dense: layer1.0.conv1 \(1 block of \(64, 64\)\); choose"):
        check(model, images(2, 3, 64, 64).double().to(memory_format=torch.channels_last), (64, 64), 0.9, "cpu", set())


# its patches are a masked linear with impl="cpu": the stem 4x4, three 2x2
@pytest.mark.parametrize("impl", ["cpu", pytest.param("auto", marks=pytest.mark.slow)])
def test_convnext(torchvision, impl):
    torch.manual_seed(0)
    setting = torchvision.models.convnext.CNBlockConfig
    small = [setting(32, 64, 1), setting(64, 96, 1), setting(96, 128, 2), setting(128, None, 1)]
    model = stirred(torchvision.models.ConvNeXt(small, num_classes=20, layer_scale=0.5)).double()
    grouped = {n for n, m in model.named_modules() if isinstance(m, nn.Conv2d) and m.groups > 1}
    assert len(grouped) == 5
    check(model, images(2, 3, 64, 64).double(), (16, 16), 0.5, impl, grouped)


@pytest.mark.slow
def test_convnext_tiny(torchvision):
    torch.manual_seed(0)
    model = stirred(torchvision.models.convnext_tiny(num_classes=20, stochastic_depth_prob=0.0)).double()  # a layer that it skips has no gradient to compare
    grouped = {n for n, m in model.named_modules() if isinstance(m, nn.Conv2d) and m.groups > 1}
    check(model, images(1, 3, 64, 64).double(), (32, 32), 0.8, "cpu", grouped)
