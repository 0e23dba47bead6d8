"""Products of a graph that read a weight and are no linear call, such as `torch.einsum("bi,oi->bo", x, fc.weight)`: no pass masks them, so they are named."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from torch.fx import GraphModule, Node

from ..graphs.writes import last_name
from ..infra import is_transpose

SUMS = ("addmm", "baddbmm")  # whose first argument is added
KERNELS = ("conv1d", "conv2d", "conv3d")
FREE = ("einsum", "tensordot", *KERNELS)  # which order the axes as they like
PRODUCTS = {"matmul", "__matmul__", "__rmatmul__", "mm", "bmm", *SUMS, *FREE}


class Read(NamedTuple):
    """One such product: the node of the weight, its own, and whether it may be what a linear computes, x W^T; a plain `x @ w` is not."""

    weight: Node
    node: Node
    as_linear: bool

    @property
    def words(self) -> str:
        return f"{last_name(self.node)}() reads it, which is no linear call"


def dense_reads(gm: GraphModule, is_weight: Callable[[Node], bool]) -> Iterator[Read]:
    """The products that multiply something which the graph is given by a weight alone, or by a view or a cast of one; of weights with each other, none."""
    behind: dict[Node, tuple[set[Node], bool]] = {}  # of what is made of no input: the weights that it is made of, and whether axes are in another order
    for node in gm.graph.nodes:
        inputs = node.all_input_nodes
        if node.op == "get_attr" or is_weight(node):
            behind[node] = ({node} if is_weight(node) else set(), False)
        elif inputs and all(n in behind for n in inputs):
            behind[node] = (set.union(*(behind[n][0] for n in inputs)), is_transpose(node) or any(behind[n][1] for n in inputs))
        elif node.op in ("call_function", "call_method") and (name := last_name(node)) in PRODUCTS:
            added = node.args[0] if name in SUMS and node.args else node.kwargs.get("input")
            for n in inputs:
                weights, turned = behind.get(n, (set(), False))
                if len(weights) == 1 and not (name in SUMS and n is added):
                    yield Read(next(iter(weights)), node, turned or name in FREE)
