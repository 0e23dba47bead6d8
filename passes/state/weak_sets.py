"""Reading a set of weak references, or a dict by them, while other threads add to it."""

from __future__ import annotations

import weakref
from typing import Any, TypeVar

T = TypeVar("T")


def alive(members: weakref.WeakSet[T] | weakref.WeakKeyDictionary[T, Any]) -> list[T]:
    """The members, or keys. Their own iteration fails where another thread adds one."""
    references = list(members.data)  # type: ignore[union-attr]  # no tuple, whose making may collect members, and so change the set
    return [m for known in references if (m := known()) is not None]
