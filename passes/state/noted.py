"""Which masked, pruned, dropping or N:M layers run while somebody asks: `fxmask.graphed` asks while it captures a step, with some that no guard knows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

_notes: list[nn.Module] | None = None


def note(m: nn.Module) -> None:
    """A layer's forward runs; code that is compiled notes nothing."""
    if not torch.compiler.is_compiling() and _notes is not None:
        _notes.append(m)


@contextmanager
def noting() -> Iterator[list[nn.Module]]:
    """Inside, forwards note their layers in the list that this gives."""
    global _notes
    before, _notes = _notes, []
    try:
        yield _notes
    finally:
        _notes = before
