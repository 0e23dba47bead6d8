"""Which masked, pruned, dropping or N:M layers run while somebody asks: `fxmask.graphed` asks while it captures a step, with some that no guard knows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_notes: list[object] | None = None


def note(m: object) -> None:
    """A layer's forward runs, or a guard's optimiser has stepped; code that is compiled notes nothing."""
    if not torch.compiler.is_compiling() and _notes is not None:
        _notes.append(m)


@contextmanager
def noting() -> Iterator[list[object]]:
    """Inside, forwards note their layers, and steps their guards, in the list that this gives."""
    global _notes
    before, _notes = _notes, []
    try:
        yield _notes
    finally:
        _notes = before
