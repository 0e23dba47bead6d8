"""Where the linears of a model are: modules, and linear calls in FX graphs. Nothing is changed here."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

LINEARS = {F.linear, torch.ops.aten.linear.default}  # F.linear is torch._C._nn.linear


@dataclasses.dataclass
class Candidate:
    """One linear of a model, whatever form it has.

    `name` is the module's path, or the parameter's without `.weight`. `nodes` are its calls in the graph of `host`, empty where the class is swapped.
    """

    name: str
    param_name: str
    weight: Tensor
    module: nn.Module | None = None
    called: list[nn.Module] = dataclasses.field(default_factory=list)  # modules whose calls are in `nodes`
    host: GraphModule | None = None
    nodes: list[Node] = dataclasses.field(default_factory=list)
    weight_path: str | None = None
    type_names: tuple[str, ...] = ()
    problem: str = ""  # why it cannot be masked at all; an error if it is selected
    skip: str = ""  # why it is left dense, with a warning; read='weight' lifts it
    read: bool = False  # its owner reads .weight instead of calling it
    tied_embedding: bool = False


def find(model: nn.Module) -> list[Candidate]:
    """All linears of a model, modules first, in the model's order."""
    readers, found = _weight_readers(model), []
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    graph_sites = [c for prefix, gm in graph_modules(model) for c in _in_graph(prefix, gm)]
    called = {id(m) for c in graph_sites for m in c.called}
    for name, m in model.named_modules():
        problem = _module_problem(m)
        if (isinstance(m, nn.Linear) or problem) and id(m) not in called:
            found.append(_module_candidate(name, m, problem, id(m) in readers))
    found += graph_sites
    for c in found:
        c.tied_embedding = id(c.weight) in embeddings
    return found


def _module_candidate(name: str, m: nn.Module, problem: str, read: bool) -> Candidate:
    attr = getattr(m, "weight", None)
    weight = attr if isinstance(attr, Tensor) else torch.empty(0, 0)
    own = isinstance(m, nn.Linear) and type(m).forward is not nn.Linear.forward
    skip = f"{type(m).__name__} has its own forward; if that reads self.weight, mask it by overrides={{{name!r}: dict(read='weight')}}" if own else ""
    types = tuple(t.__name__ for t in type(m).__mro__)
    return Candidate(name, _join(name, "weight"), weight, m, type_names=types, problem=problem, skip=skip, read=read)


def _module_problem(m: nn.Module) -> str:
    """Why a linear's weight cannot be masked; empty for what can be, and for what is no linear."""
    if isinstance(m, nn.modules.lazy.LazyModuleMixin) and isinstance(m, nn.Linear) and m.has_uninitialized_params():
        return "its weight is not initialised yet; run one forward first"
    if "quantized" in type(m).__module__ and "Linear" in type(m).__name__ and not isinstance(m, nn.Linear):
        return "its weight is quantised; mask the float model first, then quantise"
    return _weight_problem(m.weight) if isinstance(m, nn.Linear) else ""


def _weight_problem(w: Tensor) -> str:
    if w.is_quantized or not w.is_floating_point() or w.element_size() == 1:
        return f"its weight is quantised ({w.dtype}); mask the float model first, then quantise"
    if is_traceable_wrapper_subclass(w):
        return f"its weight is a {type(w).__name__}; call fxmask.apply before sharding, quantising or wrapping"
    return ""


def _weight_readers(model: nn.Module) -> set[int]:
    """Linears whose owner reads `.weight`: nn.MultiheadAttention never calls out_proj, and the encoder layer's fast path calls neither linear."""
    found = set()
    for m in model.modules():
        if isinstance(m, nn.MultiheadAttention):
            found.add(id(m.out_proj))
        elif isinstance(m, nn.TransformerEncoderLayer):
            found |= {id(m.linear1), id(m.linear2)}
    return found


# ---- graphs ----------------------------------------------------------------------------------------------------------------------------------------------


def _in_graph(prefix: str, gm: GraphModule) -> list[Candidate]:
    """Linear calls of one graph, grouped by their weight."""
    by_key: dict[object, Candidate] = {}
    for node in gm.graph.nodes:
        if node.op == "call_module":
            m = gm.get_submodule(str(node.target))
            if not isinstance(m, nn.Linear) or not is_plain(m):
                continue  # its class is swapped, which keeps hooks and parametrisations
            key: object = id(m.weight)
            path = f"{node.target}.weight"
            types = tuple(t.__name__ for t in type(m).__mro__)
            new = Candidate(_join(prefix, str(node.target)), _join(prefix, path), m.weight, m, host=gm, weight_path=path, type_names=types)
        elif node.op == "call_function" and node.target in LINEARS:
            arg = weight_arg(node)
            key, new = _function_candidate(prefix, gm, node, arg)
        else:
            continue
        candidate = by_key.setdefault(key, new)
        candidate.nodes.append(node)
        if node.op == "call_module":
            candidate.called.append(gm.get_submodule(str(node.target)))
    return list(by_key.values())


def _function_candidate(prefix: str, gm: GraphModule, node: Node, arg: object) -> tuple[object, Candidate]:
    """A linear call whose weight is a parameter of the graph module, or is computed by the graph."""
    types = _stack_types(node)
    if isinstance(arg, Node) and arg.op == "get_attr":
        path = str(arg.target)
        weight = _resolve(gm, path)
        name = path.removesuffix(".weight") if path != "weight" else ""
        problem, skip = _weight_problem(weight), "" if isinstance(weight, nn.Parameter) else "its weight is a constant, not a parameter"
        return id(weight), Candidate(
            _join(prefix, name), _join(prefix, path), weight, None, host=gm, weight_path=path, type_names=types, problem=problem, skip=skip
        )
    value = arg.meta.get("val", arg.meta.get("example_value")) if isinstance(arg, Node) else None
    name = _owner(node) or node.name
    problem = "" if isinstance(value, Tensor) else "the graph computes its weight, and the trace does not say its shape; mask the nn.Module instead"
    weight = value if isinstance(value, Tensor) else torch.empty(0, 0)
    return arg, Candidate(_join(prefix, name), _join(prefix, f"{name}.weight"), weight, None, host=gm, type_names=types, problem=problem)


def is_plain(m: nn.Linear) -> bool:
    """Whether replacing the call of a Linear by an op loses nothing: no hooks, no subclass, no parametrisation."""
    hooks = (m._forward_hooks, m._forward_pre_hooks, m._backward_hooks, m._backward_pre_hooks)
    return type(m) is nn.Linear and not any(hooks) and "weight" in m._parameters


def weight_arg(node: Node) -> object:
    """The weight of a linear call, positional or by keyword."""
    return node.args[1] if len(node.args) > 1 else node.kwargs["weight"]


def bias_arg(node: Node) -> object:
    """The bias of a linear call, or None."""
    return node.args[2] if len(node.args) > 2 else node.kwargs.get("bias")


def input_arg(node: Node) -> object:
    """The input of a linear call, or of the call of a Linear module."""
    return node.args[0] if node.args else node.kwargs["input"]


def _stack(node: Node) -> tuple[str, object] | None:
    stack = list(node.meta.get("nn_module_stack", {}).values())
    return stack[-1] if stack else None


def _owner(node: Node) -> str:
    last = _stack(node)
    return "" if last is None else last[0].removeprefix("L['self']").lstrip(".")


def _stack_types(node: Node) -> tuple[str, ...]:
    """Class names of the module that made a call, as far as the trace recorded them."""
    last = _stack(node)
    if last is None:
        return ()
    cls = last[1]
    return tuple(t.__name__ for t in cls.__mro__) if isinstance(cls, type) else (str(cls).rpartition(".")[2],)


def _resolve(gm: GraphModule, path: str) -> Tensor:
    owner, _, leaf = path.rpartition(".")
    return getattr(gm.get_submodule(owner), leaf)


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix and name else prefix or name


def graph_modules(model: nn.Module) -> Iterator[tuple[str, GraphModule]]:
    """Every GraphModule inside a model, with its path."""
    return ((name, m) for name, m in model.named_modules() if isinstance(m, GraphModule))
