"""Which linears a pattern selects: globs, `re:` patterns, module types and callables."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import nn

from ...kernels.errors import ConfigError, message
from .candidate import Candidate, linear_like

Pattern = str | type[nn.Module] | Callable[[nn.Module | None, str], bool]
Patterns = Pattern | Sequence[Pattern] | None


def matches(pattern: Pattern, c: Candidate) -> bool:
    """Whether one pattern (glob, `re:`, module type, or callable of module and name) selects a linear; a type does by its own or by that of a module around it.

    A linear whose weight the graph computes goes by its module's name, and exactly by that of its call, which is its name in `explain` once it is masked.
    A linear that no module makes, and a packed projection, is shown to callables as an nn.Linear of its shape, on the meta device.
    """
    if isinstance(pattern, str):
        if pattern.startswith("re:"):
            return re.search(pattern[3:], c.name) is not None
        return pattern in c.names or fnmatch.fnmatchcase(c.name, pattern)
    if isinstance(pattern, type):
        return issubclass(pattern, nn.Module) and (pattern in c.types or pattern in c.inside)
    try:
        return bool(pattern(_shown(c), c.name))
    except Exception as e:  # one of its own, or of arguments that it does not take
        what = f"a pattern failed: expected a callable (module, name) -> bool, got {type(e).__name__}: {e}"
        raise ConfigError(message(what, c.name, f"write it as def pattern(module, name); here it is {pattern!r}.")) from e


def exact_name(patterns: Iterable[Pattern], c: Candidate) -> str | None:
    """The first of some patterns that is an exact name of a linear."""
    return next((p for p in patterns if isinstance(p, str) and p in c.names), None)


def matches_other(pattern: Pattern, c: Candidate) -> bool:
    """Whether a pattern selects what is no linear; callables are written for linears, and are not asked."""
    return isinstance(pattern, (str, type)) and matches(pattern, c)


def _shown(c: Candidate) -> nn.Module | None:
    return c.module if c.module is not None or c.weight.dim() != 2 else linear_like(c.weight)


def as_patterns(option: str, patterns: Patterns) -> list[Pattern] | None:
    """One pattern or a sequence of them, checked; None stays None."""
    if patterns is None:
        return None
    listed: list[Any] = list(patterns) if isinstance(patterns, (list, tuple, set, frozenset)) else [patterns]
    for p in listed:
        if isinstance(p, str) and p.startswith("re:"):
            try:
                re.compile(p[3:])
            except re.error as e:
                raise ConfigError(f"{option}: {p!r} is no regular expression: {e}.") from None
        elif not (isinstance(p, str) or callable(p)) or isinstance(p, nn.Module):
            raise ConfigError(f"{option}: expected a glob, a 're:' pattern, a module type or a callable (module, name) -> bool, got {p!r}.")
    return listed
