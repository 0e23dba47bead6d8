"""Which nodes of a graph write into tensors in place, and whose memory that may be: what is read must not be read on the other side of such a write.

It errs on one side: what is not known to make a new tensor may return a part of what it was given.
"""

from __future__ import annotations

import inspect
import operator
from bisect import bisect
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

IN_PLACE = (
    operator.iadd, operator.iand, operator.iconcat, operator.ifloordiv, operator.ilshift, operator.imatmul, operator.imod, operator.imul, operator.ior,
    operator.ipow, operator.irshift, operator.isub, operator.itruediv, operator.ixor, operator.setitem,
)  # fmt: skip
NO_WRITES = ("requires_grad_", "detach_", "share_memory_")  # of methods that end as writes do
# by their last name, of torch, of torch.nn.functional and of Tensor: they never return memory that they were given
NEW = {
    "linear", "bilinear", "masked_linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "conv1d", "conv2d", "conv3d", "embedding",
    "scaled_dot_product_attention", "multi_head_attention_forward", "add", "sub", "mul", "truediv", "div", "neg", "pow", "relu", "gelu", "silu", "tanh",
    "sigmoid", "softmax", "log_softmax", "layer_norm", "rms_norm", "group_norm", "batch_norm", "norm", "sum", "mean", "abs", "sqrt", "rsqrt", "exp", "log",
    "where", "clone", "cat", "stack", "zeros_like", "ones_like", "empty_like", "rand_like", "randn_like",
}  # fmt: skip
MODULES = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.LayerNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.GELU)  # nor do these


def written(gm: GraphModule, node: Node) -> list[Node]:
    """The tensors that a node writes into, of its arguments; its own module's buffers are not among them."""
    if node.op == "call_module":
        return _first(node) if getattr(gm.get_submodule(str(node.target)), "inplace", False) else []
    if node.op == "call_method":
        name = str(node.target)
        dunder = name.startswith("__i") or name == "__setitem__"
        return _first(node) if name not in NO_WRITES and (dunder or (name.endswith("_") and not name.endswith("__"))) else []
    if node.op != "call_function":
        return []
    if isinstance(node.target, torch._ops.OpOverload):
        return _by_schema(node, node.target._schema)
    name = getattr(node.target, "__name__", "")
    found = [a for a in tree_leaves(node.kwargs.get("out")) if isinstance(a, Node)]
    ends = name.endswith("_") and not name.endswith("__") and name not in NO_WRITES and not hasattr(operator, name)  # operator.or_ is none
    in_place = node.target in IN_PLACE or ends
    return found + (_first(node) if in_place or _says_inplace(node) else [])


def _first(node: Node) -> list[Node]:
    first = node.args[0] if node.args else node.kwargs.get("input", node.kwargs.get("self"))
    return [a for a in tree_leaves(first) if isinstance(a, Node)]  # a list, of torch._foreach_add_


def _by_schema(node: Node, schema: Any) -> list[Node]:
    found = []
    for i, argument in enumerate(schema.arguments):
        given = node.kwargs.get(argument.name, node.args[i] if i < len(node.args) else None)
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += [a for a in tree_leaves(given) if isinstance(a, Node)]
    return found


def _says_inplace(node: Node) -> bool:
    """Whether a function of torch.nn.functional is asked to write into its input."""
    if not inspect.isfunction(node.target):
        return False
    try:
        return bool(inspect.signature(node.target).bind_partial(*node.args, **node.kwargs).arguments.get("inplace", False))
    except (TypeError, ValueError):
        return False


def memory(gm: GraphModule, node: Node) -> set[object]:
    """What a node's tensor may be a part of: nodes, and the ids of a graph module's own tensors."""
    found: set[object] = set()
    todo, seen = [node], {node}
    while todo:
        n = todo.pop()
        found.add(n)
        if n.op == "get_attr":
            value: Any = gm
            for part in str(n.target).split("."):
                value = getattr(value, part, None)
            found.add(id(value) if isinstance(value, Tensor) else n)
        elif not _is_new(gm, n):
            todo += [a for a in n.all_input_nodes if a not in seen]
            seen.update(n.all_input_nodes)
    return found


def _is_new(gm: GraphModule, node: Node) -> bool:
    """Whether a node makes a tensor of its own."""
    if node.op == "call_module":
        return type(gm.get_submodule(str(node.target))) in MODULES
    if written(gm, node):
        return False
    if isinstance(node.target, torch._ops.OpOverload):
        returns = node.target._schema.returns
        return "dropout" not in node.target.name() and all(r.alias_info is None for r in returns)  # a dropout that is off returns its input
    return (node.target if node.op == "call_method" else getattr(node.target, "__name__", "")) in NEW


class Writes:
    """The writes of one graph, in its order."""

    def __init__(self, gm: GraphModule) -> None:
        self.gm = gm
        self.place = {n: i for i, n in enumerate(gm.graph.nodes)}
        self.found = [(i, set().union(*(memory(gm, a) for a in into))) for n, i in self.place.items() if (into := written(gm, n))]

    def into(self, tensor: Collection[object]) -> list[int]:
        """Where something is written into the memory of a tensor, see `memory`."""
        return [i for i, touched in self.found if not touched.isdisjoint(tensor)]

    def between(self, first: Node, last: Node, tensor: Collection[object]) -> bool:
        """Whether a tensor's memory may be written into after one node and before another."""
        return any(self.place[first] < i < self.place[last] for i in self.into(tensor))

    def sections(self, nodes: Sequence[Node], tensor: Collection[object], *more: str) -> list[int]:
        """A number for each node, equal where nothing writes into a tensor between two; `more`: ends of the names of functions whose calls divide, too."""
        ends = [i for n, i in self.place.items() if more and n.op == "call_function" and getattr(n.target, "__name__", "").endswith(more)]
        at = sorted({*self.into(tensor), *ends})
        return [bisect(at, self.place[n]) for n in nodes]
