"""Reading a set of weak references while other threads add to it."""

from __future__ import annotations

import weakref
from typing import TypeVar

T = TypeVar("T")


def alive(members: weakref.WeakSet[T]) -> list[T]:
    """The members of a set, whose own iteration fails where another thread adds one."""
    references = list(members.data)  # type: ignore[attr-defined]  # no tuple, whose making may collect members, and so change the set
    return [m for known in references if (m := known()) is not None]
