"""What a trace has lost already: randomness and statistics that were frozen in the mode of the trace.

`fx.symbolic_trace` and `torch.export` bake `module.training` in. A dropout traced in train mode drops for ever, one traced in eval is gone or never drops,
and no `.train()` or `.eval()` changes it (Bespalov's code meets it as a DropPath that eval never sees). Masking does not cause that, but whoever masks a
trace should hear it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import GraphModule, Node

from .fused_dropout import DROPOUTS, OTHERS, settings
from .graph_calls import argument

aten = torch.ops.aten
_BATCH_NORMS = (F.batch_norm, aten.batch_norm.default, torch.batch_norm)
_RRELUS = (F.rrelu, torch.rrelu, torch.rrelu_, aten.rrelu.default, aten.rrelu_.default)
_ATTENTION = {F.scaled_dot_product_attention, aten.scaled_dot_product_attention.default}
_RANDOM = {
    torch.rand, torch.randn, torch.rand_like, torch.randn_like, torch.bernoulli, torch.randint, torch.randint_like, torch.randperm, torch.normal,
    torch.multinomial, torch.poisson, torch.binomial, F.gumbel_softmax,
}  # fmt: skip
_RANDOM_METHODS = {"bernoulli_", "bernoulli", "uniform_", "normal_", "random_", "exponential_", "log_normal_", "cauchy_", "geometric_", "multinomial"}


def frozen_randomness(gm: GraphModule) -> list[str]:
    """Nodes that no longer follow train and eval: `name (how it is frozen)`. What a trace in eval dropped without a node cannot be seen."""
    return [f"{n.name} ({how})" for n in gm.graph.nodes if (how := _frozen(n))]


def _frozen(node: Node) -> str:
    if node.op == "call_method":
        return "drawn always" if node.target in _RANDOM_METHODS else ""
    if node.op != "call_function":
        return ""
    target: Any = node.target
    p, training = _switches(node)
    if training is not None:
        follows = not isinstance(training, bool)
        does_nothing = p == 0 or (target in _BATCH_NORMS and not training)
        return "" if follows or does_nothing else f"as in {'train' if training else 'eval'}"
    if target in _ATTENTION:
        return "drops always" if argument(node, 4, "dropout_p", 0.0) != 0 else ""
    seeded = isinstance(target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in target.tags
    return "drawn always" if target in _RANDOM or seeded else ""


def _switches(node: Node) -> tuple[Any, Any]:
    """(probability, training flag) of a call, each None where it has none; nodes where the graph computes them."""
    if node.target in (*DROPOUTS, *OTHERS):
        return settings(node)[:2]
    if getattr(node.target, "__name__", "") == "stochastic_depth":  # torchvision's, a leaf of its models
        return argument(node, 1, "p", None), argument(node, 3, "training", True)
    place = 5 if node.target in _BATCH_NORMS else 3 if node.target in _RRELUS else None
    return None, None if place is None else argument(node, place, "training", False)
