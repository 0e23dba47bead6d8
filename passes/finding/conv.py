"""Where the convolutions of a model are: Conv2d modules, which masks take by class swap, and calls in traced graphs, which they leave alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ...kernels.errors import ConfigError
from ..graphs.graph_calls import call_stack, resolve, weight_arg
from ..state.site import Site
from .candidate import REPLACED, Candidate, join
from .find import find
from .graph_linears import graph_modules
from .readers import weight_readers
from .weights import weight_or_problem

KINDS: tuple[type[nn.Module], ...] = (nn.Linear, nn.Conv2d)
CONVS = {F.conv2d, torch.ops.aten.conv2d.default, torch.ops.aten.conv2d.padding, torch.ops.aten.convolution.default}
IN_GRAPH = "a convolution call in a traced graph; call fxmask.apply on the nn.Module, or on a trace that keeps it as a module"
READ = "its owner reads its weight and never calls it"
Kinds = type[nn.Module] | Sequence[type[nn.Module]] | None


def kinds_of(layers: Kinds, default: tuple[type[nn.Module], ...] = (nn.Linear,)) -> tuple[type[nn.Module], ...]:
    """The option `layers` as a tuple of `KINDS`; ConfigError for what is none."""
    if layers is None:
        return default
    given: Any = tuple(layers) if isinstance(layers, (tuple, list, set, frozenset)) else (layers,)
    if not given or any(not isinstance(k, type) or k not in KINDS for k in given):
        raise ConfigError(f"layers: expected torch.nn.Linear, torch.nn.Conv2d, or both in a tuple, got {layers!r}; include= selects among them by name.")
    return given


def find_layers(model: nn.Module, kinds: tuple[type[nn.Module], ...]) -> list[Candidate]:
    """Linears, and Conv2ds where they are asked for, in the model's order, then those of its graphs. Linears that are not asked for are there and say so."""
    found = find(model)
    return leave_out(found if nn.Conv2d not in kinds else merged(model, found, [*convs(model), *_calls(model)]), kinds)


def leave_out(found: list[Candidate], kinds: tuple[type[nn.Module], ...]) -> list[Candidate]:
    """The candidates, those of other kinds with that reason to stay dense."""
    for c in found:
        if (nn.Conv2d if nn.Conv2d in c.types else nn.Linear) not in kinds:
            c.skip, c.problem, c.quiet = "not in layers", "", True
    return found


def merged(model: nn.Module, linears: list[Candidate], others: list[Candidate]) -> list[Candidate]:
    """Candidates in the order of the model's modules, those of none last."""
    place = {name: i for i, (name, _) in enumerate(model.named_modules())}
    return sorted([*linears, *others], key=lambda c: place.get(c.name, place.get(c.name.rpartition(".")[0], len(place))))


def convs(model: nn.Module) -> Iterator[Candidate]:
    """Every Conv2d. `skip` says why one stays dense."""
    readers = weight_readers(model, nn.Conv2d)
    for name, m in model.named_modules():
        if isinstance(m, nn.Conv2d):
            yield _conv(name, m, readers.get(id(m), []))


def _conv(name: str, m: nn.Conv2d, owners: list[nn.Module]) -> Candidate:
    weight, problem = weight_or_problem(m)
    masked = isinstance(m, Site) or "_fxmask_nm" in m.__dict__
    new = Candidate(name, join(name, "weight"), weight, m, types=type(m).__mro__, problem=problem, masked=masked)
    if m.groups != 1:
        new.skip, new.quiet, new.sized = f"a grouped convolution (groups={m.groups})", True, False
    elif "forward" in m.__dict__:
        new.skip = REPLACED
    elif not masked and (type(m).forward is not nn.Conv2d.forward or type(m).__call__ is not nn.Module.__call__):
        new.skip = f"{type(m).__name__} has a forward of its own, which a mask would not reach"
    elif owners:
        new.skip = READ
    return new


def _calls(model: nn.Module) -> Iterator[Candidate]:
    """Convolutions that a graph calls as functions, one for each weight: all are left alone."""
    for prefix, gm in graph_modules(model):
        seen = set()
        for node in gm.graph.nodes:
            if node.op != "call_function" or node.target not in CONVS:
                continue
            w = weight_arg(node)
            held = isinstance(w, torch.fx.Node) and w.op == "get_attr"
            path = str(w.target) if held else f"{call_stack(node)[0] or node.name}.weight"
            if path not in seen:
                seen.add(path)
                weight = resolve(gm, path) if held else torch.empty(0, 0, device="meta")
                yield Candidate(join(prefix, path.removesuffix(".weight")), join(prefix, path), weight, host=gm, types=nn.Conv2d.__mro__, skip=IN_GRAPH)
