"""A convolution as a product with the unfolded input: the numbers of PyTorch's own, masks included."""

import copy
import re
from types import SimpleNamespace

import pytest
import torch
import torchvision_shim
from torch import nn
from torch.nn import functional as F

import fxmask
from fxmask.kernels import unfolded
from fxmask.kernels.grid import expand_mask

CASES = {
    "3x3": dict(kernel_size=3),
    "stride, padding": dict(kernel_size=3, stride=2, padding=1),
    "oblong": dict(kernel_size=(3, 5), stride=(1, 2), padding=(2, 0), dilation=(2, 1), bias=False),
    "same": dict(kernel_size=(3, 5), padding="same"),
    "valid": dict(kernel_size=2, padding="valid", dilation=3),
    "patches": dict(kernel_size=4, stride=4),
    "1x1": dict(kernel_size=1, stride=2),
    "reflect": dict(kernel_size=3, padding=2, padding_mode="reflect"),
    "circular": dict(kernel_size=3, padding=(1, 2), padding_mode="circular"),
    "replicate": dict(kernel_size=5, padding=2, padding_mode="replicate", stride=3),
}


@pytest.mark.parametrize("case", CASES)
def test_outputs_and_gradients_are_the_layer_s(case):
    torch.manual_seed(0)
    m, x = nn.Conv2d(4, 6, **CASES[case]).double(), torch.randn(2, 4, 13, 12, dtype=torch.float64, requires_grad=True)
    w = torch.randn_like(m.weight).requires_grad_()
    want, got = m._conv_forward(x, w, m.bias), unfolded.conv2d(x, m, w)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(unfolded.conv2d(x, m), m(x))
    torch.testing.assert_close(unfolded.conv2d(x[0], m), m(x[0]))
    for a, b in zip(torch.autograd.grad(got.square().sum(), (x, w)), torch.autograd.grad(want.square().sum(), (x, w)), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("shape", [(2, 4, 9, 7), (1, 4, 9, 7), (4, 9, 7), (3, 4, 4, 4)])
def test_strides_are_the_layer_s(shape):
    for of_weight in (torch.contiguous_format, torch.channels_last):
        m = nn.Conv2d(4, 6, 4, 4).to(memory_format=of_weight)
        for x in (torch.randn(shape), torch.randn(shape).transpose(-1, -2).contiguous().transpose(-1, -2)):
            assert unfolded.conv2d(x, m).stride() == m(x).stride()


def test_the_product_gets_a_matrix_and_tokens():
    """So a 2:4 weight can stand there: rows of c_in * kh * kw, in the order in which NMMask groups them."""
    seen = []

    def product(patches, matrix, bias):
        seen.append((tuple(patches.shape), tuple(matrix.shape)))
        return F.linear(patches, matrix, bias)

    dense, x = nn.Sequential(nn.Conv2d(4, 16, 3, padding=1)), torch.randn(2, 4, 6, 5)
    model = fxmask.apply(copy.deepcopy(dense), fxmask.NMMask(2, 4)).eval()
    matrix = torch.where(fxmask.masks(model)["0.weight"], dense[0].weight, 0).flatten(1)
    torch.testing.assert_close(unfolded.conv2d(x, dense[0], matrix, product), model(x))
    assert seen == [((2, 30, 36), (16, 36))] and ((matrix.reshape(16, 9, 4) != 0).sum(2) == 2).all()


def test_what_is_a_matrix_already_reaches_the_product_as_it_is():
    """A packed weight may know no flattening."""
    m, x, packed, seen = nn.Conv2d(4, 16, 3), torch.randn(2, 4, 6, 5), SimpleNamespace(dim=lambda: 2), []
    y = unfolded.conv2d(x, m, packed, lambda patches, matrix, bias: seen.append(matrix) or F.linear(patches, m.weight.flatten(1), bias))
    torch.testing.assert_close(y, m(x))
    assert seen[0] is packed


def test_a_resnet_predicts_the_same(monkeypatch):
    torch.manual_seed(0)
    torchvision_shim.import_torchvision()
    from torchvision.models import resnet18

    model, x = resnet18(num_classes=50).eval(), torch.randn(4, 3, 64, 64)
    with torch.no_grad():
        want, calls = model(x), []
        monkeypatch.setattr(nn.Conv2d, "forward", lambda m, x: calls.append(m) or unfolded.conv2d(x, m))
        got = model(x)
    assert len(calls) == 20 and torch.equal(got.argmax(1), want.argmax(1))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_wrong_use():
    with pytest.raises(fxmask.FxMaskError, match="of 2 groups has a matrix for each"):
        unfolded.conv2d(torch.randn(1, 4, 5, 5), nn.Conv2d(4, 4, 3, groups=2))
    for shape in ((1, 3, 5, 5), (2, 1, 4, 5, 5), (4, 5)):
        with pytest.raises(fxmask.FxMaskError, match=re.escape(f"expected (B, 4, H, W) or (4, H, W), got {shape}")):
            unfolded.conv2d(torch.randn(shape), nn.Conv2d(4, 4, 3))


@pytest.mark.parametrize("config", [fxmask.NMMask(2, 4), fxmask.WeightMask(ratio=0.5, block=(4, 4))], ids=["2:4", "blocks"])
def test_a_masked_layer_is_not_taken_for_a_dense_one(config):
    model, x = fxmask.apply(nn.Sequential(nn.Conv2d(16, 16, 3)), config, layers=nn.Conv2d), torch.randn(2, 16, 5, 5)
    with pytest.raises(fxmask.FxMaskError, match="expected W∘M in `weight`, got None"):
        unfolded.conv2d(x, model[0])
    y = model(x)
    (mask,) = fxmask.masks(model).values()
    kept = mask if mask.dim() == 4 else expand_mask(mask, model[0].weight.shape, (4, 4))
    torch.testing.assert_close(unfolded.conv2d(x, model[0], torch.where(kept, model[0].weight, 0)), y)
    fxmask.finalize(model)
    torch.testing.assert_close(unfolded.conv2d(x, model[0]), y)
