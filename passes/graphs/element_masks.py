"""N:M masks that a trace holds: which of its ops are W∘M of a layer that was masked before it was traced, and which are somebody's own."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.fx import Node

from ...kernels import nm_ops  # noqa: F401  (registers the N:M ops)
from ..infra import recorded_value
from .graph_calls import Given, behind, is_mask

OPS = {torch.ops.fxmask.nm_sr_ste.default: 1, torch.ops.fxmask.nm_learned.default: None, torch.ops.fxmask.nm_magnitude.default: None}
# ours, of the weight that is the first argument: where the mask stands
PLAIN = {torch.ops.aten.where.ScalarOther: (1, 0), torch.ops.aten.where.self: (1, 0), torch.ops.aten.mul.Tensor: (0, 1)}
# PyTorch's, where the weight and the mask stand; a decomposition makes the second of the first, the last one is by a soft mask
NAMES = ("nm_mask", "nm_logits", "nm_patterns")  # of a layer's attributes
HELD = ("placeholder", "get_attr")
BITS = torch.ops.aten.view.dtype  # by which masks by magnitude rank a weight


class ByElement(NamedTuple):
    """What W∘M of an N:M mask is made of; the mask is None where no node alone is one."""

    weight: Any
    mask: Any


def by_element(node: Node, given: Given | None = None) -> ByElement | None:
    """The weight and the mask of a node that is W∘M of an N:M mask, or None: anybody may multiply by `torch.where(mask, w, 0)`.

    given: what calls give for the inputs of bodies, see `regions.given_to`; those of while_loop have no names of their own.
    """
    args: Any = node.args
    if node.target in OPS:
        at = OPS[node.target]
        return ByElement(args[0], None if at is None else args[at])
    if node.target not in PLAIN or len(args) < 2:
        return None
    w, mask = (args[i] for i in PLAIN[node.target])
    alike = isinstance(w, Node) and isinstance(mask, Node) and _shape(w) == _shape(mask)  # ranks and logits have such ops, too, with numbers
    return ByElement(w, mask) if alike and _in_nm_layer(node, w, mask, given or {}) else None


def is_masking(node: Node, given: Given | None = None) -> bool:
    """Whether a node is a block mask, or W∘M of an N:M mask: what is made of it is no dense weight. given: as above."""
    return is_mask(node) or by_element(node, given) is not None


def _shape(node: Node) -> Any:
    return getattr(recorded_value(node), "shape", None)


def _in_nm_layer(node: Node, w: Node, mask: Node, given: Given) -> bool:
    """Whether a call was traced in a layer with an N:M mask: by what the trace calls its class; where it does not, by what the mask is made of.

    It does not in bodies, and decompositions of an autocast region leave the module around it.
    """
    stack = node.meta.get("nn_module_stack", {})
    _, cls = next(reversed(stack.values()), ("", ""))
    if (cls if isinstance(cls, str) else f"{cls.__module__}.{cls.__name__}").startswith("fxmask.swapped.NM"):
        return True
    if w.op not in HELD or (stack and w.op != "get_attr"):  # no walk for each product of activations
        return False
    return any(n.target is BITS or _beside(_outside(n, given), _outside(w, given)) for n in behind(mask))


def _outside(n: Node, given: Given) -> Node:
    """What an input of a body is where it comes from."""
    while given.get(n):
        n = given[n][0]
    return n


def _beside(n: Node, w: Node) -> bool:
    """Whether a node is an attribute of the layer whose weight is `w`; of the inputs of a body the names alone tell."""
    owner, _, name = str(n.target).rpartition(".")
    return n.op == w.op and name.endswith(NAMES) and owner == str(w.target).rpartition(".")[0]
