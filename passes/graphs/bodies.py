"""A Dynamo graph and the bodies of its checkpoints, conditions and regions, each once: where their inputs come from, and whether masks may stand there."""

from __future__ import annotations

from typing import NamedTuple

from torch.fx import GraphModule, Node

from .graph_calls import Given, behind
from .regions import bodies_of, given_to, holders_first

# bodies that compute what they say, of operands that are passed one by one
TRANSPARENT = ("tag_activation_checkpoint", "wrap_activation_checkpoint", "wrap", "cond", "invoke_subgraph")


class Body(NamedTuple):
    """A graph, where its inputs come from (placeholder -> placeholder of the outermost graph), and what keeps its linears dense, if anything does.

    `given` and `places` are of all bodies: what calls give for their inputs, and where these come from outside of all bodies, in one call or in another.
    """

    graph: GraphModule
    origin: dict[Node, Node]
    closed: str
    given: Given
    places: Given

    def behind(self, w: Node) -> list[Node]:
        """What a node is computed from, in the graphs around this one, too."""
        return behind(w, given=self.given)

    def closed_to(self, w: Node) -> str:
        """What keeps a linear with this weight dense: a body of several layers can have one mask only."""
        several = any(len(self.places.get(n, ())) > 1 for n in self.behind(w))
        return self.closed or ("a region that is compiled once for several layers" if several else "")


def graphs_of(gm: GraphModule) -> list[Body]:
    """The graph and the bodies inside it, each once."""
    found = _graphs(gm)
    given = given_to(found)
    known: dict[Node, list[Node]] = {}
    places = {n: _roots(n, given, known) for n in given}
    bodies = []
    for graph, closed in found.items():
        first = {n: places[n][0] if n in places else n for n in graph.graph.find_nodes(op="placeholder")}
        origin = {n: root for n, root in first.items() if root.graph is gm.graph and root.op == "placeholder"}
        bodies.append(Body(graph, origin, closed, given, places))
    return bodies


def _graphs(gm: GraphModule) -> dict[GraphModule, str]:
    """Each with what closes it; a graph before its bodies, and behind all graphs that share it as one of theirs."""
    calls: dict[GraphModule, list[tuple[GraphModule, str]]] = {}

    def called(graph: GraphModule) -> list[GraphModule]:
        calls[graph] = [(inner, getattr(node.target, "__name__", str(node.target))) for node, inner, _ in bodies_of(graph)]
        return [inner for inner, _ in calls[graph]]

    found = dict.fromkeys(holders_first([gm], called), "")
    for graph, closed in found.items():
        for inner, name in calls[graph]:
            found[inner] = found[inner] or closed or ("" if name in TRANSPARENT else f"the body of {name}")
    return found


def _roots(n: Node, given: Given, known: dict[Node, list[Node]]) -> list[Node]:
    """What an input comes from outside of all bodies that hand it on: from one place, or in several calls from several. `known`: those of before."""
    if n not in known:
        known[n] = list(dict.fromkeys(root for outer in given[n] for root in _roots(outer, given, known))) if n in given else [n]
    return known[n]
