"""Which layers an `NMMask` can have: Linears as for the other methods, and Conv2d."""

from __future__ import annotations

from torch import nn

from .candidate import IN_PROJ, Candidate
from .conv import convs, leave_out, merged
from .find import find


def find_nm(model: nn.Module, kinds: tuple[type[nn.Module], ...]) -> list[Candidate]:
    """Linears and Conv2ds of a model in its order, then the linear calls of its graphs. `skip` says why a layer stays dense."""
    found = find(model)
    for c in found:
        if c.skip == IN_PROJ:
            c.skip = "its in_proj is a Parameter and no Linear"
        if c.reads_itself:
            c.skip = f"{type(c.module).__name__} has a forward of its own, which a mask would not reach"
    others = list(convs(model))
    for c in others:
        c.quiet, c.sized = True, False  # NMMask takes them unasked, of any size
    return leave_out(merged(model, found, others), kinds)
