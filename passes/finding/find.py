"""Where the linears of a model are: modules, and linear calls in FX graphs. Nothing is changed here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node
from torch.nn.utils import parametrize

from ..graphs.graph_calls import EMBEDDINGS, resolve
from ..graphs.graph_site import graph_sites
from ..graphs.regions import given_to, incoming
from ..state.site import Site
from .candidate import CHANGED, IN_PROJ, IN_PROJ_WEIGHTS, OWNER_REPLACED, REPLACED, Candidate, base_of, join
from .graph_linears import around, graph_modules, in_graph, in_products, is_plain, rewritten, used_outside
from .made import constants_of
from .plain_forward import computes_linear
from .readers import weight_readers, writes_to
from .weights import LAZY, weight_or_problem

QUANTISED = "its weight is quantised; mask the float model first, then quantise"


def find(model: nn.Module) -> list[Candidate]:
    """All linears of a model, in the model's order, then those of its graphs."""
    graphs = list(graph_modules(model))
    outside, comes_in, constants = used_outside(model, graphs), incoming(graphs), constants_of(gm for _, gm in graphs)
    given = given_to(gm for _, gm in graphs)
    found = [*_in_modules(model, graphs, outside), *(c for prefix, gm in graphs for c in in_graph(prefix, gm, outside, comes_in, constants, given))]
    found += in_products(model, found)
    named = {c.param_name for c in found}
    for prefix, gm in graphs:
        found += rewritten(prefix, gm, graphs, named, comes_in)
    embeddings = _embedding_weights(model, graphs, comes_in)
    paths = {id(gm): prefix for prefix, gm in graphs}
    for c in found:
        if c.host is not None:
            both = around(c.name, around(paths[id(c.host)], graphs))  # the call and the layer; the nearest holds the layer
            c.local = c.name.removeprefix(both[0][0] if both else "").removeprefix(".")
        c.tied_embedding = id(c.parameter(model)) in embeddings
    return found


def _in_modules(model: nn.Module, graphs: list[tuple[str, GraphModule]], outside: set[int]) -> Iterator[Candidate]:
    """Linears whose class is swapped, which are all but those that a graph calls and that lose nothing where the call is rewritten."""
    called = {id(gm.get_submodule(str(n.target))) for _, gm in graphs for n in gm.graph.nodes if n.op == "call_module"} - outside
    owned = {id(w) for _, gm in graphs for _, w in graph_sites(gm) if w is not None}
    readers = weight_readers(model)
    for name, m in model.named_modules():
        if _wraps(m):
            continue
        if (isinstance(m, nn.Linear) or _is_quantised(m)) and not (id(m) in called and is_plain(m)):
            c = _module_candidate(name, m, readers.get(id(m), []))
            c.masked = c.masked or id(c.weight) in owned
            yield c
        elif isinstance(m, nn.MultiheadAttention):
            paths = {join(name, leaf): getattr(m, leaf) for leaf in IN_PROJ_WEIGHTS}
            yield from (Candidate(path, path, weight, skip=IN_PROJ, quiet=True) for path, weight in paths.items() if weight is not None)


def _module_candidate(name: str, m: nn.Module, owners: list[nn.Module]) -> Candidate:
    weight, problem = weight_or_problem(m) if isinstance(m, nn.Linear) else (torch.empty(0, 0, device="meta"), QUANTISED)
    cls: Any = type(m)
    known = problem in (QUANTISED, LAZY) or not CHANGED.isdisjoint(m.__dict__)
    own = not known and (not computes_linear(cls) or cls.__call__ is not nn.Module.__call__)
    writer = next((owner for owner in owners if writes_to(owner, m)), None)
    if "forward" in m.__dict__:
        skip = REPLACED
    elif any("forward" in owner.__dict__ for owner in owners):
        skip = OWNER_REPLACED
    elif writer is not None:
        skip = f"the forward of {type(writer).__name__} writes to its weight and reads it, and the write would go into W∘M and be lost; call the layer there"
    else:
        skip = f"{type(m).__name__} has its own forward{_way_out(name, m, problem)}" if own else ""
    new = Candidate(name, join(name, "weight"), weight, m, types=type(m).__mro__, problem=problem, skip=skip)
    new.masked = isinstance(m, Site) or "_fxmask_nm" in m.__dict__
    new.owners = [*owners, m] if own and writer is None else owners
    return new


def _way_out(name: str, m: nn.Module, problem: str) -> str:
    """What to do about a forward of its own: an override, where that would not raise."""
    if problem:
        return f", and {problem}"
    if m._parameters.get("weight") is None:
        return ", and its weight is computed (by a parametrisation or a pruning); remove that before fxmask.apply"
    return f"; if that reads self.weight, mask it by overrides={{{name!r}: dict(read='weight')}}"


def _wraps(m: nn.Module) -> bool:
    """Whether an nn.Linear by name has no weight of its own but shows that of a layer inside, which is found there, as some of PEFT's adapters do."""
    if not isinstance(m, nn.Linear) or "weight" in m._parameters or parametrize.is_parametrized(m) or computes_linear(base_of(m)):
        return False
    weight = getattr(m, "weight", None)
    return any(weight is p for inner in m.modules() if inner is not m for p in inner._parameters.values() if p is not None)


def _is_quantised(m: nn.Module) -> bool:
    """Whether a module is one of PyTorch's quantised linears, which are no nn.Linear."""
    return "quantized" in type(m).__module__ and "Linear" in type(m).__name__ and not isinstance(m, nn.Linear)


def is_table(m: nn.Module) -> bool:
    """An Embedding, or what calls itself one without deriving from it, as quantisation-aware code does (I-BERT's QuantEmbedding)."""
    return isinstance(m, (nn.Embedding, nn.EmbeddingBag)) or ("Embedding" in type(m).__name__ and not isinstance(m, nn.Linear))


def _embedding_weights(model: nn.Module, graphs: list[tuple[str, GraphModule]], comes_in: dict[Node, str]) -> set[int]:
    """Weights that are looked up as tables, by modules or by calls in graphs. `comes_in`: see `incoming`."""
    found = {id(p) for m in model.modules() if is_table(m) for p in m._parameters.values() if p is not None}
    for prefix, gm in graphs:
        given = [a for node in gm.graph.nodes if node.op == "call_function" and node.target in EMBEDDINGS for a in node.all_input_nodes]
        paths = (join(prefix, str(a.target)) if a.op == "get_attr" else comes_in.get(a, "") for a in given)
        found |= {id(resolve(model, path)) for path in paths if path}
    return found
