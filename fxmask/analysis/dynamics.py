"""What a step does for masks that score, fade or change weights, and the tables leave out: said in words."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from ..passes.state.saliency import GIVEN
from ..passes.state.site import Site


@contextmanager
def cut_off(model: Any) -> Iterator[list[Site]]:
    """Inside, soft masks cut their blocks off as they do from the ramp's end on; gives those that are on their ramp."""
    fading = [m for m in model.modules() if isinstance(m, Site) and m._fxmask_softening] if isinstance(model, nn.Module) else []
    for site in fading:
        site._fxmask_softening = False
    try:
        yield fading
    finally:
        for site in fading:
            site._fxmask_softening = True


def said_of(found: Iterable[Site], fading: list[Site]) -> list[str]:
    """Notes for a report."""
    notes = []
    if fading:
        end = max(s._fxmask_config.softened_from or 0 for s in fading)
        what = f"{len(fading)} soft masks are on their ramp and compute densely until step {end}; they are counted as they will be from then on."
        notes.append(what)
    scored = [s for s in found if (c := s._fxmask_config).remembers and (c.criterion != GIVEN or c.gain)]
    if scored:
        what = f"{len(scored)} masks take in scores, or change their weights, between steps; the bytes of that are not counted"
        reads = "kernels read weight and gradient at most once a step, and the weight once at a rebuild; plain PyTorch, as for momenta and gain, several times"
        notes.append(f"{what}: {reads}.")
    return notes
