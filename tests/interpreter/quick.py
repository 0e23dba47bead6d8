"""Triton's interpreter without work that it repeats for nothing: half of its time. What a kernel computes, loads and stores is the same.

Written for Triton 3.6 and 3.7. It looks up the functions of `triton.language` anew at each launch and each call of a device function, and computes each sum and
product of integers once more in int64 to see whether it overflows, also where nobody asked for `debug` and the answer is thrown away.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


@functools.cache
def _builtins(package: Any) -> list[tuple[str, Any]]:
    return [(name, member) for name, member in inspect.getmembers(package) if tl.core.is_builtin(member)]


def _patch_builtin(package: Any, builder: Any, *scope: Any) -> None:
    for name, member in _builtins(package):
        if getattr(package, name) is member:  # else it is patched, as in a call from a kernel
            interpreter._patch_attr(package, name, member, builder, *scope)


def quicken() -> None:
    """For this process."""
    interpreter._patch_builtin = _patch_builtin
    options = interpreter.interpreter_builder.options
    if not options.debug:
        object.__setattr__(options, "sanitize_overflow", False)  # of a frozen dataclass
