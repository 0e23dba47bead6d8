"""What an optimiser holds, told by identity: parameters may be exchanged for as many others, as training block by block does."""

from __future__ import annotations

from torch.optim import Optimizer


def ids_of(optimizer: Optimizer) -> tuple[int, ...]:
    """Of its parameters, in order. Cost: host work a parameter."""
    return tuple([id(p) for group in optimizer.param_groups for p in group["params"]])
