"""A small model with N:M masks in each mode, and what the tests ask of it."""

import copy

import torch
from torch import nn

MODES = {
    "magnitude": dict(),
    "transposable": dict(transposable=True),
    "sr-ste": dict(mode="sr-ste", decay=0.1),
    "permuted": dict(mode="permuted"),
    "learned": dict(mode="learned", train_weights=True),
    "soft": dict(mode="learned", soft=True, train_weights=True),
    "reordered": dict(mode="learned", permute=True, train_weights=True),
}


def net(dtype=torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(4, 16, 3, padding=1, stride=2), nn.GELU(), nn.Flatten(), nn.Linear(256, 32), nn.GELU(), nn.Linear(32, 10)).to(dtype)


def batch(dtype=torch.float64) -> torch.Tensor:
    return torch.randn(3, 4, 8, 8, dtype=dtype, generator=torch.Generator().manual_seed(1))


def grads(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    x = x.detach().requires_grad_()
    y = model(x)
    y.square().sum().backward()
    return {"y": y.detach(), "x": x.grad} | {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def with_zeros(dense: nn.Module, masks: dict[str, torch.Tensor]) -> nn.Module:
    twin = copy.deepcopy(dense)
    for name, mask in masks.items():
        twin.get_parameter(name).data.masked_fill_(~mask, 0)
    return twin


def logits_of(model: nn.Module) -> list[nn.Parameter]:
    return [p for n, p in model.named_parameters() if n.endswith("nm_logits")]
