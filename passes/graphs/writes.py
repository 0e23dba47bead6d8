"""Which nodes of a graph write into tensors in place, and whose memory that may be: what is read must not be read on the other side of such a write.

It errs on one side: what is not known to make a new tensor may return a part of what it was given, and shares the memory of all of it.
"""

from __future__ import annotations

import inspect
import operator
from bisect import bisect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from ..infra import recorded_value
from .graph_calls import behind
from .regions import attribute

IN_PLACE = (
    operator.iadd, operator.iand, operator.iconcat, operator.ifloordiv, operator.ilshift, operator.imatmul, operator.imod, operator.imul, operator.ior,
    operator.ipow, operator.irshift, operator.isub, operator.itruediv, operator.ixor, operator.setitem, setattr,
)  # fmt: skip
# writes to `.data`, the last one as Dynamo writes them from PyTorch 2.14 on: after them the target shares the memory of another argument
GIVE_MEMORY = ("setattr", "set_", "shallow_copy_data_")
NO_WRITES = ("requires_grad_", "detach_", "share_memory_")  # of methods that end as writes do
# by their last name, of torch, of torch.nn.functional, of Tensor and of ATen: they never return memory that they were given
NEW = {
    "linear", "bilinear", "masked_linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "conv1d", "conv2d", "conv3d", "embedding",
    "scaled_dot_product_attention", "multi_head_attention_forward", "add", "sub", "mul", "truediv", "div", "neg", "pow", "relu", "gelu", "silu", "tanh",
    "sigmoid", "softmax", "log_softmax", "layer_norm", "rms_norm", "group_norm", "batch_norm", "norm", "sum", "mean", "abs", "sqrt", "rsqrt", "exp", "log",
    "where", "clone", "cat", "stack", "zeros_like", "ones_like", "empty_like", "rand_like", "randn_like",
}  # fmt: skip
MODULES = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.LayerNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.GELU)  # nor do these
TABLES = ("embedding", "embedding_bag")  # which scale the rows that they look up, with `max_norm`

Key = Node | int  # a node's own memory, or that of a tensor which the graph or its module holds


class Writes:
    """The writes of one graph, in its order, and which of its tensors may share memory; of the graph as it is now, so ask before nodes are replaced."""

    def __init__(self, gm: GraphModule) -> None:
        self.gm = gm
        self.place = {n: i for i, n in enumerate(gm.graph.nodes)}
        self._ends: dict[tuple[str, ...], list[int]] = {}
        self._above: dict[Key, Key] = {}  # a tree whose root stands for all tensors that share its memory
        into = []
        for n, i in self.place.items():
            targets = [*written(gm, n)]
            shared = n.all_input_nodes if last_name(n) in GIVE_MEMORY else targets or ([] if _is_new(gm, n) else n.all_input_nodes)
            self._join(n, _held(gm, n) if n.op in ("get_attr", "placeholder") else shared)
            into += [(i, t) for t in targets]
        self._into: dict[Key, list[int]] = {}
        for i, t in into:
            self._into.setdefault(self._memory(t), []).append(i)

    def _memory(self, tensor: Key) -> Key:
        path = []
        while (above := self._above.get(tensor, tensor)) != tensor:
            path.append(tensor)
            tensor = above
        self._above.update(dict.fromkeys(path, tensor))
        return tensor

    def _join(self, first: Key, others: Sequence[Key]) -> None:
        for other in others:
            a, b = self._memory(first), self._memory(other)
            if a != b:
                self._above[a] = b

    def into(self, tensor: Node | Tensor) -> list[int]:
        """Where something is written into the memory of a tensor, in order."""
        key = tensor if isinstance(tensor, Node) else _storage(tensor)
        return self._into.get(self._memory(key), [])

    def between(self, first: Node, last: Node, tensor: Node) -> bool:
        """Whether a tensor's memory may be written into after one node and before another."""
        at = self.into(tensor)
        return bisect(at, self.place[first]) < bisect(at, self.place[last] - 1)

    def read_after(self, first: Node, tensor: Node, but: Node) -> bool:
        """Whether any node but one reads a tensor's memory after `first`."""
        same = self._memory(tensor)
        shared = (n for n in self.place if self._memory(n) == same)
        return any(user is not but and self.place[user] > self.place[first] for n in shared for user in n.users)

    def sections(self, nodes: Sequence[Node], tensor: Node | Tensor, *more: str) -> list[int]:
        """A number for each node, equal where nothing writes into a tensor between two; `more`: ends of the names of functions whose calls divide, too."""
        if more not in self._ends:
            self._ends[more] = [i for n, i in self.place.items() if n.op == "call_function" and getattr(n.target, "__name__", "").endswith(more)]
        at = sorted({*self.into(tensor), *self._ends[more]})
        return [bisect(at, self.place[n]) for n in nodes]


def written(gm: GraphModule, node: Node) -> Iterator[Key]:
    """What a node writes into; its own module's buffers are not among it."""
    if node.op == "call_module":
        m = gm.get_submodule(str(node.target))
        if getattr(m, "inplace", False):
            yield from _first(node)
        if isinstance(m, (nn.Embedding, nn.EmbeddingBag)) and m.max_norm is not None:
            yield _storage(m.weight)
    elif node.op == "call_method":
        name = str(node.target)
        if name not in NO_WRITES and (name.startswith("__i") or name == "__setitem__" or _ends_so(name)):
            yield from _first(node)
    elif node.op == "call_function":
        yield from _by_function(node)


def is_filled(gm: GraphModule, made: Node) -> bool:
    """Whether something is written into what a node makes, or into what may be a part of it."""
    parts = behind(made, inputs=lambda n: [user for user in n.users if not _is_new(gm, user)])  # followed forwards
    return any(n in written(gm, user) for n in parts for user in n.users)


def _by_function(node: Node) -> Iterator[Node]:
    """What the call of a function or an op writes into."""
    name, schemas, given = getattr(node.target, "__name__", ""), _schemas(node.target), _named(node)
    for schema in schemas:
        for i, argument in enumerate(schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                yield from _nodes(node.kwargs.get(argument.name, node.args[i] if i < len(node.args) else None))
    if not schemas:
        yield from _nodes(node.kwargs.get("out"))
        ends = _ends_so(name) and name not in NO_WRITES and not hasattr(operator, name)  # operator.or_ is none
        if node.target in IN_PLACE or ends or given.get("inplace", False):
            yield from _first(node)
    if name in TABLES and given.get("max_norm") is not None:
        yield from _nodes(given.get("weight"))


def last_name(node: Node) -> str:
    """Of a method, a function or an op, without its overload."""
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.name.rpartition(":")[2]
    return str(node.target) if node.op == "call_method" else str(getattr(node.target, "__name__", "")) if node.op == "call_function" else ""


def _ends_so(name: str) -> bool:
    return name.endswith("_") and not name.endswith("__")


def _schemas(target: Any) -> list[Any]:
    """Of an op, or of all forms of one."""
    if isinstance(target, torch._ops.OpOverload):
        return [target._schema]
    return [getattr(target, o)._schema for o in target.overloads()] if isinstance(target, torch._ops.OpOverloadPacket) else []


def _first(node: Node) -> list[Node]:
    return _nodes(node.args[0] if node.args else node.kwargs.get("input", node.kwargs.get("self")))


def _nodes(given: Any) -> list[Node]:
    return [a for a in tree_leaves(given) if isinstance(a, Node)]  # of a list, for torch._foreach_add_


def _named(node: Node) -> dict[str, Any]:
    """The arguments by name, as far as they are given so, or are those of a Python function that may be asked to write."""
    function = node.target
    if not inspect.isfunction(function) or not {"inplace", "max_norm"} & {*function.__code__.co_varnames}:
        return dict(node.kwargs)
    return inspect.signature(function, follow_wrapped=False).bind_partial(*node.args, **node.kwargs).arguments  # what is called, and not what that is around


def _is_new(gm: GraphModule, node: Node) -> bool:
    """Whether a node makes a tensor of its own."""
    if node.op == "call_module":
        return type(gm.get_submodule(str(node.target))) in MODULES
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        if not torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), "CompositeImplicitAutograd"):
            return all(r.alias_info is None for r in target._schema.returns)
        return last_name(node) in NEW  # the schemas of composite ops do not tell
    if target is operator.add and any(isinstance(a, (tuple, list)) for a in node.args):  # (a, b) + (c,) holds all three
        return False
    return last_name(node) in NEW


def _held(gm: GraphModule, node: Node) -> list[Key]:
    """The storage of a tensor that a graph is given or its module holds, as far as it is known."""
    value = attribute(gm, node) if node.op == "get_attr" else recorded_value(node)
    return [_storage(value)] if isinstance(value, Tensor) else []


def _storage(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # of wrappers and sparse tensors
        return id(tensor)
