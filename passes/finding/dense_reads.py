"""Products of a graph that read a weight and are no linear call, such as `torch.einsum("bi,oi->bo", x, fc.weight)`: no pass masks them, so they are named."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node

from ..graphs.element_masks import is_masking
from ..graphs.graph_calls import LINEARS, behind, weight_arg
from ..graphs.graph_site import graph_weights
from ..graphs.regions import given_to, handed
from ..graphs.writes import last_name
from ..infra import recorded_value
from .made import Made, joined, made_of_weights

CHANGED = "fxmask.apply has changed what becomes of its input, and was asked for no mask of its weight"
SUMS = ("addmm", "baddbmm", "addbmm", "addmv")  # whose first argument is added
KERNELS = ("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "convolution")  # the last is what decompositions make
ATTENTION = ("scaled_dot_product_attention", *(f"_scaled_dot_product_{n}_attention" for n in ("flash", "efficient", "cudnn")))
FORMS = ("bilinear", "_trilinear", "cdist", "_cdist_forward", "_euclidean_dist", "_scaled_dot_product_flash_attention_for_cpu", *ATTENTION)
DENSE = ("pruned_linear", "dropped_linear")  # ours, of layers whose inputs were pruned or dropped before the model was traced
MASK = 6  # the place of a mask of W among the arguments of pruned_linear
FREE = ("einsum", "tensordot", "inner", *FORMS, *KERNELS, *DENSE)  # which order the axes as they like
CHAINS = ("linalg_multi_dot", "chain_matmul")
PRODUCTS = {"matmul", "imatmul", "linalg_matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "mv", *SUMS, *CHAINS, *FREE}


class Read(NamedTuple):
    """One such product: the weight, its own node, and whether it may be what a linear computes, x W^T or W x; a plain `x @ w` is not."""

    weight: Any  # as it is known by
    node: Node
    as_linear: bool

    @property
    def words(self) -> str:
        if self.is_ours:
            return CHANGED
        return f"{last_name(self.node)}() reads it, which is no linear call"

    @property
    def is_ours(self) -> bool:
        """Whether it is what `fxmask.apply` has made of a layer whose input is pruned or dropped, and no op of the same name."""
        return last_name(self.node) in DENSE and str(self.node.target).startswith("fxmask.")


def is_product(node: Node) -> bool:
    """Whether a node multiplies matrices, as a linear call, one of ours or in other words."""
    return node.target in LINEARS or (name := last_name(node)) in PRODUCTS or name == "masked_linear"


def reads_in(graphs: Sequence[tuple[GraphModule, Mapping[Node, Made]]]) -> Iterator[tuple[GraphModule, Read]]:
    """The products of graphs, each before its bodies and with its own weights, that multiply something by what is made of weights alone, for each of these."""
    comes_in: dict[Node, Made] = {}
    given = given_to(gm for gm, _ in graphs)
    wanted = [w for gm, _ in graphs for w in _wanted(gm)]
    parts = set(behind(*wanted, given=given))
    for gm, own in graphs:
        made = made_of_weights(gm, {**own, **comes_in})
        for inner, outer in handed(gm):
            if outer in made:  # in one call of a body, and in others something else may be
                comes_in[inner] = joined([comes_in[inner], made[outer]]) if inner in comes_in else made[outer]
        yield from ((gm, read) for read in _reads(gm, made, parts))


def _wanted(gm: GraphModule) -> list[Any]:
    """The weights of linears, and W∘M, whose mask products may have made."""
    nodes = gm.graph.nodes
    return [*(weight_arg(n) for n in nodes if n.target in LINEARS), *(w for w, _ in graph_weights(gm)), *(n for n in nodes if is_masking(n))]


def _reads(gm: GraphModule, made: Mapping[Node, Made], parts: Collection[Node]) -> Iterator[Read]:
    """None of weights with each other, and of weights and constants none that make a vector, or are among the `parts` of a linear's weight or of a mask."""
    for node in gm.graph.nodes:
        if (name := last_name(node)) in PRODUCTS and (name != "pruned_linear" or node.args[MASK : MASK + 1] in ((), (None,))):
            added, left = _roles(node, name)
            factors = {n: made.get(n, ((), False)) for n in node.all_input_nodes if n is not added}
            if node in made and (node in parts or _is_vector(node, name) or all(weights for weights, _ in factors.values())):
                continue
            for n, (weights, turned) in factors.items():
                yield from (Read(w, node, turned or n is left or name in FREE) for w in weights)


def _is_vector(node: Node, name: str) -> bool:
    """Whether a product gives a vector, as the power iterations of spectral norms do."""
    value = recorded_value(node)
    return value.dim() < 2 if isinstance(value, torch.Tensor) else name == "mv"


def _roles(node: Node, name: str) -> tuple[Any, Any]:
    """What a product adds to, and its left factor; None for what there is not, or is not known."""
    given = [*node.args, *(node.kwargs[k] for k in ("input", "self", "mat1", "batch1", "mat") if k in node.kwargs), None, None]
    if name in SUMS:
        return given[0], given[1]
    if "attention" in name:  # a mask of it
        return next((node.kwargs[k] for k in ("attn_mask", "attn_bias") if k in node.kwargs), node.args[3] if len(node.args) > 3 else None), None
    return None, given[1 if name == "__rmatmul__" else 0]
