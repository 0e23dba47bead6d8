"""What the checks of a sweep file share: the error, and what is said of keys and values."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fxmask import FxMaskError


class SweepError(FxMaskError):
    """A sweep file, or a folder of runs, is not as it must be; the message says what, where, and how to fix it."""


def known(where: str, keys: Iterable[str], expected: Iterable[str]) -> None:
    """All keys are expected ones."""
    expected = list(expected)
    for key in keys:
        if key not in expected:
            near = difflib.get_close_matches(key, expected, 1)
            fix = f"did you mean {near[0]!r}? " if near else ""
            raise SweepError(f"{where}: expected keys among {', '.join(expected)}, got {key!r}.\n  fix: {fix}Correct it, or leave it out.")


def pairs(items: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """A dict whose keys are distinct."""
    found: dict[str, Any] = {}
    for key, value in items:
        if key in found:
            raise SweepError(f"{key}: expected each key once, got it twice.\n  fix: remove one of them.")
        found[key] = value
    return found


def text(value: Any) -> str:
    """A scalar as text; none, null and ~ are no value."""
    said = str(value).lower() if isinstance(value, bool) else str(value).strip()
    return "" if said.lower() in ("none", "null", "~") else said


def place(value: str) -> Path:
    """A path, with variables and ~ put in."""
    return Path(os.path.expandvars(value)).expanduser()


def kind(value: Any) -> str:
    """A value, as an error names it."""
    return f"a list of {len(value)}" if isinstance(value, list) else "keys with values" if isinstance(value, dict) else repr(value)


def whole(where: str, value: str, least: int = 0) -> int:
    """A whole number."""
    if not value.isdecimal() or int(value) < least:
        raise SweepError(f"{where}: expected a whole number of at least {least}, got {value!r}.")
    return int(value)


def number(where: str, value: str) -> str:
    """The text of a finite number that is not negative; 1e-4 is one."""
    try:
        if 0 <= float(value) < float("inf"):
            return value
    except ValueError:
        pass
    raise SweepError(f"{where}: expected a number that is not negative, got {value!r}.")
