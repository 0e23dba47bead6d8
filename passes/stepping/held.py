"""What an optimiser holds, which others it wraps, and by what it moves weights: by identity, as training block by block exchanges parameters."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import LBFGS, Optimizer

from ..state import ranks


def ids_of(optimizer: Optimizer) -> tuple[int, ...]:
    """Of its parameters, in order. Cost: host work a parameter."""
    return tuple([id(p) for group in optimizer.param_groups for p in group["params"]])


def group_of(optimizer: Optimizer, weight: Tensor) -> dict[str, Any] | None:
    """The parameter group that holds a weight, by identity; None where none does."""
    return next((g for g in optimizer.param_groups if any(p is weight for p in g["params"])), None)


def has_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a step, whose arguments a hook sees, was given a closure: `args` begins with the optimiser."""
    return any(map(callable, (*args[1:], *kwargs.values())))


_known: weakref.WeakKeyDictionary[Optimizer, list[weakref.ref[Optimizer]]] = weakref.WeakKeyDictionary()


def find_wrapped(optimizer: Optimizer) -> list[Optimizer]:
    """The optimiser, and those that it has step parameters of its own, as SAM and Lookahead do: the momenta are theirs.

    Looked for among its attributes, and in lists, tuples and dicts of these. Kept for `with_wrapped`; cost: host work a parameter of those that wrap some.
    """
    found = [ranks.stepping(optimizer)]
    for outer in found:  # grows
        for value in () if is_torchs(outer) else vars(outer).values():
            kind = type(value)
            several = value if kind in (list, tuple) else value.values() if kind is dict else (value,)
            new = [o for o in several if issubclass(type(o), Optimizer) and not any(o is f for f in found)]
            found += [o for o in new if not set(ids_of(found[0])).isdisjoint(ids_of(o))]
    _known[optimizer] = [weakref.ref(o) for o in found]
    return found


def with_wrapped(optimizer: Optimizer) -> list[Optimizer]:
    """What `find_wrapped` has found last; a guard has it look once a step."""
    found = [o for ref in _known.get(optimizer, ()) if (o := ref()) is not None]
    return found or find_wrapped(optimizer)


def states_of(optimizer: Optimizer, weight: Tensor) -> list[Mapping[str, Any]]:
    """What an optimiser, and each of those that it wraps, keeps for a weight, in the same order while nobody looks anew. What they share is listed once."""
    if is_torchs(optimizer):  # wraps none
        return [optimizer.state.get(weight, {})]
    found: list[Mapping[str, Any]] = []
    for o in with_wrapped(optimizer):
        state = o.state.get(weight)
        found.append(state if isinstance(state, Mapping) and not any(state is other for other in found) else {})
    return found


def state_of(optimizer: Optimizer, weight: Tensor) -> dict[str, Any]:
    """All of that by name: of several of one name the outermost's."""
    return {k: v for state in reversed(states_of(optimizer, weight)) for k, v in state.items()}


def moves_by_grad(optimizer: Optimizer) -> bool:
    """Whether a step surely leaves a weight without a `.grad` alone: those of torch.optim's own classes do that look at no history (LBFGS).

    Others may keep gradients elsewhere (Megatron's main_grad), need none (zeroth order), decay every weight, or take gradients away at their end (SAM).
    """
    inner = ranks.stepping(optimizer)
    return is_torchs(inner) and not isinstance(inner, LBFGS)


def is_torchs(optimizer: Optimizer) -> bool:
    return f"{type(optimizer).__module__}.".startswith("torch.optim.")  # Muon and Adafactor name the package itself
