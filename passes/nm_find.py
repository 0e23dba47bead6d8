"""Which layers an `NMMask` can have: Linears as for the other methods, and Conv2d."""

from __future__ import annotations

from torch import nn

from .find import IN_PROJ, Candidate, find, weight_problem
from .readers import weight_readers
from .weights import peek_weight


def find_layers(model: nn.Module) -> list[Candidate]:
    """Linears and Conv2ds of a model in its order, then the linear calls of its graphs. `skip` says why a Conv2d stays dense."""
    found = find(model)
    for c in found:
        if c.skip == IN_PROJ:
            c.skip = "its in_proj is a Parameter and no Linear"
        if c.module is not None and any(owner is c.module for owner in c.owners):
            c.skip = f"{type(c.module).__name__} has a forward of its own, which an N:M mask would not reach"
    readers = weight_readers(model, nn.Conv2d)
    convs = [_conv(name, m, readers.get(id(m), [])) for name, m in model.named_modules() if isinstance(m, nn.Conv2d)]
    place = {name: i for i, (name, _) in enumerate(model.named_modules())}
    return sorted([*found, *convs], key=lambda c: place.get(c.name, place.get(c.name.rpartition(".")[0], len(place))))


def _conv(name: str, m: nn.Conv2d, owners: list[nn.Module]) -> Candidate:
    lazy = isinstance(m, nn.modules.lazy.LazyModuleMixin)
    weight = nn.utils.skip_init(nn.Linear, 1, 1, device="meta").weight if lazy else peek_weight(m)
    problem = "its weight is not initialised yet; run one forward first" if lazy else weight_problem(weight)
    path = f"{name}.weight" if name else "weight"
    new = Candidate(name, path, weight, m, types=type(m).__mro__, problem=problem, masked="_fxmask_nm" in m.__dict__, owners=owners, quiet=True)
    if m.groups != 1:
        new.skip = f"a grouped convolution (groups={m.groups})"
    elif not new.masked and (type(m).forward is not nn.Conv2d.forward or type(m).__call__ is not nn.Module.__call__ or "forward" in m.__dict__):
        new.skip = f"{type(m).__name__} has a forward of its own, which an N:M mask would not reach"
    return new
