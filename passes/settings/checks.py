"""Checks of options. NumPy's numbers are taken, and made Python's own: a checkpoint could not hold them."""

from __future__ import annotations

import math
from numbers import Real
from typing import TypeGuard

from ...kernels.errors import ConfigError, meant
from ...kernels.grid import plain_int


def one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    """Raise ConfigError unless `value` is one of `allowed`."""
    if not isinstance(value, str) or value not in allowed:  # an array has no single truth
        raise ConfigError(f"unknown {name}: expected one of {', '.join(allowed)}, got {value!r}{meant(value, allowed) or '.'}")


def at_least(name: str, value: object, low: int, counts: str = "optimiser steps") -> int:
    """`value` as a plain int, which can be saved; ConfigError unless it is one of at least `low`."""
    n = plain_int(value)
    if n is None or n < low:
        raise ConfigError(f"{name} counts {counts}: expected an int of at least {low}, got {value!r}.")
    return n


def is_number(value: object) -> TypeGuard[float]:
    """Whether this is a finite real number, NumPy's among them; True and False are none, nor are numbers that no float can hold."""
    try:
        return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:
        return False
