"""What an optimiser holds, told by identity (parameters may be exchanged for as many others, as training block by block does), and what it moves weights by."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ..state import ranks


def ids_of(optimizer: Optimizer) -> tuple[int, ...]:
    """Of its parameters, in order. Cost: host work a parameter."""
    return tuple([id(p) for group in optimizer.param_groups for p in group["params"]])


def with_wrapped(optimizer: Optimizer) -> Iterator[Optimizer]:
    """The optimiser, and the one that it wraps and has step its own parameters, as SAM and Lookahead do, whose momenta are there."""
    while True:
        optimizer = ranks.stepping(optimizer)
        yield optimizer
        inner = [o for o in vars(optimizer).values() if isinstance(o, Optimizer) and o is not optimizer]
        first = next(iter(ids_of(optimizer)), None)
        found = next((o for o in inner if next(iter(ids_of(o)), None) == first), None)
        if found is None:
            return
        optimizer = found


def state_of(optimizer: Optimizer, weight: Tensor) -> dict[str, Any]:
    """What an optimiser, or the one that it wraps, keeps for a weight; the dict itself where one of them does."""
    if _is_torchs(optimizer):  # wraps none
        own: dict[str, Any] = optimizer.state.get(weight, {})
        return own
    found = [s for o in with_wrapped(optimizer) if (s := o.state.get(weight))]
    return found[0] if len(found) == 1 else {k: v for s in found for k, v in s.items()}


def moves_by_grad(optimizer: Optimizer) -> bool:
    """Whether a step surely leaves a weight without a `.grad` alone: torch.optim's own classes do.

    Others may keep gradients elsewhere (Megatron's main_grad), need none (zeroth order), decay every weight, or take gradients away at their end (SAM).
    """
    return all(map(_is_torchs, with_wrapped(optimizer)))


def _is_torchs(optimizer: Optimizer) -> bool:
    return type(optimizer).__module__.startswith("torch.optim.")
