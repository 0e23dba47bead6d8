"""What a graph makes of weights and constants alone, and what a weight is made of, where the graph computes it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch._ops import HigherOrderOperator
from torch.fx import GraphModule, Node

from ..graphs.element_masks import is_masking
from ..graphs.graph_calls import Given, behind, has_changed_input
from ..graphs.regions import attribute, handed, is_trainable
from ..graphs.writes import is_filled, last_name
from ..infra import is_transpose, recorded_value
from .said import FACTS

ACTIVATION = "its weight is computed from an input of the model"
NEW_LIKE = ("zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like", "new_zeros", "new_ones", "new_full", "new_empty", "new_tensor")
CAST_LIKE = ("to", "type_as", "view_as", "reshape_as", "expand_as")  # their second argument says what the first is to look like

Made = tuple[tuple[Any, ...], bool]  # the weights that something is made of, and no input, and whether its axes may be in another order


def made_of_weights(gm: GraphModule, given: Mapping[Node, Made]) -> dict[Node, Made]:
    """What a graph makes of weights and constants alone. `given`: weights, and what comes in that is made of some."""
    made: dict[Node, Made] = {}
    for node in gm.graph.nodes:
        inputs = _values_from(node)
        if node in given:
            made[node] = given[node]
        elif is_masking(node):  # what multiplies by W∘M is not dense
            continue
        elif node.op == "get_attr" or _is_fact(node):
            made[node] = (), False
        elif (node.all_input_nodes or node.op == "call_function") and all(n in made for n in inputs):
            weights, turned = joined(made[n] for n in inputs)
            if weights and is_layer(gm, node):
                continue
            made[node] = weights, turned or is_transpose(node) or isinstance(node.target, HigherOrderOperator)  # whose body is not looked into
    return made


def is_layer(gm: GraphModule, node: Node) -> bool:
    """Whether a node is a layer's own call, of a Linear or an Embedding, or its body has one: what it makes, as of a table or of positions, is no weight."""
    if isinstance(node.target, HigherOrderOperator):
        held = (attribute(gm, n) for n in node.all_input_nodes if n.op == "get_attr")
        bodies = [body for body in held if isinstance(body, GraphModule)]
        return any(is_layer(body, n) for body in bodies for n in body.graph.nodes)
    if node.op == "call_module":
        return isinstance(gm.get_submodule(str(node.target)), nn.Linear) or has_changed_input(node)
    return last_name(node) in ("linear", "masked_linear", "embedding", "embedding_bag")


def values_behind(value: Any, given: Given) -> list[Node]:
    """What the values of a weight are computed from, itself included; not what chooses among them, such as the number of an expert."""
    return behind(value, inputs=lambda node: [n for n in given.get(node) or _values_from(node) if not is_index(n)])


def inputs_in(weight: Any, given: Given) -> list[Node]:
    """The inputs of a model, among others, that make a weight an activation: what its values come from, where vectors and numbers would only scale it."""
    found = behind(weight, inputs=lambda node: _makers(node, given.get(node) or _values_from(node)))
    return [n for n in found if n.op == "placeholder" and n not in given]


def _makers(node: Node, inputs: Sequence[Node]) -> Sequence[Node]:
    """Which of a node's inputs make what it gives: of a matrix the matrices, but without one vectors, as `outer` makes one; indices alone, as `one_hot`."""
    values = [n for n in inputs if not is_index(n)] or inputs
    matrices = [] if is_small(node) else [n for n in values if not is_small(n)]
    return matrices or values


def inputs_of_layers(weight: Any, given: Given) -> list[Node]:
    """The inputs for which layers give a weight, or a part of it: the numbers among these, too, such as those of tokens."""
    layers = [n for n in values_behind(weight, given) if n.graph.owning_module is not None and is_layer(n.graph.owning_module, n)]
    found = behind(*layers, given=given, inputs=_values_from)
    return [n for n in found if n.op == "placeholder" and n not in given]


def _values_from(node: Node) -> list[Node]:
    """The inputs that a node takes values of: not those by whose shape, type or place it makes another tensor, as `zeros_like` and `type_as` do.

    Into what was made so others may write, as `w` in `torch.zeros_like(w).copy_(w)`: that is taken to be of what it is like.
    """
    name, inputs, gm = last_name(node), [n for n in node.all_input_nodes if not _is_fact(n)], node.graph.owning_module
    if name in NEW_LIKE:
        return inputs if gm is None or is_filled(gm, node) else []
    return inputs[:1] if name in CAST_LIKE else inputs


def is_index(node: Node) -> bool:
    value = recorded_value(node)
    return isinstance(value, torch.Tensor) and not (value.is_floating_point() or value.is_complex())


def is_small(node: Node) -> bool:
    """Whether a node is a number or a vector, which may lie in several axes."""
    value = recorded_value(node)
    return isinstance(value, torch.Tensor) and sum(n != 1 if isinstance(n, int) else True for n in value.shape) < 2


def _is_fact(node: Node) -> bool:
    """Whether a node is a number, or says what a tensor is, and has no values of one."""
    if isinstance(recorded_value(node), (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)):
        return True
    return node.target in FACTS if node.op == "call_method" else node.target is getattr and node.args[1] in FACTS


def joined(made: Iterable[Made]) -> Made:
    """What is made of all that these are made of."""
    found = list(made)
    return tuple(dict.fromkeys(w for weights, _ in found for w in weights)), any(turned for _, turned in found)


def constants_of(graphs: Iterable[GraphModule]) -> set[Node]:
    """What graphs, each before its bodies, make of constants alone, and of what inputs are, such as a dtype; in a body what every call gives so, too."""
    found: set[Node] = set()
    comes_in: dict[Node, bool] = {}
    for gm in graphs:
        given: dict[Node, Made] = {n: ((n,), False) for n in gm.graph.nodes if is_trainable(gm, n)}
        made = made_of_weights(gm, {**given, **{n: ((), False) for n in gm.graph.nodes if comes_in.get(n)}})
        found.update(n for n, (trained, _) in made.items() if not trained)
        for inner, outer in handed(gm):
            comes_in[inner] = comes_in.get(inner, True) and outer in found
    return found
