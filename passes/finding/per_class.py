"""What is found out about a class once, and forgotten with it: notebooks and factory functions define classes anew, and these hold what they close over."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

R = TypeVar("R")


def per_class(f: Callable[[Any], R]) -> Callable[[Any], R]:
    """Decorator: remembers the answer for each class, as `functools.cache` does, without keeping the class. The answer must not hold the class, either."""
    known: weakref.WeakKeyDictionary[Any, R] = weakref.WeakKeyDictionary()

    @wraps(f)
    def found(cls: Any) -> R:
        if cls not in known:
            known[cls] = f(cls)
        return known[cls]

    return found
