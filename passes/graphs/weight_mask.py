"""The pass that rewrites linear calls of an FX graph into masked linears, and the one that turns them back.

Before: `y = linear(x, w, b)` or a call of an nn.Linear. After:

    mask = fxmask_sites.<name>(w)
    y    = torch.ops.fxmask.masked_linear(x, w, b, mask, block_rows, block_cols, backward)

Parameters stay where they are, so that state_dict keys, optimisers and tied weights do not notice.
"""

from __future__ import annotations

import operator
from typing import Any

from torch import nn
from torch.fx import GraphModule, Node

from ..finding.choose import Decision
from ..infra import Pass, call_again, replace_node
from .graph_calls import MASKED_LINEAR, calls_of, input_arg, linear_call, linear_parts, place_of, weight_arg
from .graph_site import GraphSite, containers, graph_sites, made_by
from .writes import Writes

CONTAINER = "fxmask_sites"


class MaskWeights(Pass):
    """Rewrites the linear calls that `decisions` select in one graph. `made` lists the masks, also where the pass fails half-way."""

    def __init__(self, decisions: list[Decision], stream_names: dict[int, str]) -> None:
        self.decisions, self.stream_names = decisions, stream_names
        self.made: list[GraphSite] = []

    def run(self, gm: GraphModule) -> list[str]:
        names, writes = [], Writes(gm)
        here = [(d.candidate, d.config, d.own) for d in self.decisions if d.candidate.host is gm and d.config is not None]
        sections = [writes.sections(c.nodes, c.weight if c.weight_path else weight_arg(c.nodes[0])) for c, _, _ in here]
        for (c, config, own), same in zip(here, sections, strict=True):
            stream = self.stream_names.get(id(c.weight), c.param_name)
            local = c.weight_path or f"{c.nodes[0].name}.weight"  # a name inside this graph module, whatever holds it
            site = GraphSite(config, local, c.weight, c.weight_path, stream, own).train(gm.training)
            self.made.append(site)
            _rewrite(gm, c.nodes, same, _add_site(gm, local.removesuffix(".weight"), site), site)
            names.append(c.name)
        return names


class RestoreLinears(Pass):
    """Turns masked linears of a graph back into the calls that they were: all, or those of some masks."""

    def __init__(self, only: list[GraphSite] | None = None) -> None:
        self.only = None if only is None else {id(s) for s in only}

    def run(self, gm: GraphModule) -> list[str]:
        chosen = {id(s): list(zip(s.origins, s.names, strict=True)) for s, _ in graph_sites(gm) if self.only is None or id(s) in self.only}
        names = []
        for node in gm.graph.find_nodes(op="call_function", target=MASKED_LINEAR):
            x, w, b, mask, *rest = node.args
            made = made_by(gm, mask)
            if made is None or id(made[1]) not in chosen:
                continue
            call, site = made
            if chosen[id(site)] or node.users:
                origin, name = chosen[id(site)].pop(0) if chosen[id(site)] else ("functional", "")  # a call that somebody copied has none
                with gm.graph.inserting_before(node):
                    new = linear_call(gm, origin, x, w, b)
                replace_node(gm, node, new)
                call_again(gm, new, name)
            else:  # made by a rewrite that failed before it was in place
                gm.graph.erase_node(node)
            for left in dict.fromkeys((*rest, mask, call, b, w, call.args[0])):  # of a mask that several calls read, the weight is the first one's
                if isinstance(left, Node) and not left.users and (left.op in ("get_attr", "call_module") or left.target is operator.getitem):
                    gm.graph.erase_node(left)
            names.append(site._fxmask_name)
        for call, site in list(calls_of(gm, GraphSite)):  # whose linear a rewrite that failed has not come to
            for left in (*list(call.users), call, call.args[0]) if id(site) in chosen else ():
                if isinstance(left, Node) and not left.users and (left is not call.args[0] or left.op == "get_attr"):
                    gm.graph.erase_node(left)
        for name, container in containers(gm):
            for key, m in list(container.named_children()):
                if isinstance(m, GraphSite) and id(m) in chosen:
                    delattr(container, key)
                    m._fxmask_guard = None
            if not any(container.children()):
                delattr(gm, name)
        return names


def _add_site(gm: GraphModule, name: str, site: GraphSite) -> str:
    found = containers(gm)
    holder, container = found[0] if found else (_free_name(gm, CONTAINER), nn.Module().train(gm.training))
    key = _free_name(container, name.replace(".", "_") or "root")
    container.add_module(key, site)
    gm.add_module(holder, container)
    return f"{holder}.{key}"


def _free_name(m: nn.Module, base: str) -> str:
    name, number = base, 1
    while hasattr(m, name):
        name, number = f"{base}_{number}", number + 1
    return name


def _rewrite(gm: GraphModule, nodes: list[Node], sections: list[int], target: str, site: GraphSite) -> None:
    graph, c = gm.graph, site._fxmask_config
    given: dict[str, Node] = {}  # what the site gives
    for node, section, before in zip(nodes, sections, [None, *sections], strict=False):
        with graph.inserting_before(node):
            w, b, origin = linear_parts(gm, node)
            if section != before:  # one weight, one mask, however often the graph uses it, until something writes into it
                call = graph.call_module(target, (w,))
                call.meta = place_of(node)
                several = len(site.outputs) > 1
                given = {name: graph.call_function(operator.getitem, (call, i)) if several else call for i, name in enumerate(site.outputs)}
            args = [input_arg(node), w, b, given["mask"], *c.block, c.backward, given.get("dense"), c.impl, given.get("lists")]
            new = graph.call_function(MASKED_LINEAR, _short(args))
        replace_node(gm, node, new)
        site.origins.append(origin)
        site.names.append(node.name)


def _short(args: list[Any]) -> tuple[Any, ...]:
    """The arguments of the op without the last ones that are its defaults: a short graph reads better."""
    for default in (None, "auto", None):
        if args[-1] != default:
            break
        args = args[:-1]
    return tuple(args)
