"""A linear call of a graph: what it says, taken apart and put together again, for passes that put a module in its place."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import GraphModule, Node

from ...kernels import ops  # noqa: F401  (registers torch.ops.fxmask)
from ..infra import call_again, replace_node

MASKED_LINEAR = torch.ops.fxmask.masked_linear.default
BLOCK_INDEX = torch.ops.fxmask.block_index.default
LINEARS = {F.linear, torch.ops.aten.linear.default, torch.ops.aten.linear}  # F.linear is torch._C._nn.linear; the last one is written by hand alone
EMBEDDINGS = {F.embedding, F.embedding_bag, torch.ops.aten.embedding.default, torch.ops.aten.embedding_bag.padding_idx}
# what Dynamo calls the module that it was given, or finds; or one whose bound method it was given, as `compile()` of a container is from PyTorch 2.14 on;
# or one that a decorator around its forward hands on, `def wrapper(*args, **kwargs)`
ROOT = re.compile(r"^(L\['args'\]\[\d+\]|L\['kwargs'\]\['\w+'\]|[LG]\['\w+'\](\.__self__)?|L__self__[._]*)")
INDEX = re.compile(r"""(?:\._modules)?\[(?:'([^']*)'|"([^"]*)"|(\d+))\]""")  # of a list or a dict, and of a key that is no name
PRUNED, DROPPED = "fxmask_pruned", "fxmask_dropped"  # containers of a graph module, for inputs
S = TypeVar("S", bound=nn.Module)
Given = Mapping[Node, Sequence[Node]]  # by input of a body: what calls give for it, see `regions.given_to`


def argument(node: Node, place: int, name: str, default: Any = None) -> Any:
    """What a call is given, positional or by keyword."""
    return node.args[place] if place < len(node.args) else node.kwargs.get(name, default)


def weight_arg(node: Node) -> Any:
    """The weight of a linear call."""
    return argument(node, 1, "weight")


def bias_arg(node: Node) -> Any:
    """The bias of a linear call, or None."""
    return argument(node, 2, "bias")


def is_mask(node: Node) -> bool:
    """Whether a node is a block mask of a model that was masked before it was traced: made in each forward, or cached."""
    return node.target is BLOCK_INDEX or (node.op == "get_attr" and str(node.target).rpartition(".")[2] == "_fxmask_mask")


def has_changed_input(node: Node) -> bool:
    """Whether a node is a linear call whose input a pass has pruned or dropped."""
    return node.op == "call_module" and str(node.target).partition(".")[0] in (PRUNED, DROPPED)


def input_arg(node: Node) -> Any:
    """The input of a linear call, or of the call of a Linear module."""
    return argument(node, 0, "input")


def call_stack(node: Node) -> tuple[str, tuple[type, ...]]:
    """Path and classes of the module that made a call, as far as the trace recorded them."""
    stack = recorded_stack(node)
    return stack[-1] if stack else ("", ())


def recorded_stack(node: Node) -> list[tuple[str, tuple[type, ...]]]:
    """Path and classes of each module that a call was made in, the outermost first."""
    return [(path_in_model(path), _classes(cls)) for path, cls in node.meta.get("nn_module_stack", {}).values()]


def path_in_model(recorded: str) -> str:
    """A module's path as `input_sources.source_name` has those of parameters, from what a trace calls it."""
    if not ROOT.match(recorded) and "._modules[" not in recorded:  # as torch.export writes it
        return recorded
    return INDEX.sub(r".\1\2\3", ROOT.sub("", recorded).rpartition("cell_contents.")[2]).lstrip(".")  # of a closure


def _classes(cls: Any) -> tuple[type, ...]:
    if isinstance(cls, str):  # torch.export keeps the class by name
        module, _, leaf = cls.rpartition(".")
        try:
            cls = getattr(importlib.import_module(module), leaf)
        except (ImportError, AttributeError, ValueError):
            cls = None
    return cls.__mro__ if isinstance(cls, type) else ()


def place_of(node: Node) -> dict[str, Any]:
    """What a trace recorded of where a call stands, for nodes that are put before it."""
    return {k: v for k, v in node.meta.items() if k in ("nn_module_stack", "stack_trace")}


def resolve(gm: nn.Module, path: str) -> Any:
    """The attribute at a dotted path."""
    owner, _, leaf = path.rpartition(".")
    return getattr(gm.get_submodule(owner), leaf)


def behind(*values: Any, given: Given | None = None, inputs: Callable[[Node], Sequence[Node]] = lambda n: n.all_input_nodes) -> list[Node]:
    """What values of a graph are computed from, themselves included, the nearest first; nothing for a constant.

    given: inputs of bodies are followed to what calls give for them; inputs: which of other nodes' are followed.
    """
    outer, found = given or {}, dict.fromkeys(v for v in values if isinstance(v, Node))
    left = list(found)
    for node in left:
        new = dict.fromkeys(n for n in outer.get(node) or inputs(node) if n not in found)
        left += new
        found |= new
    return left


def layer_name(path: str) -> str:
    """The layer's name, from its weight's."""
    return path.removesuffix(".weight") if path != "weight" else ""


def linear_parts(gm: GraphModule, node: Node) -> tuple[Any, Any, str]:
    """(weight, bias, what the call was: `module:<path>`, `aten` or `functional`) as nodes before the call."""
    with gm.graph.inserting_before(node):
        if node.op == "call_module":
            path = str(node.target)
            w = gm.graph.get_attr(f"{path}.weight")
            return w, None if gm.get_submodule(path).bias is None else gm.graph.get_attr(f"{path}.bias"), f"module:{path}"
    return weight_arg(node), bias_arg(node), "aten" if node.target is torch.ops.aten.linear.default else "functional"


def linear_call(gm: GraphModule, origin: str, x: Any, w: Any, *bias: Any) -> Node:
    """The call again, where the graph inserts."""
    if origin.startswith("module:"):
        return gm.graph.call_module(origin.removeprefix("module:"), (x,))
    return gm.graph.call_function(F.linear if origin == "functional" else torch.ops.aten.linear.default, (x, w, *bias))


def call_site(gm: GraphModule, container: str, node: Node, site: nn.Module, args: tuple[Any, ...]) -> Node:
    """A call, before `node`, of a module that is put into a container of the graph module under the node's name."""
    if container not in gm._modules:
        gm.add_module(container, nn.Module().train(gm.training))
    gm.get_submodule(container).add_module(node.name, site.train(gm.training))
    with gm.graph.inserting_before(node):
        return gm.graph.call_module(f"{container}.{node.name}", args)


def calls_of(gm: GraphModule, kind: type[S]) -> Iterator[tuple[Node, S]]:
    """(call, module) of every call of a module of that kind; calls may be replaced meanwhile."""
    for node in gm.graph.find_nodes(op="call_module"):
        site = gm.get_submodule(str(node.target))
        if isinstance(site, kind):
            yield node, site


def give_back(gm: GraphModule, node: Node, origin: str, x: Any) -> None:
    """Put the linear call on `x` in the place of a module's call (x, w, b), and take away what nobody reads any more."""
    _, w, *bias = node.args
    with gm.graph.inserting_before(node):
        new = linear_call(gm, origin, x, w, *bias)
    replace_node(gm, node, new)
    call_again(gm, new, str(node.target).rpartition(".")[2])  # `call_site` keeps the name
    for left in (*bias, w):
        if isinstance(left, Node) and not left.users and left.op == "get_attr":
            gm.graph.erase_node(left)
