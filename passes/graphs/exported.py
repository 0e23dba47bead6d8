"""Masks that a trace of a masked model holds: `torch.export` of what `apply` had changed keeps no mask's owner, only the ops."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from ...kernels import prune_ops  # noqa: F401  (registers the ops of pruned inputs)
from ..finding.candidate import join
from ..finding.dense_reads import is_product
from ..finding.graph_linears import graph_modules, masks_behind
from ..finding.made import Made, inputs_in, is_index, is_small, joined, made_of_weights
from ..infra import recorded_value
from ..state.tensors import is_taken
from .element_masks import OPS, by_element, is_masking
from .graph_calls import BLOCK_INDEX, LINEARS, MASKED_LINEAR, Given, behind, call_stack, layer_name, resolve, weight_arg
from .graph_site import made_by
from .regions import attribute, given_to, incoming, is_trainable

ARGUMENTS: dict[Any, list[str]] = {op: [a.name for a in op._schema.arguments] for op in (MASKED_LINEAR, torch.ops.fxmask.pruned_linear.default)}
EXPAND = torch.ops.aten.expand.default
PARAMETER = "p_"  # how the inputs of `ExportedProgram.graph_module` begin that are parameters
RESHAPES = (torch.ops.aten.reshape.default, torch.ops.aten.view.default)  # a decomposition makes the second of the first

Places = Mapping[Graph, tuple[str, GraphModule]]  # where graphs lie in the model, and whose they are


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
    places = {gm.graph: (prefix, gm) for prefix, gm in graphs}
    comes_in, given = incoming(graphs), given_to(gm for _, gm in graphs)
    masks_in = _made_of_masks([gm for _, gm in graphs], given)
    made: dict[Node, list[Node]] = {}
    for n, mask in ((n, mask) for n, masks in masks_in.items() for mask in masks):
        made.setdefault(mask, []).append(n)

    def inside(node: Node, w: Any, mask: Any, block: tuple[int, int] | None, backward: str | None, impl: str) -> Inside:
        name, weight, unfit = _weight(model, node, w, places, comes_in)
        return Inside(name, node, weight, block, backward, impl, None if unfit else _value(places, mask), None if block is None else _kept(places, mask), unfit)

    for node in (n for _, gm in graphs for n in gm.graph.nodes):
        if node.target in ARGUMENTS:
            call: Any = {**dict(zip(ARGUMENTS[node.target], node.args, strict=False)), **node.kwargs}
            w, mask, rows, cols, backward, impl = map(call.get, ("w", "mask", "block_rows", "block_cols", "backward", "impl"))
            if mask is not None and made_by(places[mask.graph][1], mask) is None:
                yield inside(node, w, mask, (rows, cols), backward or "masked", impl or "auto")
            continue
        of_weight = node.target in LINEARS  # of others nothing says which operand it is
        masks = masks_behind(weight_arg(node), given) if of_weight else [mask for n in node.all_input_nodes for mask in masks_in.get(n, ())]
        for read in dict.fromkeys(masks) if is_product(node) else ():
            if (element := by_element(read, given)) is not None:
                if read.target in OPS or all(n.name.startswith(PARAMETER) for n in inputs_in(element.weight, given)):  # in a body an input looks like a weight
                    yield inside(node, element.weight, element.mask, None, None, "masked_dense")
            elif (block := _block(read, made[read])) is not None:
                yield inside(node, _put_on(read, made[read]), read, block, None, "reference")


def _made_of_masks(graphs: Sequence[GraphModule], given: Given) -> dict[Node, list[Node]]:
    """What graphs, each before its bodies, make of block masks and of weights and constants alone, W∘M among it, up to a product: the masks.

    Inputs may choose among weights, and scale them. Of an N:M mask W∘M has the mask's place.
    """
    found: dict[Node, list[Node]] = {}
    constants: dict[Node, Made] = {}
    for gm in graphs:
        weights: dict[Node, Made] = {n: ((n,), False) for n in gm.graph.find_nodes(op="get_attr") if is_trainable(gm, n)}
        handed = [n for n in gm.graph.find_nodes(op="placeholder") if n in given and all(outer in constants for outer in given[n])]
        constants |= made_of_weights(gm, {**weights, **{n: joined(constants[outer] for outer in given[n]) for n in handed}})
        for node in gm.graph.nodes:
            masks = [mask for n in given.get(node, node.all_input_nodes) for mask in found.get(n, ())]
            if is_masking(node, given):
                found[node] = [node]
            elif masks and not is_product(node) and all(n in found or n in constants or is_small(n) or is_index(n) for n in node.all_input_nodes):
                found[node] = [*dict.fromkeys(masks)]
    return found


def _block(mask: Node, made: list[Node]) -> tuple[int, int] | None:
    """The block of a mask, or what the weight fills of it; None where nothing gives each of its bits to a block of a weight."""
    args: Any = mask.args
    if mask.target is BLOCK_INDEX:
        return args[3], args[4]
    sizes: Any = next((node.args[1] for node in made if node.target is EXPAND), None)
    return None if sizes is None else (sizes[1], sizes[3])


def _put_on(mask: Node, made: list[Node]) -> Any:
    """The weight that a mask is put on: of a cached one, what the mask meets first."""
    met = (n for node in made for n in node.all_input_nodes if n not in made and not is_index(n))  # the flag of `rigl` is a bool
    return mask.args[0] if mask.target is BLOCK_INDEX else next(met, None)


def _weight(model: nn.Module, node: Node, w: Node | None, places: Places, comes_in: dict[Node, str]) -> tuple[str, Tensor, str]:
    """A layer's name and its weight, by the parameter behind it; by the call where there is none, or several. And `Inside.unfit`."""
    own = {n: join(places[n.graph][0], str(n.target)) for n in behind(w) if isinstance(_constant(places, n), nn.Parameter)}
    paths = {comes_in.get(n) or own.get(n, ""): n for n in behind(w)}
    paths.pop("", None)
    if len(paths) == 1:
        ((path, read),) = paths.items()
        weight, traced = resolve(model, path), recorded_value(read)
        resized = isinstance(traced, Tensor) and traced.shape != weight.shape
        return layer_name(path), weight, "taken" if is_taken(weight) else "resized" if resized else ""
    return join(places[node.graph][0], call_stack(node)[0] or node.name), torch.empty(0, device="meta"), ""


def _constant(places: Places, node: Node) -> Any:
    return attribute(places[node.graph][1], node) if node.op == "get_attr" else None


def _value(places: Places, node: Any) -> Any:
    """What a graph's mask is now, where it is a constant or made of the weight alone; None otherwise."""
    if not isinstance(node, Node):
        return node
    if node.target not in (BLOCK_INDEX, *RESHAPES):
        return _constant(places, node)
    args = [_value(places, a) for a in node.args]
    return None if any(v is None for v in args) else node.target(*args)


def _kept(places: Places, mask: Node) -> int | None:
    """How many blocks a graph keeps, by the constant that it was traced with."""
    keep = _value(places, mask.args[1]) if mask.target is BLOCK_INDEX else None
    return None if keep is None or keep.is_meta else int(keep)
