"""Every error that fxmask raises, and its warning.

One root, so that `except fxmask.FxMaskError` catches all of it, but for the TypeError of a layer that is called with no tensor; each subclass is also the
builtin that a caller would expect. They live at the bottom of the import order because the kernels raise them too; users find them in `fxmask.errors`.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from types import FrameType

import torch

OTHERS_SAY = {  # their word, in papers and other libraries: ours
    "sparsity": "ratio",
    "block_size": "block",
    "norm": "criterion",
    "update_frequency": "refresh",
    "magnitude": "fro",
    "l2": "fro",
    "frobenius": "fro",
    "l1_norm": "l1",
    "max": "linf",
    "snip": "taylor",
    "straight_through": "ste",
}


class FxMaskError(Exception):
    """Root of all errors raised by fxmask."""


class ConfigError(FxMaskError, ValueError):
    """An argument or an option has a value that cannot be meant."""


class ShapeError(FxMaskError, ValueError):
    """Tensors do not fit together."""


class UnsupportedError(FxMaskError, NotImplementedError):
    """The request is clear, but this model, tensor or version cannot serve it."""


class StateError(FxMaskError, RuntimeError):
    """A call came at the wrong time: masks missing, masked twice, or steps needed and none announced."""


class FxMaskWarning(UserWarning):
    """Something legal that is probably not meant, such as a pattern that matches nothing."""


def message(what: str, where: str = "", fix: str = "") -> str:
    """Compose the house's error text: what is wrong, where, and how to fix it."""
    lines = [what]
    if where:
        lines.append(f"  where: {where}")
    if fix:
        lines.append(f"  fix: {fix}")
    return "\n".join(lines)


NOT_THE_USERS = (__name__.partition(".")[0], "torch", "contextlib")  # packages whose frames a warning passes over


def _is_not_the_users(frame: FrameType) -> bool:
    package = str(frame.f_globals.get("__name__")).partition(".")[0]
    return package in NOT_THE_USERS or frame.f_code.co_filename.startswith("<eval_with_key>")  # the code of a torch.fx graph


def warn(text: str) -> None:
    """Give an `FxMaskWarning` that points at the user's own line: at the nearest frame outside of this library and of PyTorch."""
    level = 2
    if not torch.compiler.is_dynamo_compiling():  # a graph looks at no frames
        frame = sys._getframe(1)
        while frame.f_back is not None and _is_not_the_users(frame):
            frame, level = frame.f_back, level + 1
    warnings.warn(text, FxMaskWarning, stacklevel=level)


def first_of(names: Sequence[str], most: int = 5) -> str:
    """Names for a message: the first few, and how many there are besides."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def meant(got: object, known: Iterable[str]) -> str:
    """`; did you mean 'ratio'?` where one of the `known` is what others call so, or is spelt nearly so; otherwise nothing."""
    words, text = list(known), str(got).lower()
    said = OTHERS_SAY.get(text)
    near = [said] if said in words else get_close_matches(text, words, 1)
    return f"; did you mean {near[0]!r}?" if near else ""
