"""What every capture of a model shares: how a miss is told, and the masks of weights that `apply` leaves dense and a graph does not."""

from __future__ import annotations

import torch
from torch import nn

from zoo.checks import OUT_OF_MEMORY, Subject, reason, some
from zoo.equality import Masks, element_masks, masked_copy

COMPUTED = " (a computed weight)"
STOCK = "stock PyTorch: "  # how a reason begins that is not fxmask's


def by_stock_pytorch(error: BaseException) -> str:
    """Why stock PyTorch fails; a limit of this process is nobody's fault."""
    why = reason(error)
    return why if why == OUT_OF_MEMORY else STOCK + why


def masks_of(s: Subject, sites: set[str]) -> Masks:
    """Those of `apply`, and of weights that a graph masks beside them."""
    return {name: s.masks[name] if name in s.masks else as_linear(s.model.get_parameter(name)) for name in sites}


def as_linear(weight: torch.Tensor) -> torch.Tensor:
    """The mask of a weight, as an nn.Linear's would be."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight = nn.Parameter(weight.detach().clone())
    return element_masks(masked_copy(nn.Sequential(layer)))["0.weight"]


def difference(found: set[str], expected: set[str]) -> list[str]:
    """Sites that are not those of `apply`."""
    less, more = expected - found, found - expected
    return [f"not masked: {some(less)}"] * bool(less) + [f"masked, and not by apply: {some(more)}"] * bool(more)
