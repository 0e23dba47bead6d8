"""Where the linears of an FX graph are: calls of modules and functions, and weights that something reads which no pass can mask. Nothing is changed here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import FunctionType
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.export.unflatten import InterpreterModule
from torch.fx import GraphModule, Node

from ..graphs.element_masks import is_masking
from ..graphs.graph_calls import LINEARS, Given, behind, call_stack, has_changed_input, layer_name, resolve, weight_arg
from ..graphs.graph_site import graph_sites, graph_weights
from ..graphs.regions import found_at, holders_first
from ..infra import recorded_value
from .candidate import Candidate, join, weight_problem
from .dense_reads import Read, is_product, reads_in
from .made import ACTIVATION, Made, inputs_in, inputs_of_layers, made_of_weights

CONSTANT = "its weight is a constant, not a parameter"


def graph_modules(model: nn.Module) -> Iterator[tuple[str, GraphModule]]:
    """Every GraphModule inside a model, with its first path: a graph before its bodies, and behind all graphs that share it as one of theirs."""
    paths = {m: name for name, m in model.named_modules() if isinstance(m, GraphModule)}
    found = holders_first(paths, lambda gm: (m for m in gm.modules() if m is not gm and isinstance(m, GraphModule)))
    return ((paths[gm], gm) for gm in found)


def is_unflattened(model: nn.Module) -> bool:
    """Whether a model holds graphs of `torch.export.unflatten`, as stages of torch.distributed.pipelining do: no pass looks into them."""
    return any(isinstance(m, InterpreterModule) for m in model.modules())


def around(path: str, graphs: Iterable[tuple[str, GraphModule]]) -> list[tuple[str, GraphModule]]:
    """The graph modules that hold what lies at a path, each with its own, the nearest first."""
    return sorted(((p, gm) for p, gm in graphs if p in ("", path) or path.startswith(f"{p}.")), key=lambda found: -len(found[0]))


def name_now(site: Any, path: str, graphs: Iterable[tuple[str, GraphModule]]) -> str:
    """What the layer is called now whose call a pass has replaced by the module at `path`: the graph may lie in other modules since."""
    traces = around(path, graphs)
    holders = (p for p, gm in traces if site._fxmask_held and found_at(gm, site._fxmask_name) is not None)
    return join(next(holders, traces[0][0] if traces else ""), site._fxmask_name)


def is_plain(m: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether replacing the call of a Linear by an op loses nothing: no hooks, no subclass, no parametrisation, no forward of its own."""
    hooks = (m._forward_hooks, m._forward_pre_hooks, m._backward_hooks, m._backward_pre_hooks)
    return type(m) is nn.Linear and not any(hooks) and m._parameters.get("weight") is not None and "forward" not in m.__dict__


def used_outside(model: nn.Module, graphs: list[tuple[str, GraphModule]]) -> set[int]:
    """Linears of a graph that the model also holds elsewhere, where they may be called: their class is swapped, which both callers see."""
    inside = {id(m) for _, gm in graphs for m in gm.modules()}
    paths = ((name, m) for name, m in model.named_modules(remove_duplicate=False) if isinstance(m, nn.Linear) and id(m) in inside)
    return {id(m) for name, m in paths if not around(name, graphs)}


def in_graph(prefix: str, gm: GraphModule, outside: set[int], comes_in: dict[Node, str], constants: set[Node], given: Given) -> list[Candidate]:
    """Linear calls of one graph, grouped by weight and name. `comes_in`, `constants`, `given`: see `incoming`, `constants_of`, `given_to`."""
    by_key: dict[Any, Candidate] = {}
    for node in gm.graph.nodes:
        if node.op == "call_module":
            m, target = gm.get_submodule(str(node.target)), str(node.target)
            if not is_plain(m) or id(m) in outside:
                continue  # its class is swapped, which keeps hooks and parametrisations
            path = f"{target}.weight"
            problem = weight_problem(m.weight)
            new = Candidate(join(prefix, target), join(prefix, path), m.weight, m, host=gm, weight_path=path, types=type(m).__mro__, problem=problem)
            key: Any = target
        elif node.op == "call_function" and node.target in LINEARS and not masks_behind(weight_arg(node), given):
            key, new = _function_candidate(prefix, gm, node, comes_in, constants, given)
        else:
            continue
        by_key.setdefault(key, new).nodes.append(node)
    known = {c.weight_path for c in by_key.values()}
    return [*by_key.values(), *_inside_calls(prefix, gm, known)]


def masks_behind(weight: Any, given: Given) -> list[Node]:
    """The masks of a model that was masked before it was traced which a weight is made with: it is W∘M, or made of some."""
    return [n for n in behind(weight, given=given, inputs=lambda n: [] if is_product(n) else n.all_input_nodes) if is_masking(n, given)]


def _function_candidate(prefix: str, gm: GraphModule, node: Node, comes_in: dict[Node, str], constants: set[Node], given: Given) -> tuple[Any, Candidate]:
    """A linear call whose weight is a parameter of the graph module, or is computed by the graph."""
    arg = weight_arg(node)
    owner, _ = call_stack(node)
    if isinstance(arg, Node) and arg.op == "get_attr":
        path = str(arg.target)
        weight = resolve(gm, path)
        new = Candidate(join(prefix, layer_name(path)), join(prefix, path), weight, host=gm, weight_path=path, problem=weight_problem(weight))
        new.skip = "" if isinstance(weight, nn.Parameter) else CONSTANT
        key: Any = id(weight)
    else:
        value = recorded_value(arg) if isinstance(arg, Node) else None
        name = owner or node.name
        weight = value if isinstance(value, Tensor) else torch.empty(0, 0)
        lifted = comes_in.get(arg, "") if isinstance(arg, Node) else ""
        shown = layer_name(lifted) if lifted else join(prefix, name)
        new = Candidate(shown, join(prefix, f"{name}.weight"), weight, host=gm, lifted=lifted)
        new.call = "" if lifted else join(prefix, node.name)
        if arg in constants:
            new.skip, new.sized = CONSTANT, isinstance(value, Tensor)
        elif inputs_in(arg, given) or inputs_of_layers(arg, given):
            new.skip, new.sized = ACTIVATION, isinstance(value, Tensor)
        elif isinstance(value, Tensor):
            new.problem = weight_problem(value)
        else:
            new.problem = "the graph computes its weight, and the trace does not say its shape; mask the nn.Module instead"
        key = arg
    if not new.problem and weight.dim() != 2:
        new.skip = f"its weight has {weight.dim()} axes"
    elif not new.problem and new.sized:
        new.stand_in()
    return key, new


def _own_weights(model: nn.Module, prefix: str, gm: GraphModule) -> dict[Node, Made]:
    """The nodes of a graph at `prefix` that are weights of layers, by their names, or by those that make_fx gives; each by its path in the model."""
    named = {n: str(n.target).rpartition(".")[2] for n in gm.graph.find_nodes(op="get_attr")}
    paths = {n: join(prefix, str(n.target)) for n, name in named.items() if name == "weight" or name.startswith("_param_constant")}
    return {n: ((path,), False) for n, path in paths.items() if isinstance(w := resolve(model, path), nn.Parameter) and w.dim() == 2}


def weight_reads(model: nn.Module) -> Iterator[tuple[Tensor, GraphModule, Read]]:
    """The products of a model's graphs, bodies of regions among them, that read the weight of a layer, by its name, and are no linear calls."""
    graphs = [(gm, _own_weights(model, prefix, gm)) for prefix, gm in graph_modules(model)]  # a graph before its bodies
    yield from ((resolve(model, read.weight), gm, read) for gm, read in reads_in(graphs))


def in_products(model: nn.Module, found: Iterable[Candidate]) -> list[Candidate]:
    """Weights that products read which may be linears in other words, beside the linears that are known."""
    weights = {id(c.parameter(model)) for c in found} | {id(w) for _, gm in graph_modules(model) for _, w in graph_sites(gm)}
    new: dict[int, Candidate] = {}
    for weight, gm, read in weight_reads(model):
        if read.as_linear and id(weight) not in weights:
            new.setdefault(id(weight), _out_of_reach(read.weight, weight, gm, read.node, read.words))
    return list(new.values())


def _out_of_reach(path: str, weight: Tensor, gm: GraphModule, reader: Node, why: str) -> Candidate:
    """A weight that no linear call reads."""
    return Candidate(layer_name(path), path, weight, host=gm, lifted=path, types=call_stack(reader)[1], skip=f"{why}; mask the nn.Module")


def _inside_calls(prefix: str, gm: GraphModule, known: set[str | None]) -> list[Candidate]:
    """Weights that the graph hands to a Python function which `torch.fx.wrap` kept as one call, as torchvision's Swin does; but for those at `known` paths."""
    found: dict[str, Candidate] = {}
    made = made_of_weights(gm, _own_weights(gm, "", gm))
    for node in gm.graph.nodes:
        target = node.target
        if node.op == "call_function" and isinstance(target, FunctionType) and target.__module__.partition(".")[0] != "torch":
            for path in (path for n in node.all_input_nodes if n in made for path in made[n][0]):
                why = f"{target.__name__}() reads it, which the trace keeps as one call"
                found.setdefault(path, _out_of_reach(join(prefix, path), resolve(gm, path), gm, node, why))
    masked = {id(w) for _, w in graph_sites(gm)}
    return [c for path, c in found.items() if path not in known and id(c.weight) not in masked]


def rewritten(prefix: str, gm: GraphModule, graphs: list[tuple[str, GraphModule]], named: set[str], comes_in: dict[Node, str]) -> Iterator[Candidate]:
    """Linears whose calls a pass has rewritten, which are linears no more; but for those of the parameters in `named`, to which new ones are added."""
    layers = {id(site): comes_in[w] for w, site in graph_weights(gm) if w in comes_in}
    for site, weight in graph_sites(gm):
        path = join(prefix, site._fxmask_name)
        if path not in named:
            shown = weight if weight is not None else torch.empty(site._fxmask_config.block, device="meta")
            lifted = layers.get(id(site), "")
            yield Candidate(layer_name(lifted or path), path, shown, masked=True, lifted=lifted)
    for site, weight in _behind_inputs(gm):
        name = name_now(site, prefix, graphs)
        if f"{name}.weight" not in named:
            named.add(f"{name}.weight")
            yield Candidate(name, f"{name}.weight", weight)


def _behind_inputs(gm: GraphModule) -> Iterator[tuple[Any, Tensor]]:
    """(module, weight) of linear calls that a module makes now, for ActivationPruning or BlockDropout."""
    for n in gm.graph.nodes:
        if has_changed_input(n):
            w = n.args[1]
            yield gm.get_submodule(str(n.target)), resolve(gm, w.target) if w.op == "get_attr" else torch.empty(0, 0, device="meta")
