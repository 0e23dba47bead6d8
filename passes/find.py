"""Where the linears of a model are: modules, and linear calls in FX graphs. Nothing is changed here."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterator
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .dense_reads import Read, dense_reads
from .graph_site import graph_sites, graph_weights
from .plain_forward import computes_linear
from .readers import weight_readers, writes_to
from .regions import incoming
from .site import Site
from .weights import peek_weight

LINEARS = {F.linear, torch.ops.aten.linear.default}  # F.linear is torch._C._nn.linear
EMBEDDINGS = {F.embedding, F.embedding_bag, torch.ops.aten.embedding.default, torch.ops.aten.embedding_bag.padding_idx}
NO_LINEARS = ("torch", "operator", "_operator", "math")  # modules whose functions a trace shows as what they are
IN_PROJ_WEIGHTS = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")  # one, or three where keys or values have another width
IN_PROJ = "its in_proj is a Parameter and no Linear (a torch.export trace shows it as a linear call, and masks it)"


PRUNED, DROPPED = "fxmask_pruned", "fxmask_dropped"
INPUT_SITES = (PRUNED, DROPPED)  # containers of a graph module


@dataclasses.dataclass
class Candidate:
    """One linear of a model, whatever form it has.

    `name` is the module's path, or the parameter's without `.weight`. `nodes` are its calls in the graph of `host`, empty where the class is swapped.
    """

    name: str
    param_name: str
    weight: Tensor
    module: nn.Module | None = None  # of a call in a graph: a stand-in of the same shape, for patterns
    host: GraphModule | None = None
    nodes: list[Node] = dataclasses.field(default_factory=list)
    weight_path: str | None = None
    weight_node: Node | None = None  # in a Dynamo graph, where the weight is an input
    types: tuple[type, ...] = ()
    inside: frozenset[type] = frozenset()  # types of the modules that hold it, see `surround`
    problem: str = ""  # why it cannot be masked at all; an error if it is selected
    skip: str = ""  # why it is left dense, with a warning; read='weight' lifts it
    quiet: bool = False  # what no user takes for a Linear: skipped without a warning
    masked: bool = False  # already
    owners: list[nn.Module] = dataclasses.field(default_factory=list)  # they read .weight instead of calling it; a forward of its own is its own reader
    tied_embedding: bool = False
    lifted: str = ""  # of a call in the body of a region: the parameter that comes in as its weight, whose layer it is named by
    sized: bool = True  # the default exclusion of small weights holds for it
    product: bool = False  # no linear but a product with a parameter, which is never masked: `passes.products`

    @property
    def call(self) -> str | None:
        """The name of the call of a weight that its graph computes, by which `explain` tells several of one module apart; None for a parameter."""
        return self.nodes[0].name if self.nodes and self.weight_path is None else None


def find(model: nn.Module) -> list[Candidate]:
    """All linears of a model, in the model's order, then those of its graphs."""
    graphs = list(graph_modules(model))
    outside = _used_outside(model, graphs)
    comes_in = incoming(graphs)
    in_graphs = [c for prefix, gm in graphs for c in _in_graph(prefix, gm, outside, comes_in)]
    called = {id(gm.get_submodule(str(n.target))) for _, gm in graphs for n in gm.graph.nodes if n.op == "call_module"} - outside
    owned = {id(w): site for _, gm in graphs for site, w in graph_sites(gm) if w is not None}
    readers, found = weight_readers(model), []
    for name, m in model.named_modules():
        problem = _module_problem(m)
        if (isinstance(m, nn.Linear) or problem) and not (id(m) in called and is_plain(m)):
            c = _module_candidate(name, m, problem, readers.get(id(m), []))
            c.masked = c.masked or id(c.weight) in owned
            found.append(c)
        elif isinstance(m, nn.MultiheadAttention):
            for leaf in IN_PROJ_WEIGHTS:
                weight = getattr(m, leaf)
                if weight is not None:
                    path = join(name, leaf)
                    found.append(Candidate(path, path, weight, skip=IN_PROJ, quiet=True))
    found += in_graphs
    named = {c.param_name for c in found}
    for prefix, gm in graphs:  # calls that were rewritten are linears no more
        layers = {id(site): comes_in[w] for w, site in graph_weights(gm) if w in comes_in}
        for site, weight in graph_sites(gm):
            path = join(prefix, site._fxmask_name)
            if path not in named:
                shown = weight if weight is not None else torch.empty(site._fxmask_config.block, device="meta")
                lifted = layers.get(id(site), "")
                found.append(Candidate(layer_name(lifted or path), path, shown, masked=True, lifted=lifted))
        for name, weight in _behind_inputs(gm):
            if f"{name}.weight" not in named:
                named.add(f"{name}.weight")
                found.append(Candidate(name, f"{name}.weight", weight))
    embeddings = _embedding_weights(model, graphs)
    for c in found:
        c.tied_embedding = id(resolve(model, c.lifted) if c.lifted else c.weight) in embeddings
    return found


def surround(found: list[Candidate], model: nn.Module | None) -> None:
    """Note for every candidate what modules hold it: by its path in the model, and by what the trace recorded of its calls."""
    paths = {} if model is None else {name: type(m).__mro__ for name, m in model.named_modules(remove_duplicate=False)}
    for c in found:
        parts = c.name.split(".")
        around = [paths.get(".".join(parts[:i]), ()) for i in range(len(parts))]
        around += [types for node in c.nodes for _, types in recorded_stack(node)]
        c.inside = frozenset(t for types in around for t in types)


def _behind_inputs(gm: GraphModule) -> Iterator[tuple[str, Tensor]]:
    """(name, weight) of linear calls that a module of `INPUT_SITES` makes now, for ActivationPruning or BlockDropout."""
    for n in gm.graph.nodes:
        if n.op == "call_module" and str(n.target).partition(".")[0] in INPUT_SITES:
            w = n.args[1]
            owner, _, leaf = str(w.target).rpartition(".") if w.op == "get_attr" else ("", "", "")
            yield str(gm.get_submodule(str(n.target))._fxmask_name), getattr(gm.get_submodule(owner), leaf) if leaf else torch.empty(0, 0, device="meta")


def graph_modules(model: nn.Module) -> Iterator[tuple[str, GraphModule]]:
    """Every GraphModule inside a model, with its path."""
    return ((name, m) for name, m in model.named_modules() if isinstance(m, GraphModule))


def is_plain(m: nn.Module) -> bool:
    """Whether replacing the call of a Linear by an op loses nothing: no hooks, no subclass, no parametrisation, no forward of its own."""
    hooks = (m._forward_hooks, m._forward_pre_hooks, m._backward_hooks, m._backward_pre_hooks)
    return type(m) is nn.Linear and not any(hooks) and "weight" in m._parameters and "forward" not in m.__dict__


# ---- modules ---------------------------------------------------------------------------------------------------------------------------------------------


def _module_candidate(name: str, m: nn.Module, problem: str, owners: list[nn.Module]) -> Candidate:
    linear = isinstance(m, nn.Linear) and not isinstance(m, nn.modules.lazy.LazyModuleMixin)
    weight = peek_weight(m) if linear else torch.empty(0, 0)
    swapped = isinstance(m, Site) or not {"_fxmask_pruning", "_fxmask_dropping", "_fxmask_nm"}.isdisjoint(m.__dict__)
    cls: Any = type(m)
    own = linear and not swapped and (not computes_linear(cls) or cls.__call__ is not nn.Module.__call__)
    skip = f"{type(m).__name__} has its own forward; if that reads self.weight, mask it by overrides={{{name!r}: dict(read='weight')}}" if own else ""
    writer = next((owner for owner in [*owners, *([m] if own else [])] if writes_to(owner, m)), None)
    if writer is not None:
        skip = f"the forward of {type(writer).__name__} writes to its weight and reads it, and the write would go into W∘M and be lost; call the layer there"
        own = False
    if any("forward" in owner.__dict__ for owner in owners):
        skip = "its owner reads its weight, and the owner's forward was replaced on the instance; call fxmask.apply before that"
    if "forward" in m.__dict__:
        skip = "its forward was replaced on the instance, and a swapped class would not be called; call fxmask.apply before that"
    new = Candidate(name, join(name, "weight"), weight, m, types=type(m).__mro__, problem=problem, skip=skip)
    new.masked = isinstance(m, Site) or "_fxmask_nm" in m.__dict__
    new.owners = [*owners, m] if own else owners
    return new


def _module_problem(m: nn.Module) -> str:
    """Why a linear's weight cannot be masked; empty for what can be, and for what is no linear."""
    if isinstance(m, nn.modules.lazy.LazyModuleMixin) and isinstance(m, nn.Linear) and m.has_uninitialized_params():
        return "its weight is not initialised yet; run one forward first"
    if "quantized" in type(m).__module__ and "Linear" in type(m).__name__ and not isinstance(m, nn.Linear):
        return "its weight is quantised; mask the float model first, then quantise"
    return weight_problem(peek_weight(m)) if isinstance(m, nn.Linear) else ""


def weight_problem(w: Tensor) -> str:
    if w.layout != torch.strided:
        return f"its weight is sparse ({w.layout}), as fxmask.finalize and PyTorch make them; mask the dense model"
    if w.is_complex():
        return f"its weight is complex ({w.dtype}), and masks are for real weights"
    if w.is_quantized or not w.is_floating_point() or w.element_size() == 1:
        return f"its weight is quantised ({w.dtype}); mask the float model first, then quantise"
    if is_traceable_wrapper_subclass(w):
        return f"its weight is a {type(w).__name__}; call fxmask.apply before sharding, quantising or wrapping"
    return ""


def _is_table(m: nn.Module) -> bool:
    """An Embedding, or what calls itself one without deriving from it, as quantisation-aware code does (I-BERT's QuantEmbedding)."""
    return isinstance(m, (nn.Embedding, nn.EmbeddingBag)) or ("Embedding" in type(m).__name__ and not isinstance(m, nn.Linear))


def _embedding_weights(model: nn.Module, graphs: list[tuple[str, GraphModule]]) -> set[int]:
    """Weights that are looked up as tables, by modules or by calls in graphs."""
    found = {id(p) for m in model.modules() if _is_table(m) for p in m._parameters.values() if p is not None}
    for _, gm in graphs:
        for node in gm.graph.nodes:
            if node.op == "call_function" and node.target in EMBEDDINGS:
                found |= {id(resolve(gm, str(a.target))) for a in node.all_input_nodes if a.op == "get_attr"}
    return found


# ---- graphs ----------------------------------------------------------------------------------------------------------------------------------------------


def _used_outside(model: nn.Module, graphs: list[tuple[str, GraphModule]]) -> set[int]:
    """Linears of a graph that the model also holds elsewhere, where they may be called: their class is swapped, which both callers see."""
    prefixes = [prefix for prefix, _ in graphs]
    inside = {id(m) for _, gm in graphs for m in gm.modules()}
    paths = ((name, m) for name, m in model.named_modules(remove_duplicate=False) if isinstance(m, nn.Linear) and id(m) in inside)
    return {id(m) for name, m in paths if not any(name == p or p == "" or name.startswith(p + ".") for p in prefixes)}


def _in_graph(prefix: str, gm: GraphModule, outside: set[int], comes_in: dict[Node, str]) -> list[Candidate]:
    """Linear calls of one graph, grouped by weight and name."""
    by_key: dict[Any, Candidate] = {}
    for node in gm.graph.nodes:
        if node.op == "call_module":
            m, target = gm.get_submodule(str(node.target)), str(node.target)
            if not isinstance(m, nn.Linear) or not is_plain(m) or id(m) in outside:
                continue  # its class is swapped, which keeps hooks and parametrisations
            path, problem = f"{target}.weight", weight_problem(m.weight)
            new = Candidate(join(prefix, target), join(prefix, path), m.weight, m, host=gm, weight_path=path, types=type(m).__mro__, problem=problem)
            key: Any = (id(m.weight), target)
        elif node.op == "call_function" and node.target in LINEARS:
            key, new = _function_candidate(prefix, gm, node, comes_in)
        else:
            continue
        by_key.setdefault(key, new).nodes.append(node)
    known = {c.weight_path for c in by_key.values()}
    linears = (m for m in gm.modules() if isinstance(m, nn.Linear))  # whose class is swapped
    weights = {id(w) for w in (*(c.weight for c in by_key.values()), *(w for _, w in graph_sites(gm)), *(m._parameters.get("weight") for m in linears))}
    inside = [c for c in _inside_calls(prefix, gm) if c.weight_path not in known]
    return [*by_key.values(), *inside, *(c for c in _in_products(prefix, gm) if id(c.weight) not in weights)]


def weight_reads(gm: GraphModule) -> Iterator[tuple[Tensor, Read]]:
    """The products of a graph that read the weight of a layer, by its name, and are no linear calls."""

    def is_weight(node: Node) -> bool:
        named = node.op == "get_attr" and str(node.target).rpartition(".")[2] == "weight"
        value = resolve(gm, str(node.target)) if named else None
        return isinstance(value, nn.Parameter) and value.dim() == 2

    return ((resolve(gm, str(read.weight.target)), read) for read in dense_reads(gm, is_weight))


def _in_products(prefix: str, gm: GraphModule) -> list[Candidate]:
    """Weights that products read which may be linears in other words."""
    found: dict[int, Candidate] = {}
    for weight, read in weight_reads(gm):
        path, types = str(read.weight.target), call_stack(read.node)[1]
        name = path.removesuffix("weight").removesuffix(".")
        new = Candidate(join(prefix, name), join(prefix, path), weight, host=gm, weight_path=path, types=types, skip=f"{read.words}; mask the nn.Module")
        if read.as_linear:
            found.setdefault(id(weight), new)
    return list(found.values())


def _inside_calls(prefix: str, gm: GraphModule) -> list[Candidate]:
    """Weights that the graph hands to a Python function which `torch.fx.wrap` kept as one call, as torchvision's Swin does: a linear there is out of reach."""
    found: dict[str, Candidate] = {}
    for node in gm.graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, FunctionType) or node.target.__module__.partition(".")[0] in NO_LINEARS:
            continue
        for path in (str(n.target) for n in node.all_input_nodes if n.op == "get_attr"):
            weight = resolve(gm, path)
            if isinstance(weight, nn.Parameter) and weight.dim() == 2 and (path == "weight" or path.endswith(".weight")):
                skip = f"{node.target.__name__}() reads it, which the trace keeps as one call; mask the nn.Module"
                name, types = path.removesuffix("weight").removesuffix("."), call_stack(node)[1]
                found.setdefault(path, Candidate(join(prefix, name), join(prefix, path), weight, host=gm, weight_path=path, types=types, skip=skip))
    return list(found.values())


def _function_candidate(prefix: str, gm: GraphModule, node: Node, comes_in: dict[Node, str]) -> tuple[Any, Candidate]:
    """A linear call whose weight is a parameter of the graph module, or is computed by the graph."""
    arg = weight_arg(node)
    owner, types = call_stack(node)
    if isinstance(arg, Node) and arg.op == "get_attr":
        path = str(arg.target)
        weight = resolve(gm, path)
        new = Candidate(join(prefix, layer_name(path)), join(prefix, path), weight, host=gm, weight_path=path, types=types, problem=weight_problem(weight))
        new.skip = "" if isinstance(weight, nn.Parameter) else "its weight is a constant, not a parameter"
        key: Any = id(weight)
    else:
        value = arg.meta.get("val", arg.meta.get("example_value")) if isinstance(arg, Node) else None
        name = owner or node.name
        weight = value if isinstance(value, Tensor) else torch.empty(0, 0)
        lifted = comes_in.get(arg, "") if isinstance(arg, Node) else ""
        shown = layer_name(lifted) if lifted else join(prefix, name)
        new = Candidate(shown, join(prefix, f"{name}.weight"), weight, host=gm, types=types, lifted=lifted)
        if not isinstance(value, Tensor):
            new.problem = "the graph computes its weight, and the trace does not say its shape; mask the nn.Module instead"
        key = arg
    if not new.problem and weight.dim() != 2:
        new.skip = f"its weight has {weight.dim()} axes"
    elif not new.problem:
        new.module = nn.utils.skip_init(nn.Linear, weight.shape[1], weight.shape[0], device="meta")  # for patterns that look at a module
        new.types = (*types, *nn.Linear.__mro__) if nn.Linear not in types else types
    return key, new


def weight_arg(node: Node) -> Any:
    """The weight of a linear call, positional or by keyword."""
    return node.args[1] if len(node.args) > 1 else node.kwargs["weight"]


def bias_arg(node: Node) -> Any:
    """The bias of a linear call, or None."""
    return node.args[2] if len(node.args) > 2 else node.kwargs.get("bias")


def input_arg(node: Node) -> Any:
    """The input of a linear call, or of the call of a Linear module."""
    return node.args[0] if node.args else node.kwargs["input"]


def call_stack(node: Node) -> tuple[str, tuple[type, ...]]:
    """Path and classes of the module that made a call, as far as the trace recorded them."""
    stack = recorded_stack(node)
    return stack[-1] if stack else ("", ())


def recorded_stack(node: Node) -> list[tuple[str, tuple[type, ...]]]:
    """Path and classes of each module that a call was made in, the outermost first."""
    return [(path.removeprefix("L['self']").lstrip("."), _classes(cls)) for path, cls in node.meta.get("nn_module_stack", {}).values()]


def _classes(cls: Any) -> tuple[type, ...]:
    if isinstance(cls, str):  # torch.export keeps the class by name
        module, _, leaf = cls.rpartition(".")
        try:
            cls = getattr(importlib.import_module(module), leaf)
        except (ImportError, AttributeError, ValueError):
            cls = None
    return cls.__mro__ if isinstance(cls, type) else ()


def resolve(gm: nn.Module, path: str) -> Any:
    """The attribute at a dotted path."""
    owner, _, leaf = path.rpartition(".")
    return getattr(gm.get_submodule(owner), leaf)


def layer_name(path: str) -> str:
    """The layer's name, from its weight's."""
    return path.removesuffix(".weight") if path != "weight" else ""


def join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix and name else prefix or name
