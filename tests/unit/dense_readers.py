"""Modules that read a layer's weight where no source says so, and one that calls its layer."""

import torch
from torch import nn
from torch.nn import functional as F

import fxmask


def layer_of(owner):
    """Whose layer this is, no method's code says."""
    return owner.inner


class Reader(nn.Module):
    """Somebody's layer that fxmask has never heard of: it never calls its Linear, and its source does not say whose weight it reads."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(64, 64)

    def forward(self, x):
        inner = layer_of(self)
        return torch.addmm(inner.bias, x, inner.weight.t())


class Calls(nn.Module):
    """Calls its layer."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(64, 64)

    def forward(self, x):
        return F.gelu(self.inner(x))


def model(layer):
    torch.manual_seed(0)
    return fxmask.apply(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), layer), ratio=0.5)


def loss(m):
    return m(torch.randn(4, 64)).square().mean()
