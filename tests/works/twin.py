"""A masked model beside its twin: a dense copy with W∘M written in, by the definition of a mask, which runs without fxmask."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from sample_models import Residual, best_blocks, mlp
from torch import Tensor, nn

import fxmask

RATIO, BLOCK = 0.5, (16, 16)
Results = dict[str, Tensor]


def encoder() -> nn.Module:
    """A layer of attention: the weight of its out_proj is read and never called."""
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (mlp, (6, 64)),
    "residual": (Residual, (3, 32, 32)),
    "encoder": (encoder, (3, 10, 32)),
}


def slow_but(values: Iterable[Any], *fast: Any) -> list[Any]:
    """Parameters of a test, of which all but some are slow."""
    return [v if v in fast else pytest.param(v, marks=pytest.mark.slow) for v in values]


def some(*shape: int, seed: int = 2) -> Tensor:
    """The same random numbers every time."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def elements(w: Tensor, ratio: float = RATIO, block: tuple[int, int] = BLOCK) -> Tensor:
    """Which elements of a weight are kept."""
    blocks = best_blocks(w, block, ratio)
    return blocks.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[: w.shape[0], : w.shape[1]]


def pair(model: nn.Module, **options: Any) -> tuple[nn.Module, nn.Module, dict[str, Tensor]]:
    """(the model, masked; its twin; the kept elements of each masked weight)."""
    twin, kept = copy.deepcopy(model), {}
    for name, m in twin.named_modules():
        if isinstance(m, nn.Linear) and min(m.weight.shape) >= 16:
            kept[f"{name}.weight"] = elements(m.weight)
            m.weight.data.mul_(kept[f"{name}.weight"])
    masked = fxmask.apply(model, **{"ratio": RATIO, "block": BLOCK, **options})
    assert list(fxmask.masks(masked)) == list(kept)
    return masked, twin, kept


def results(call: Callable[..., Any], model: nn.Module, x: Tensor, seed: int = 3) -> Results:
    """Output, and gradients of input and parameters, with the same random numbers in every call."""
    x = x.clone().requires_grad_()
    model.zero_grad()
    torch.manual_seed(seed)
    y = call(x)
    (y.float() * some(*y.shape, seed=4)).sum().backward()  # a sum of squares has next to no gradient behind a layer norm
    return {"output": y.detach(), "input": x.grad, **gradients(model)}


def gradients(model: nn.Module) -> Results:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def check(found: Results, twin: Results, kept: dict[str, Tensor], limit: float = 1e-5) -> None:
    """Equal, but for rounding; the gradient of a masked weight is its twin's where it is kept, and zero elsewhere."""
    assert found.keys() == twin.keys() and kept.keys() <= found.keys() | {"output"}
    for name, b in twin.items():
        near(found[name], b * kept[name] if name in kept else b, limit, name)
        assert name not in kept or not found[name][~kept[name]].any(), name


def near(a: Tensor, b: Tensor, limit: float = 1e-5, name: str = "") -> None:
    """Equal but for rounding: as a whole, since single elements may be close to zero."""
    assert a.shape == b.shape and a.dtype == b.dtype, name
    assert b.any(), f"{name}: zeros show nothing"
    assert (a.double() - b.double()).norm() <= limit * b.double().norm(), name
