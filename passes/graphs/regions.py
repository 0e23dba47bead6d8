"""The bodies of control flow (`cond`, `scan`, `while_loop`, `map`, checkpoints): what a call hands to them, and which parameters come in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

from torch import nn
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from ..finding.candidate import join
from .graph_calls import calls_of


def bodies_of(gm: GraphModule) -> Iterator[tuple[Node, GraphModule, dict[Node, Node]]]:
    """(call, body, {input of the body: what the call gives for it}) of each body that a graph calls; no inputs where these cannot be told apart."""
    for node in gm.graph.nodes:
        operands = tree_leaves((node.args, node.kwargs))
        bodies = [a for a in operands if isinstance(a, Node) and a.op == "get_attr" and isinstance(attribute(gm, a), GraphModule)]
        for body in bodies:
            inner = attribute(gm, body)
            inputs = inner.graph.find_nodes(op="placeholder")
            given = [a for a in operands[operands.index(bodies[-1]) + 1 :] if isinstance(a, Node)]
            yield node, inner, dict(zip(inputs, given, strict=True)) if len(inputs) == len(given) else {}


def holders_first(graphs: Iterable[GraphModule], held: Callable[[GraphModule], Iterable[GraphModule]]) -> list[GraphModule]:
    """Graphs and what they hold, each once, and behind all that hold it."""
    seen: set[GraphModule] = set()
    found: list[GraphModule] = []  # what a graph holds before it

    def add(graph: GraphModule) -> None:
        if graph not in seen:
            seen.add(graph)
            for inner in reversed([*held(graph)]):
                add(inner)
            found.append(graph)

    for graph in reversed([*graphs]):
        add(graph)
    return found[::-1]


def handed(gm: GraphModule) -> Iterator[tuple[Node, Node]]:
    """(input of a body, what a call gives for it) of all bodies that a graph calls."""
    return (pair for _, _, given in bodies_of(gm) for pair in given.items())


def given_to(graphs: Iterable[GraphModule]) -> dict[Node, list[Node]]:
    """{input of a body, or of a part that a graph was split into: what calls give for it}, of the calls in these graphs."""
    found: dict[Node, list[Node]] = {}
    for gm in graphs:
        parts = (zip(part.graph.find_nodes(op="placeholder"), node.args, strict=False) for node, part in calls_of(gm, GraphModule))
        for inner, outer in (*handed(gm), *chain.from_iterable(parts)):
            if isinstance(outer, Node):
                found.setdefault(inner, []).append(outer)
    return found


def attribute(gm: nn.Module, node: Node) -> Any:
    """What a get_attr node reads; None where it is gone."""
    return found_at(gm, str(node.target))


def is_trainable(gm: nn.Module, node: Node) -> bool:
    """Whether a node by itself may be what somebody trains: a Parameter, or what a module gives."""
    return node.op == "call_module" or (node.op == "get_attr" and isinstance(attribute(gm, node), nn.Parameter))


def found_at(m: nn.Module, path: str) -> Any:
    """What lies at a dotted path; None where nothing does."""
    value: Any = m
    for part in path.split("."):
        value = getattr(value, part, None)
    return value


def incoming(graphs: Iterable[tuple[str, GraphModule]]) -> dict[Node, str]:
    """{input of a body: path of the parameter that comes in}. `graphs`: each with its path, a graph before its bodies. A body that is called with several
    parameters in one place has no name there."""
    names: dict[Node, set[str]] = {}
    for prefix, gm in graphs:
        own = {n: join(prefix, str(n.target)) for n in gm.graph.nodes if n.op == "get_attr" and isinstance(attribute(gm, n), nn.Parameter)}
        for inner, outer in handed(gm):
            names.setdefault(inner, set()).update(names.get(outer) or {own.get(outer, "")})
    return {n: path for n, (path, *others) in names.items() if path and not others}
