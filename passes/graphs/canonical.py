"""The pass that turns products with a transposed parameter into linear calls, so that the passes after it see one form.

    x @ w.t(), matmul(x, w.T), mm(x, mat2=w.transpose(0, 1)), x @ w.mT, matmul(x, w.permute(1, 0))  ->  linear(x, w)
    addmm(b, x, w.t()), b.addmm(x, w.t())                                                           ->  linear(x, w, b)

`x @ w` is left alone: its weight would be (in, out), and a block of it another thing. So are products of two activations.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import GraphModule, Node

from ..infra import ADJOINTS, SWAP_METHODS, SWAPS, Pass, callee, flip, is_transpose, recorded_value, replace_node

PRODUCTS = {operator.matmul, operator.imatmul, torch.matmul, torch.mm, torch.ops.aten.mm, torch.ops.aten.matmul}  # of ops all overloads; no `@=` is in place
SUMS = {torch.addmm, torch.ops.aten.addmm}
GRADS, ENTER = torch._C._set_grad_enabled, torch.autograd.grad_mode._enter_inference_mode
SWITCHES = (GRADS, ENTER, torch.autograd.grad_mode._exit_inference_mode)  # of gradients


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
            replace_node(gm, node, new)
            names.append(new.name)
        return names

    def _linear(self, node: Node) -> tuple[Node | None, ...] | None:
        """(x, w, bias) of a product that is a linear, else None."""
        function, method = node.op == "call_function", node.op == "call_method"
        bias: Node | None = None
        if (function and callee(node) in PRODUCTS) or (method and node.target in ("matmul", "mm", "__matmul__")):
            x, right = _given(node, ("input", "self"), ("other", "mat2", "tensor2"))
        elif (function and callee(node) in SUMS) or (method and node.target == "addmm"):
            bias, x, right = _given(node, ("input", "self"), ("mat1",), ("mat2",))
            if not (isinstance(bias, Node) and _value(bias).dim() == 1):
                return None
        else:
            return None
        w = transposed(right, node, self.is_weight)
        return None if w is None or not isinstance(x, Node) else (x, w, bias)


def transposed(node: object, user: Node, is_weight: Callable[[Node], bool]) -> Node | None:
    """The parameter whose transpose a node is, with a gradient of its own wherever `user` has one: none for a transpose that was computed under no_grad."""
    if not isinstance(node, Node) or not is_transpose(node):
        return None
    called, attribute = callee(node), flip(node)
    conjugates = called in ADJOINTS or called == "adjoint" or attribute in ("H", "mH")
    w, *axes = [*node.args, *(v for k, v in node.kwargs.items() if k not in ("input", "self"))] if node.args else [None]
    if called in SWAPS or called in SWAP_METHODS:
        flipped = sorted(a % 2 for a in axes if isinstance(a, int)) == [0, 1]
    else:  # t, adjoint and attributes such as .T have no axes
        given = axes[0] if len(axes) == 1 and isinstance(axes[0], (tuple, list)) else axes
        flipped = bool(attribute) or not axes or [a % 2 for a in given if isinstance(a, int)] == [1, 0]
    if not flipped or not isinstance(w, Node) or not is_weight(w) or (conjugates and _value(w).is_complex()):
        return None
    return w if _has_gradients(node) or not _has_gradients(user) else None


def _has_gradients(node: Node) -> bool:
    """Whether gradients are on where a node stands, as far as its graph switches them."""
    last = max((n for target in SWITCHES for n in node.graph.find_nodes(op="call_function", target=target) if n < node), default=None)
    return last is None or (bool(last.args[0]) if last.target is GRADS else last.target is not ENTER)


def _given(node: Node, *names: tuple[str, ...]) -> list[Any]:
    """A call's operands, by position or by one of their names; None for each where there are others."""
    kwargs = dict(node.kwargs)
    found = [*node.args, *(kwargs.pop(n) for same in names[len(node.args) :] for n in same if n in kwargs)]
    return found if len(found) == len(names) and not kwargs else [None] * len(names)


def _value(node: Node) -> torch.Tensor:
    """What the trace knows of a node's tensor; a number where that is nothing."""
    value = recorded_value(node)
    return value if isinstance(value, torch.Tensor) else torch.empty(())
