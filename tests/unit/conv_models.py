"""A small convolutional model, its masked form, and a dense copy of that, for the tests of masks on Conv2d."""

import copy

import torch
from torch import nn

import fxmask
from fxmask import WeightMask
from fxmask.kernels.grid import expand_mask

BOTH = (nn.Linear, nn.Conv2d)
BLOCK = (8, 16)


def net(dtype=torch.float64, norm=False):
    """3x3, 1x1 of stride 2, 3x3 in circular padding, patches, and a Linear."""
    torch.manual_seed(0)
    first = nn.Conv2d(4, 24, 3, padding=1)
    layers = [first, nn.GELU(), nn.Conv2d(24, 32, 1, stride=2, bias=False), nn.GELU(), nn.Conv2d(32, 16, 3, padding="same", padding_mode="circular")]
    layers += [nn.BatchNorm2d(16) if norm else nn.GELU(), nn.Conv2d(16, 24, 2, 2), nn.Flatten(), nn.Linear(96, 20)]
    return nn.Sequential(*layers).to(dtype)


CONVS = ["0.weight", "2.weight", "4.weight", "6.weight"]


def images(dtype=torch.float64, n=3):
    return torch.randn(n, 4, 8, 8, generator=torch.Generator().manual_seed(1), dtype=dtype)


def masked(layers=BOTH, model=None, **options):
    return fxmask.apply(net() if model is None else model, WeightMask(**{"ratio": 0.5, "block": BLOCK, **options}), layers=layers)


def twin_of(model, dense):
    """A dense copy with W∘M written in."""
    twin = copy.deepcopy(dense)
    for name, mask in fxmask.masks(model).items():
        w = twin.get_parameter(name)
        w.data.copy_(torch.where(expand_mask(mask, w.shape, BLOCK), model.get_parameter(name).data, 0))
    return twin


def backward(model, x):
    x = x.clone().requires_grad_()
    model.zero_grad()
    y = model(x)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]
