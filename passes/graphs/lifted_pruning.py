"""Activation pruning in a Dynamo graph: products with parameters that are inputs of the graph, and the pass that prunes what linears and these save.

Before: `y = linear(x, w, b)`, or the masked one that `lifted_mask` has made of it, and `y = x * a`. After: calls of `linear` and `product` below, which count
the kept blocks from shapes when the graph is traced further, and so hold nothing between calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from ...kernels import prune_ops, scale_ops
from ..finding.candidate import Candidate, weight_problem
from ..finding.choose import Decision
from ..finding.products import MUL_, larger, parameters_behind, product_parts
from ..infra import Pass, replace_node
from ..settings.activation_pruning import ActivationPruning, saves
from .bodies import Body
from .graph_calls import LINEARS, MASKED_LINEAR, bias_arg, input_arg, weight_arg
from .input_sources import source_name


def linear(x: Tensor, w: Tensor, b: Tensor | None, block: int, ratio: float, noise: float, impl: str, *masked: Any) -> Tensor:
    """A linear whose x is saved pruned where a backward will ask for dW; `masked`: what follows the bias of `masked_linear`."""
    if not saves(w):
        return MASKED_LINEAR(x, w, b, *masked) if masked else F.linear(x, w, b)
    if not masked:
        return prune_ops.linear(x, w, b, block, ratio, noise, dw_impl=impl)
    mask, rows, cols, backward, dense, mask_impl, lists = masked
    return prune_ops.linear(x, w, b, block, ratio, noise, mask, (rows, cols), backward, dense, mask_impl, lists, impl)


def product(x: Tensor, a: Tensor, b: Tensor | None, block: int, ratio: float, noise: float, inplace: bool) -> Tensor:
    """A product with a parameter whose x is saved pruned where a backward will ask for da."""
    return scale_ops.scale(x, a, b, block, ratio, noise, inplace) if saves(a) else scale_ops.dense(x, a, b, inplace)


Roles = dict[Node, tuple[str, ...]]  # of a product: what its arguments are, `x`, `a` and `b`


def find_lifted_products(bodies: Sequence[Body], real: Mapping[Node, Any]) -> tuple[list[Candidate], Roles]:
    """The products of a Dynamo graph and of its bodies with what outermost inputs say to be Parameters, one candidate a host and parameter; their roles."""
    found: dict[Node, Candidate] = {}
    roles: Roles = {}
    for body in bodies:
        weights = {n: value for n, source in body.origin.items() if isinstance(value := real.get(source), nn.Parameter)}
        behind = parameters_behind(body.graph, weights)
        for node in body.graph.graph.nodes:
            parts = product_parts(node, behind)
            if not parts:
                continue
            w, roles[node] = behind[parts["a"]][0], tuple(parts)
            if w not in found:
                name = source_name(body.origin[w]) or w.name
                skip = weight_problem(weights[w]) or larger(node, parts["x"])
                if not skip and (closed := body.closed_to(w)):
                    skip = f"it stands in {closed}, and would be of another layer or miss a gradient; use fxmask.apply on the model"
                found[w] = Candidate(name, name, weights[w], host=body.graph, weight_node=w, skip=skip, sized=False, product=True)
            found[w].nodes.append(node)
    return list(found.values()), roles


def is_called(d: Decision) -> bool:
    """Whether a graph calls the linear, or multiplies by the parameter: a call that takes a weight as an argument has no input of a linear."""
    return d.candidate.product or any(n.target in LINEARS for n in d.candidate.nodes)


class PruneLifted(Pass):
    """Rewrites what was selected in one graph, after the masks: [(decision, configuration)]."""

    def __init__(self, chosen: list[tuple[Decision, ActivationPruning]], roles: Roles) -> None:
        self.chosen, self.roles = chosen, roles

    def run(self, gm: GraphModule) -> list[str]:
        here = [(d.candidate, c, w) for d, c in self.chosen if d.candidate.host is gm and (w := d.candidate.weight_node) is not None]
        # all calls before any is rewritten: the weight of one may be what another gives
        calls = [p.nodes if p.product else [n for n in w.users if n.target in (*LINEARS, MASKED_LINEAR) and weight_arg(n) is w] for p, _, w in here]
        for (p, c, _), nodes in zip(here, calls, strict=True):
            for node in nodes:
                if p.product:
                    parts = dict(zip(self.roles[node], (a for a in (*node.args, *node.kwargs.values()) if isinstance(a, Node)), strict=True))
                    _call(gm, node, product, (parts["x"], parts["a"], parts.get("b"), c.block, c.ratio, c.noise, node.target in MUL_))
                elif node.target in LINEARS:
                    _call(gm, node, linear, (input_arg(node), weight_arg(node), bias_arg(node), c.block, c.ratio, c.noise, c.impl))
                else:
                    x, weight, bias, *masked = node.args
                    _call(gm, node, linear, (x, weight, bias, c.block, c.ratio, c.noise, c.impl, *masked))
        return [p.name for p, _, _ in here]


def _call(gm: GraphModule, node: Node, target: Any, args: tuple[Any, ...]) -> None:
    with gm.graph.inserting_before(node):
        replace_node(gm, node, gm.graph.call_function(target, args))
