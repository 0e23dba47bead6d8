"""Models with masks and scores of the user's own, for the tests."""

import torch
from sample_models import mlp

import fxmask


def net():
    return mlp(sizes=(64, 64, 64, 10))


def diagonal(rows=4, cols=4):
    mask = torch.eye(rows, cols, dtype=torch.bool)
    mask[0, -1] = True
    return mask


def scores():
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(7))


def best(s, k):
    """The k highest scores, by a plain sort."""
    return torch.zeros(s.numel(), dtype=torch.bool).scatter(0, s.flatten().argsort(descending=True, stable=True)[:k], True).view_as(s)


def masked(**options):
    return fxmask.apply(net(), **{"masks": {"0": diagonal()}, **options})


def mask_of(model, name="0.weight"):
    return fxmask.masks(model)[name]
