"""The pass that turns products with a transposed parameter into linear calls, so that the passes after it see one form.

    x @ w.t(), matmul(x, w.T), mm(x, w.transpose(0, 1)), x @ w.mT, matmul(x, w.permute(1, 0))  ->  linear(x, w)
    addmm(b, x, w.t())                                                                         ->  linear(x, w, b)

`x @ w` is left alone: its weight would be (in, out), and a block of it another thing. So are products of two activations.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.fx import GraphModule, Node

from .infra import TRANSPOSES, Pass

PRODUCTS = {operator.matmul, torch.matmul, torch.mm, torch.ops.aten.mm.default, torch.ops.aten.matmul.default}
SUMS = {torch.addmm, torch.ops.aten.addmm.default}


class Canonicalise(Pass):
    """Rewrites products with parameters; `is_weight(node)` says whether a node is a parameter (N, K)."""

    def __init__(self, is_weight: Callable[[Node], bool]) -> None:
        self.is_weight = is_weight

    def run(self, gm: GraphModule) -> list[str]:
        names = []
        for node in list(gm.graph.nodes):
            operands = self._linear(node)
            if operands is None:
                continue
            with gm.graph.inserting_before(node):
                new = gm.graph.call_function(F.linear, operands)
            new.meta = dict(node.meta)
            node.replace_all_uses_with(new)
            gm.graph.erase_node(node)
            names.append(new.name)
        return names

    def _linear(self, node: Node) -> tuple[Node | None, ...] | None:
        """(x, w, bias) of a product that is a linear, else None."""
        product = (node.op == "call_function" and node.target in PRODUCTS) or (node.op == "call_method" and node.target in ("matmul", "mm", "__matmul__"))
        if product and len(node.args) == 2 and not node.kwargs:
            x, right, bias = *node.args, None
        elif node.op == "call_function" and node.target in SUMS and len(node.args) == 3 and not node.kwargs:
            bias, x, right = node.args
            if not (isinstance(bias, Node) and _axes(bias) == 1):
                return None
        else:
            return None
        w = self._transposed(right)
        return None if w is None or not isinstance(x, Node) else (x, w, bias)  # type: ignore[return-value]

    def _transposed(self, node: object) -> Node | None:
        """The parameter whose transpose a node is."""
        if not isinstance(node, Node) or not node.args or not isinstance(node.args[0], Node):
            return None
        w, axes = node.args[0], node.args[1:]
        flipped = False
        if node.op == "call_function" and node.target is getattr:
            flipped = axes[0] in ("T", "mT")
        elif (node.op == "call_method" and node.target == "t") or node.target in (torch.t, torch.ops.aten.t.default):
            flipped = True
        elif (node.op == "call_method" and node.target in ("transpose", "permute")) or node.target in TRANSPOSES:
            given = axes[0] if len(axes) == 1 and isinstance(axes[0], (tuple, list)) else axes
            swaps = "transpose" in str(node.target)
            flipped = sorted(a % 2 for a in given if isinstance(a, int)) == [0, 1] if swaps else [a % 2 for a in given if isinstance(a, int)] == [1, 0]
        return w if flipped and self.is_weight(w) else None


def _axes(node: Node) -> int:
    value = node.meta.get("example_value", node.meta.get("val"))
    return value.dim() if isinstance(value, torch.Tensor) else 0
