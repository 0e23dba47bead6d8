"""Walk over the masks of a model, whatever form their layers have."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn
from torch.fx import GraphModule

from .kernels.errors import StateError, UnsupportedError, message
from .loads import watch_loads
from .passes.site import Site, graph_sites
from .passes.weights import peek_weight
from .swap import MaskedLinear

REASONS = "_fxmask_reasons"  # on the model that apply was given: {name: why a linear stays dense}


def sites(model: nn.Module) -> Iterator[tuple[str, Site, Tensor | None]]:
    """(parameter's name, mask's owner, dense weight) of every masked weight; the weight is None where a graph computes it."""
    for prefix, m in model.named_modules():
        dot = f"{prefix}." if prefix else ""
        if isinstance(m, MaskedLinear):
            yield f"{dot}weight", m, peek_weight(m)
        elif isinstance(m, GraphModule):
            watch_loads(m)  # pickling a graph module loses the hooks of its root
            for site, weight in graph_sites(m):
                yield dot + site._fxmask_name, site, weight


def any_masked(model: nn.Module) -> bool:
    """Whether anything in the model is masked."""
    return any(isinstance(m, Site) for m in model.modules())


def required_sites(model: nn.Module, caller: str) -> list[tuple[str, Site, Tensor | None]]:
    """The masks of a model; StateError where there are none."""
    found = list(sites(model))
    if not found:
        what = f"{caller}: nothing is masked in this model: expected one that fxmask.apply has changed."
        raise StateError(message(what, type(model).__name__, "call fxmask.apply(model, ...) first."))
    return found


def values_of(name: str, weight: Tensor | None, caller: str) -> Tensor:
    """The weight, where it has values; UnsupportedError for a meta tensor, and where a graph computes it."""
    if weight is None:
        what = f"{caller} needs the weight's values: expected a parameter, but this graph computes the weight."
        raise UnsupportedError(message(what, name, "call fxmask.apply on the nn.Module instead of its trace."))
    if weight.is_meta:
        what = f"{caller} needs the weight's values: expected real memory, got a meta tensor."
        raise UnsupportedError(message(what, name, "materialise the model first (to_empty, then load_state_dict)."))
    return weight


