"""FLOP of a weight element in a forward, which `fxmask.allocate` shares out: an element costs as many as the tokens that it meets say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from .kernels.errors import ConfigError, message
from .passes.counting import other_products, rules  # noqa: F401  (they register the costs of ops)
from .passes.counting.capture import capture
from .passes.counting.moves import work_of
from .passes.counting.traced import arguments
from .passes.counting.work import Target
from .passes.finding.choose import Decision


def element_flop(model: nn.Module, layers: Sequence[list[Decision]], inputs: Any, kwargs: Any) -> list[int]:
    """FLOP of one weight element of each layer in a forward: twice the tokens that it meets, over all calls."""
    args, named = arguments({} if inputs is None else inputs, kwargs)
    if not any(isinstance(t, Tensor) for t in tree_leaves((args, named))):
        what = f"method='flop' counts the tokens of each layer: expected inputs= with the model's arguments, got {type(inputs).__name__}."
        raise ConfigError(message(what, "fxmask.allocate", "a tensor, a tuple of arguments, or a dict of keyword arguments; shapes are enough (meta tensors)."))
    by_weight: Counter[str] = Counter()
    by_module: Counter[tuple[str, int]] = Counter()  # of weights that are computed from several parameters
    with torch.no_grad():
        calls = capture(model, args, named, False, None, None).calls
    for w in (w for c in calls for w in work_of(c, Target())):
        if w.phase == "fwd" and w.m and w.weight and w.call is not None:
            by_weight[w.weight] += w.cost.flop_useful
            by_module[w.call.module, w.elements] += w.cost.flop_useful
    uses = []
    for group in layers:
        flop = sum(by_weight[d.candidate.param_name] for d in group)
        flop = flop or sum(by_module[d.candidate.name, d.candidate.weight.numel()] for d in group)
        if not flop:
            name = group[0].candidate.name
            what = f"no FLOP of {name!r} in a forward with these inputs: expected every layer to be reached."
            raise ConfigError(message(what, name, f"exclude={name!r}, or inputs that reach it."))
        uses.append(flop // group[0].candidate.weight.numel())
    return uses
