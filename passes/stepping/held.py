"""What an optimiser holds, told by identity: parameters may be exchanged for as many others, as training block by block does. And what still lives."""

from __future__ import annotations

import weakref
from typing import TypeVar

from torch.optim import Optimizer

T = TypeVar("T")


def ids_of(optimizer: Optimizer) -> tuple[int, ...]:
    """Of its parameters, in order. Cost: host work a parameter."""
    return tuple([id(p) for group in optimizer.param_groups for p in group["params"]])


def alive(members: weakref.WeakSet[T]) -> list[T]:
    """The members of a set, whose own iteration fails where another thread adds one."""
    references = list(members.data)  # type: ignore[attr-defined]  # no tuple, whose making may collect members, and so change the set
    return [m for known in references if (m := known()) is not None]
