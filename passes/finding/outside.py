"""Weights that masks cannot reach: matrices, and stacks of them, that a module holds as Parameters of its own and multiplies by itself, as experts are held."""

from __future__ import annotations

import re
from collections.abc import Iterable

from torch import nn
from torch.fx import GraphModule
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList

from ...kernels.errors import first_of
from ..graphs.graph_calls import layer_name
from .candidate import Candidate, join
from .choose import LORA_PARTS, SMALLEST
from .find import is_table

HOLDERS = (nn.Linear, nn.MultiheadAttention, nn.modules.conv._ConvNd, ParametrizationList)  # they have rows of their own, or are no products with a matrix
RECURRENT = (nn.RNNBase, nn.RNNCellBase)
ADDED = re.compile(r"(^|[._])(pos|rel_pos|position)([._]|$)|embed|position|table|tokens?$")  # names of what is added or looked up


def outside(model: nn.Module, known: Iterable[Candidate]) -> list[Candidate]:
    """Parameters with at least 16 on each of the last two axes that no Linear, embedding, convolution or norm holds, and no graph; `known` are linears."""
    modules = list(model.named_modules())
    held = {id(c.weight) for c in known}
    for _, m in modules:
        if isinstance(m, GraphModule):
            held |= {id(p) for p in m.parameters()}
        elif isinstance(m, HOLDERS) or is_table(m) or "Norm" in type(m).__name__:
            held |= {id(p) for p in m._parameters.values()}
    found: dict[int, Candidate] = {}
    for prefix, m in modules:
        for leaf, p in m._parameters.items():
            if p is None or is_lazy(p) or id(p) in held or p.dim() < 2 or min(p.shape[-2:]) < SMALLEST:
                continue
            name = join(prefix, leaf)
            added = (p.dim() > 2 and p.shape[:-2].numel() == 1) or ADDED.search(leaf) or LORA_PARTS & set(name.split("."))  # (1, tokens, channels) is added
            if not added:
                found.setdefault(id(p), Candidate(layer_name(name), name, p, m, types=type(m).__mro__))
    return list(found.values())


def words(found: list[Candidate]) -> str:
    """How many there are and which, for a message."""
    named = first_of([f"{c.name or c.param_name} {'x'.join(map(str, c.weight.shape))}" for c in found], 3)
    return f"{len(found)} weight{'s' * (len(found) > 1)} of {elements(found):,} elements ({named})"


def elements(found: list[Candidate]) -> int:
    """Of all their weights, each counted once."""
    return sum({id(c.weight): c.weight.numel() for c in found}.values())


def unsaid(found: list[Candidate]) -> list[Candidate]:
    """Without recurrent layers, which nobody takes for a stack of Linears."""
    return [c for c in found if not isinstance(c.module, RECURRENT)]
