"""What a trace has lost already: randomness that was frozen in the mode of the trace.

`fx.symbolic_trace` and `torch.export` bake `module.training` in. A dropout traced in train mode drops for ever, one traced in eval is gone or never drops,
and no `.train()` or `.eval()` changes it (Bespalov's code meets it as a DropPath that eval never sees). Masking does not cause that, but whoever masks a
trace should hear it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.fx import GraphModule, Node

_DROPOUTS = {F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, F.rrelu}
_ATEN = {torch.ops.aten.dropout.default, torch.ops.aten.alpha_dropout.default, torch.ops.aten.feature_dropout.default}
_RANDOM = {torch.rand, torch.randn, torch.rand_like, torch.randn_like, torch.bernoulli, torch.ops.aten.bernoulli.default, torch.ops.aten.rand.default}
_RANDOM_METHODS = {"bernoulli_", "bernoulli", "uniform_", "normal_", "random_"}


def frozen_randomness(gm: GraphModule) -> list[str]:
    """Nodes whose randomness no longer follows train and eval: `name (how it is frozen)`. What a trace in eval dropped without a node cannot be seen."""
    return [f"{n.name} ({how})" for n in gm.graph.nodes if (how := _frozen(n))]


def _frozen(node: Node) -> str:
    if node.op == "call_method":
        return "drawn always" if node.target in _RANDOM_METHODS else ""
    if node.op != "call_function":
        return ""
    if node.target in _RANDOM:
        return "drawn always"
    stochastic_depth = getattr(node.target, "__name__", "") == "stochastic_depth"  # torchvision's, a leaf of its models
    if node.target in _DROPOUTS or node.target in _ATEN or stochastic_depth:
        place = 3 if stochastic_depth or node.target is F.rrelu else 2
        training = node.args[place] if len(node.args) > place else node.kwargs.get("training", node.kwargs.get("train", True))
        p = node.args[1] if len(node.args) > 1 else node.kwargs.get("p")
        return f"as in {'train' if training else 'eval'}" if isinstance(training, bool) and p != 0 else ""
    return ""
