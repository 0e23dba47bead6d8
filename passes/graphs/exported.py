"""Masks that a trace of a masked model holds: `torch.export` of what `apply` had changed keeps no mask's owner, only the ops."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from ...kernels import nm_ops  # noqa: F401  (registers the two N:M ops)
from ..finding.candidate import join
from ..finding.dense_reads import PRODUCTS, made_of_weights
from ..finding.graph_linears import graph_modules
from ..infra import recorded_value
from ..state.tensors import is_taken
from .graph_calls import BLOCK_INDEX, LINEARS, MASKED_LINEAR, behind, call_stack, is_mask, layer_name, resolve, weight_arg
from .graph_site import GraphSite
from .regions import attribute, given_to, incoming
from .writes import last_name

ARGUMENTS = [a.name for a in MASKED_LINEAR._schema.arguments]
CONVOLUTIONS = {torch.ops.aten.conv2d.default, torch.ops.aten.conv2d.padding}
EXPAND = torch.ops.aten.expand.default
WHERE = torch.ops.aten.where.ScalarOther
ELEMENTWISE = {WHERE: (1, 0), torch.ops.fxmask.nm_sr_ste.default: (0, 1), torch.ops.fxmask.nm_learned.default: (0, None)}
# W∘M of N:M masks: where the weight and the mask stand among the arguments


class Inside(NamedTuple):
    """A masked layer of a traced graph. The weight is an empty one on the meta device where the graph computes it; mask and k as they are now, where known.

    `block` is None for a mask of single elements, of the weight's shape.
    """

    name: str
    node: Node
    weight: Tensor
    block: tuple[int, int] | None
    backward: str | None
    impl: str
    mask: Tensor | None
    kept: int | None
    unfit: str = ""  # "taken" or "resized": since the trace a wrapper has taken the weight, or one of another size has its place; nobody knows the mask then


def exported_masks(model: nn.Module) -> Iterator[Inside]:
    """The masked layers of graphs which no `GraphSite` masks: those of a model that was masked before it was traced."""
    graphs = list(graph_modules(model))
    comes_in, given = incoming(graphs), given_to(gm for _, gm in graphs)
    masks = {n for n, outer in given.items() if any(map(is_mask, outer))} | {n for _, gm in graphs for n in gm.graph.nodes if is_mask(n)}
    for prefix, gm in graphs:
        readers = _readers(gm, masks, comes_in)
        for node in gm.graph.nodes:
            if node.target is MASKED_LINEAR:
                call: Any = {**dict(zip(ARGUMENTS, node.args, strict=False)), **node.kwargs}
                w, mask, rows, cols, backward, impl = map(call.get, ("w", "mask", "block_rows", "block_cols", "backward", "impl"))
                if not _of_a_site(gm, mask):
                    name, weight, unfit = _weight(model, prefix, gm, node, w, comes_in)
                    yield Inside(name, node, weight, (rows, cols), backward, impl or "auto", None if unfit else _value(gm, mask), _kept(gm, mask), unfit)
            elif node in readers:
                made, w, block = readers[node]
                name, weight, unfit = _weight(model, prefix, gm, node, w, comes_in)
                yield Inside(name, node, weight, block, None, "reference", None if unfit else _value(gm, made), _kept(gm, made), unfit)
            elif node.target in LINEARS or node.target in CONVOLUTIONS:
                read: Any = weight_arg(node)
                if read.target in ELEMENTWISE and (read.target is not WHERE or _in_nm_layer(node)):
                    w_at, mask_at = ELEMENTWISE[read.target]
                    name, weight, unfit = _weight(model, prefix, gm, node, read.args[w_at], comes_in)
                    known = None if unfit or mask_at is None else _value(gm, read.args[mask_at])
                    yield Inside(name, node, weight, None, None, "masked_dense", known, None, unfit)


def _readers(gm: GraphModule, masks: set[Node], comes_in: dict[Node, str]) -> dict[Node, tuple[Node, Node, tuple[int, int]]]:
    """What multiplies by W∘M that the graph computes, as for an owner that reads a weight: the mask, the weight that it is put on, and its block."""
    parameters = {n for n in gm.graph.nodes if n in comes_in or isinstance(_constant(gm, n), nn.Parameter)}
    weights = made_of_weights(gm, {n: ((n,), False) for n in parameters})
    masked: dict[Node, Node] = {}  # what is made of a mask and weights alone: the mask
    blocks: dict[Node, tuple[int, int]] = {}
    put_on: dict[Node, Node] = {}
    found: dict[Node, tuple[Node, Node, tuple[int, int]]] = {}
    for node in gm.graph.nodes:
        args: Any = node.args
        made = node if node in masks else next((masked[n] for n in node.all_input_nodes if n in masked), None)
        if made is None:
            continue
        if node.target in LINEARS or last_name(node) in PRODUCTS:
            found[node] = made, put_on[made], blocks[made]
        elif made is node or all(n in masked or n in weights for n in node.all_input_nodes):
            masked[node] = made
            if node.target is BLOCK_INDEX:
                blocks[made] = args[3], args[4]
            elif node.target is EXPAND and made not in blocks:  # a cached mask, each of its bits to a block
                blocks[made] = args[1][1], args[1][3]
            for w in (n for n in node.all_input_nodes if n in weights and weights[n][0]):
                put_on.setdefault(made, w)
    return found


def _of_a_site(gm: GraphModule, mask: Node) -> bool:
    """Whether the mask is that of a `GraphSite`, alone or among what its call gives."""
    call = mask.args[0] if mask.target is operator.getitem else mask
    return isinstance(call, Node) and call.op == "call_module" and isinstance(gm.get_submodule(str(call.target)), GraphSite)


def _in_nm_layer(node: Node) -> bool:
    """Whether a call was traced in a layer with an N:M mask, by what the trace calls its class: anybody may multiply by `torch.where(mask, w, 0)`."""
    _, cls = next(reversed(node.meta.get("nn_module_stack", {}).values()), ("", ""))
    return (cls if isinstance(cls, str) else f"{cls.__module__}.{cls.__name__}").startswith("fxmask.swapped.NM")


def _weight(model: nn.Module, prefix: str, gm: GraphModule, node: Node, w: Node, comes_in: dict[Node, str]) -> tuple[str, Tensor, str]:
    """A layer's name and its weight, by the parameter behind it; by the call where there is none, or several. And `Inside.unfit`."""
    paths = {comes_in.get(n) or (join(prefix, str(n.target)) if isinstance(_constant(gm, n), nn.Parameter) else ""): n for n in behind(w)}
    paths.pop("", None)
    if len(paths) == 1:
        ((path, read),) = paths.items()
        weight, traced = resolve(model, path), recorded_value(read)
        resized = isinstance(traced, Tensor) and traced.shape != weight.shape
        return layer_name(path), weight, "taken" if is_taken(weight) else "resized" if resized else ""
    return join(prefix, call_stack(node)[0] or node.name), torch.empty(0, device="meta"), ""


def _constant(gm: GraphModule, node: Node) -> Any:
    return attribute(gm, node) if node.op == "get_attr" else None


def _value(gm: GraphModule, node: Any) -> Any:
    """What a graph's mask is now, where it is a constant or made of the weight alone; None otherwise."""
    if not isinstance(node, Node):
        return node
    if node.target not in (BLOCK_INDEX, torch.ops.aten.reshape.default):
        return _constant(gm, node)
    args = [_value(gm, a) for a in node.args]
    return None if any(v is None for v in args) else node.target(*args)


def _kept(gm: GraphModule, mask: Node) -> int | None:
    """How many blocks a graph keeps, by the constant that it was traced with."""
    keep = _value(gm, mask.args[1]) if mask.target is BLOCK_INDEX else None
    return None if keep is None or keep.is_meta else int(keep)
