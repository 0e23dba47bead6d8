"""The pass that prunes what products with a parameter save, in a graph: `y = x * a`, or `addcmul(b, a, x)`, becomes `y = fxmask_scaled.<name>(x, a, b)`."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.fx import GraphModule

from ..finding.choose import Decision
from ..finding.products import MUL_, SCALED, parameters_behind, product_parts
from ..infra import Pass, call_again, replace_node
from ..settings.activation_pruning import ActivationPruning
from .graph_calls import call_site, calls_of
from .pruned_linears import PrunedSite


class PrunedProductCall(PrunedSite):
    """Of a product: (x, a, b) -> y. `_fxmask_call`: its op, its target, and which of these its arguments are."""

    def __init__(self, config: ActivationPruning, path: str, call: tuple[str, Any, tuple[str, ...], dict[str, Any]]) -> None:
        super().__init__(config, path, True)
        self._fxmask_call = call

    def forward(self, x: Tensor, a: Tensor, b: Tensor | None = None) -> Tensor:
        self._begin(x)
        return self._fxmask_pruning.product(x, a, b, self._fxmask_call[1] in MUL_, self.training)


class PruneProducts(Pass):
    """Rewrites the products that were selected in one graph: [(decision, configuration)]."""

    def __init__(self, chosen: list[tuple[Decision, ActivationPruning]]) -> None:
        self.chosen = chosen

    def run(self, gm: GraphModule) -> list[str]:
        names, behind = [], parameters_behind(gm)
        for d, config in self.chosen:
            if d.candidate.host is not gm or d.candidate.weight_path is None:
                continue
            for node in d.candidate.nodes:
                parts = product_parts(node, behind)
                roles: dict[Any, Any] = {n: k for k, n in parts.items()}
                call = (node.op, node.target, tuple(roles[n] for n in node.args), {k: roles.get(v, v) for k, v in node.kwargs.items()})
                site = PrunedProductCall(config, d.candidate.weight_path, call)
                replace_node(gm, node, call_site(gm, SCALED, node, site, tuple(parts[k] for k in ("x", "a", "b") if k in parts)))
            names.append(d.candidate.name)
        return names


class RestoreProducts(Pass):
    """Turns pruned products of a graph back into what they were."""

    def run(self, gm: GraphModule) -> list[str]:
        names = []
        for node, site in calls_of(gm, PrunedProductCall):
            parts = dict(zip(("x", "a", "b"), node.args, strict=False))
            op, target, args, kwargs = site._fxmask_call
            with gm.graph.inserting_before(node):
                new = gm.graph.create_node(op, target, tuple(parts[k] for k in args), {k: parts.get(v, v) for k, v in kwargs.items()})
            replace_node(gm, node, new)
            call_again(gm, new, str(node.target).rpartition(".")[2])  # `call_site` keeps the name
            names.append(site._fxmask_name)
        if SCALED in gm._modules:
            delattr(gm, SCALED)
        return names
