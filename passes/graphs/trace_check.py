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

aten = torch.ops.aten
_BATCH_NORMS = (F.batch_norm, aten.batch_norm.default, torch.batch_norm)
# target -> (position and name of the training flag, position and name of the probability)
_FLAGGED: dict[Any, tuple[int, str, int, str]] = {
    **dict.fromkeys((F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout), (2, "training", 1, "p")),
    **dict.fromkeys((torch.dropout, aten.dropout.default, aten.alpha_dropout.default, aten.feature_dropout.default), (2, "train", 1, "p")),
    **dict.fromkeys(_BATCH_NORMS, (5, "training", -1, "")),
    F.rrelu: (3, "training", -1, ""),
}
_ATTENTION = {F.scaled_dot_product_attention, aten.scaled_dot_product_attention.default}
_RANDOM = {torch.rand, torch.randn, torch.rand_like, torch.randn_like, torch.bernoulli, torch.randint, torch.randperm}
_RANDOM_METHODS = {"bernoulli_", "bernoulli", "uniform_", "normal_", "random_"}


def frozen_randomness(gm: GraphModule) -> list[str]:
    """Nodes that no longer follow train and eval: `name (how it is frozen)`. What a trace in eval dropped without a node cannot be seen."""
    return [f"{n.name} ({how})" for n in gm.graph.nodes if (how := _frozen(n))]


def _argument(node: Node, place: int, name: str, default: Any) -> Any:
    return node.args[place] if 0 <= place < len(node.args) else node.kwargs.get(name, default)


def _frozen(node: Node) -> str:
    if node.op == "call_method":
        return "drawn always" if node.target in _RANDOM_METHODS else ""
    if node.op != "call_function":
        return ""
    target: Any = node.target
    stochastic_depth = getattr(target, "__name__", "") == "stochastic_depth"  # torchvision's, a leaf of its models
    if target in _FLAGGED or stochastic_depth:
        place, name, p_place, p_name = _FLAGGED.get(target, (3, "training", 1, "p"))
        training = _argument(node, place, name, True)
        if not isinstance(training, bool) or _argument(node, p_place, p_name, None) == 0:
            return ""
        return "" if target in _BATCH_NORMS and not training else f"as in {'train' if training else 'eval'}"
    if target in _ATTENTION:
        return "drops always" if _argument(node, 4, "dropout_p", 0.0) != 0 else ""
    seeded = isinstance(target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in target.tags
    return "drawn always" if target in _RANDOM or seeded else ""
