"""Transposes of parameters that Dynamo computes in front of a body go into it, to the product that reads them: `checkpoint(lambda x: x @ w.T, x)`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_flatten, tree_unflatten

from .bodies import TRANSPARENT, Body, graphs_of
from .regions import bodies_of

Transposed = Callable[[Body, Node, Node], "Node | None"]  # of a graph, a node and a user of it: the parameter whose transpose the user reads there


class _Call(NamedTuple):
    """Of one body or, of a condition, several: `given` by each one's inputs."""

    around: Body
    node: Node
    given: list[dict[Node, Node]]


def sunk(gm: GraphModule, transposed: Transposed) -> list[Body]:
    """Let them sink; gives the graph and the bodies inside it, as `graphs_of` does. All calls of one body must give it one there, in one form."""
    while True:  # a body in a body is given it by the one around it
        bodies = graphs_of(gm)
        if not any(_sink(inners, calls, transposed) for inners, calls in _calls(bodies)):
            return bodies


def _calls(bodies: Sequence[Body]) -> list[tuple[tuple[GraphModule, ...], list[_Call]]]:
    """The calls of each body; of several, where these stand beside each other in all calls."""
    found: dict[tuple[GraphModule, ...], list[_Call]] = {}
    for body in bodies:
        by_node: dict[Node, dict[GraphModule, dict[Node, Node]]] = {}
        for node, inner, given in bodies_of(body.graph):
            by_node.setdefault(node, {})[inner] = given
        for node, inners in by_node.items():
            found.setdefault(tuple(inners), []).append(_Call(body, node, list(inners.values())))
    times = Counter(inner for inners in found for inner in inners)
    return [(inners, calls) for inners, calls in found.items() if all(times[inner] == 1 for inner in inners) and all(map(_is_open, calls))]


def _is_open(call: _Call) -> bool:
    return getattr(call.node.target, "__name__", "") in TRANSPARENT and all(call.given)


def _sink(inners: Sequence[GraphModule], calls: Sequence[_Call], transposed: Transposed) -> bool:
    """Whether there was one among the operands."""
    done = False
    for i, outers in enumerate(zip(*(call.given[0].values() for call in calls), strict=True)):
        weights = [w for call, o in zip(calls, outers, strict=True) if (w := transposed(call.around, o, call.node)) is not None]
        if len(weights) < len(outers) or any((o.target, o.args[1:], o.kwargs) != (outers[0].target, outers[0].args[1:], outers[0].kwargs) for o in outers):
            continue
        for inner, given in zip(inners, calls[0].given, strict=True):
            _transpose_inside(inner, list(given)[i], outers[0], weights[0])
        for call, w in zip(calls, weights, strict=True):
            _give(call.node, i - len(call.given[0]), w)
        done = True
    return done


def _transpose_inside(inner: GraphModule, entry: Node, outer: Node, w: Node) -> None:
    """An input that was `outer`, a transpose of w, becomes w, and its transpose is computed behind it."""
    with inner.graph.inserting_after(entry):
        node = inner.graph.create_node(outer.op, outer.target, (entry, *outer.args[1:]), outer.kwargs)
    entry.replace_all_uses_with(node, delete_user_cb=lambda user: user is not node)
    node.meta, entry.meta = entry.meta, {**entry.meta, **{key: w.meta[key] for key in ("example_value", "val") if key in w.meta}}
    inner.recompile()


def _give(node: Node, i: int, w: Node) -> None:
    """The i-th of a call's operands, counted from the end, becomes w."""
    leaves, spec = tree_flatten((node.args, node.kwargs))
    leaves[[n for n, a in enumerate(leaves) if isinstance(a, Node)][i]] = w
    node.args, node.kwargs = tree_unflatten(leaves, spec)
