"""PyTorch's two other ways to convert a module's parameters: swapped in place (`torch.utils.swap_tensors`), or replaced by new ones.

A parameter that is replaced is no longer the optimiser's, with masks or without.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

import fxmask

WAYS = {"swap": torch.__future__.set_swap_module_params_on_conversion, "overwrite": torch.__future__.set_overwrite_module_params_on_conversion}


@contextmanager
def converting(way: str) -> Iterator[None]:
    """The process-wide setting, inside."""
    WAYS[way](True)
    try:
        yield
    finally:
        WAYS[way](False)


def masked_model() -> nn.Sequential:
    """A masked linear, and a head that apply leaves dense."""
    torch.manual_seed(0)
    return fxmask.apply(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)), ratio=0.5, block=(16, 16))


def left_out(model: nn.Module) -> Tensor:
    """Elements of the masked weight that its mask leaves out."""
    return ~fxmask.masks(model)["0.weight"].repeat_interleave(16, 0).repeat_interleave(16, 1)


def steps(model: nn.Module, optimiser: torch.optim.Optimizer, x: Tensor, n: int = 2) -> None:
    """So many steps on one batch."""
    for _ in range(n):
        optimiser.zero_grad()
        model(x).square().mean().backward()
        optimiser.step()


@pytest.mark.parametrize("way", WAYS)
def test_a_converted_model_trains_as_one_that_was_made_so(way: str) -> None:
    x = torch.randn(8, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with converting(way):
        model = masked_model().to(torch.float64)
    twin = masked_model().to(torch.float64)
    for m in (model, twin):
        optimiser = torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9)
        fxmask.guard(optimiser, m)
        steps(m, optimiser, x)
    assert torch.equal(model(x), twin(x))
    assert not torch.equal(model[0].weight, masked_model()[0].weight.double())


def test_swapped_between_steps_guard_and_optimiser_keep_their_weights() -> None:
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
    model = masked_model()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    fxmask.guard(optimiser, model)
    steps(model, optimiser, x)
    weight = model[0].weight
    masked, before = left_out(model), weight.detach().clone()
    optimiser.zero_grad()
    with converting("swap"):
        model.to(torch.float64)
    for state in optimiser.state.values():
        state["momentum_buffer"] = state["momentum_buffer"].double()
    steps(model, optimiser, x.double())
    assert model[0].weight is weight
    assert weight.dtype == torch.float64
    assert not torch.equal(weight, before.double())
    held = left_out(model) & masked
    assert held.any()
    assert torch.equal(weight[held], before.double()[held])


@pytest.mark.parametrize("way", WAYS)
def test_a_state_dict_is_loaded(way: str) -> None:
    model, other = masked_model(), masked_model()
    with torch.no_grad():
        other[0].weight.mul_(2)
    state = {k: v.clone() for k, v in other.state_dict().items()}
    with converting(way):
        assert not model.load_state_dict(state).missing_keys
    assert torch.equal(model[0].weight, other[0].weight)
    assert torch.equal(model(torch.ones(2, 64)), other(torch.ones(2, 64)))
