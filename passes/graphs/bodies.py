"""A Dynamo graph and the bodies of its checkpoints, conditions and regions, each once: where their inputs come from, and whether masks may stand there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch.fx import GraphModule, Node

from .graph_calls import behind
from .regions import bodies_of

# bodies that compute what they say, of operands that are passed one by one
TRANSPARENT = ("tag_activation_checkpoint", "wrap_activation_checkpoint", "wrap", "cond", "invoke_subgraph")


class Body(NamedTuple):
    """A graph, where its inputs come from (placeholder -> placeholder of the outermost graph), and what keeps its linears dense, if anything does.

    `several`: inputs that come from another place in another call of the same body.
    """

    graph: GraphModule
    origin: dict[Node, Node]
    closed: str = ""
    several: frozenset[Node] = frozenset()
    given: Mapping[Node, Node] = {}  # by input of a body, this one or another: what its calls give for it, where they agree

    def closed_to(self, w: Node) -> str:
        """What keeps a linear with this weight dense: a body of several layers can have one mask only."""
        return self.closed or ("a region that is compiled once for several layers" if self.several.intersection(behind(w)) else "")


def graphs_of(gm: GraphModule) -> list[Body]:
    """The graph and the bodies inside it, each once."""
    return list(_graphs(gm, {n: n for n in gm.graph.nodes if n.op == "placeholder"}, "", {}).values())


def _graphs(gm: GraphModule, origin: dict[Node, Node], closed: str, found: dict[int, Body]) -> dict[int, Body]:
    if id(gm) in found:
        known = found[id(gm)].origin
        several = {n for n in known.keys() | origin.keys() if known.get(n) is not origin.get(n)}
        for body in graphs_of(gm) if several else []:  # those inside are called as often
            same = found[id(body.graph)]
            found[id(body.graph)] = same._replace(several=same.several | {n for n, source in body.origin.items() if source in several})
        return found
    found[id(gm)] = Body(gm, origin, closed)
    for node, inner, given in bodies_of(gm):
        name = getattr(node.target, "__name__", str(node.target))
        passed = {i: origin[g] for i, g in given.items() if g in origin}
        _graphs(inner, passed, closed or ("" if name in TRANSPARENT else f"the body of {name}"), found)
    return found


def given_to(bodies: Sequence[Body]) -> dict[Node, Node]:
    """{input of a body: what its calls give for it, where they agree}."""
    found: dict[Node, Node | None] = {}
    for inner, outer in (pair for body in bodies for _, _, operands in bodies_of(body.graph) for pair in operands.items()):
        found[inner] = outer if found.get(inner, outer) is outer else None
    return {inner: outer for inner, outer in found.items() if outer is not None}
