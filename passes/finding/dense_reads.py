"""Products of a graph that read a weight and are no linear call, such as `torch.einsum("bi,oi->bo", x, fc.weight)`: no pass masks them, so they are named.

And what graphs make of weights and constants alone, by which these are found.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._ops import HigherOrderOperator
from torch.fx import GraphModule, Node

from ..graphs.element_masks import is_masking
from ..graphs.graph_calls import DROPPED, LINEARS, PRUNED, Given, behind, weight_arg
from ..graphs.graph_site import graph_weights
from ..graphs.regions import attribute, bodies_of, given_to, is_trainable
from ..graphs.writes import is_filled, last_name
from ..infra import is_transpose, recorded_value
from .said import FACTS

ACTIVATION = "its weight is computed from an input of the model"
CHANGED = "fxmask.apply has changed what becomes of its input, and was asked for no mask of its weight"
SUMS = ("addmm", "baddbmm", "addbmm", "addmv")  # whose first argument is added
KERNELS = ("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "convolution")  # the last is what decompositions make
ATTENTION = ("scaled_dot_product_attention", *(f"_scaled_dot_product_{n}_attention" for n in ("flash", "efficient", "cudnn")))
FORMS = ("bilinear", "_trilinear", "cdist", "_cdist_forward", "_euclidean_dist", "_scaled_dot_product_flash_attention_for_cpu", *ATTENTION)
DENSE = ("pruned_linear", "dropped_linear")  # ours, of layers whose inputs were pruned or dropped before the model was traced
MASK = 6  # the place of a mask of W among the arguments of pruned_linear
FREE = ("einsum", "tensordot", "inner", *FORMS, *KERNELS, *DENSE)  # which order the axes as they like
CHAINS = ("linalg_multi_dot", "chain_matmul")
NEW_LIKE = ("zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like", "new_zeros", "new_ones", "new_full", "new_empty", "new_tensor")
CAST_LIKE = ("to", "type_as", "view_as", "reshape_as", "expand_as")  # their second argument says what the first is to look like
PRODUCTS = {"matmul", "imatmul", "linalg_matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "mv", *SUMS, *CHAINS, *FREE}

Made = tuple[tuple[Any, ...], bool]  # the weights that something is made of, and no input, and whether its axes may be in another order


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
        return isinstance(gm.get_submodule(str(node.target)), nn.Linear) or str(node.target).partition(".")[0] in (PRUNED, DROPPED)
    return last_name(node) in ("linear", "masked_linear", "embedding", "embedding_bag")


def is_product(node: Node) -> bool:
    """Whether a node multiplies matrices, as a linear call, one of ours or in other words."""
    return node.target in LINEARS or (name := last_name(node)) in PRODUCTS or name == "masked_linear"


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
        for inner, outer in (pair for _, _, operands in bodies_of(gm) for pair in operands.items()):
            comes_in[inner] = comes_in.get(inner, True) and outer in found
    return found


def reads_in(graphs: Sequence[tuple[GraphModule, Mapping[Node, Made]]]) -> Iterator[tuple[GraphModule, Read]]:
    """The products of graphs, each before its bodies and with its own weights, that multiply something by what is made of weights alone, for each of these."""
    comes_in: dict[Node, Made] = {}
    given = given_to(gm for gm, _ in graphs)
    wanted = [w for gm, _ in graphs for w in _wanted(gm)]
    parts = set(behind(*wanted, given=given))
    for gm, own in graphs:
        made = made_of_weights(gm, {**own, **comes_in})
        for inner, outer in (pair for _, _, operands in bodies_of(gm) for pair in operands.items()):
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
