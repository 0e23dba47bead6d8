"""The pass that rewrites linear calls of an FX graph into masked linears, and the one that turns them back.

Before: `y = linear(x, w, b)` or a call of an nn.Linear. After:

    mask = fxmask_sites.<name>(w)
    y    = torch.ops.fxmask.masked_linear(x, w, b, mask, block_rows, block_cols, backward)

Parameters stay where they are, so that state_dict keys, optimisers and tied weights do not notice.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from ..kernels import ops  # noqa: F401  (registers torch.ops.fxmask)
from .choose import Decision
from .find import bias_arg, input_arg, weight_arg
from .infra import Pass
from .site import GraphSite

CONTAINER = "fxmask_sites"
MASKED_LINEAR = torch.ops.fxmask.masked_linear.default


class MaskWeights(Pass):
    """Rewrites the linear calls that `decisions` select in one graph."""

    def __init__(self, decisions: list[Decision], stream_names: dict[int, str]) -> None:
        self.decisions, self.stream_names = decisions, stream_names

    def run(self, gm: GraphModule) -> list[str]:
        names = []
        for d in self.decisions:
            c = d.candidate
            if c.host is not gm or d.config is None:
                continue
            stream = self.stream_names.get(id(c.weight), c.param_name)
            local = c.weight_path or c.param_name  # a name inside this graph module, whatever holds it
            site = GraphSite(d.config, local, c.weight, c.weight_path, stream)
            target = _add_site(gm, local.removesuffix(".weight"), site)
            _rewrite(gm, c.nodes, target, site)
            names.append(c.name)
        return names


class RestoreLinears(Pass):
    """Turns every masked linear of a graph back into the call that it was."""

    def run(self, gm: GraphModule) -> list[str]:
        names = []
        origins = {id(site): list(site.origins) for site, _ in graph_sites(gm)}
        for node in gm.graph.find_nodes(op="call_function", target=MASKED_LINEAR):
            x, w, b, mask, *rest = node.args
            site = gm.get_submodule(str(mask.target)) if mask.op == "call_module" else None
            if not isinstance(site, GraphSite):
                continue
            origin = origins[id(site)].pop(0) if origins[id(site)] else "functional"  # a call that was copied has none
            with gm.graph.inserting_before(node):
                if origin.startswith("module:"):
                    new = gm.graph.call_module(origin.removeprefix("module:"), (x,))
                else:
                    new = gm.graph.call_function(F.linear if origin == "functional" else torch.ops.aten.linear.default, (x, w, b))
            _replace(gm, node, new)
            for left in (rest[3] if len(rest) > 3 else None, mask, b, w):
                if isinstance(left, Node) and not left.users and left.op in ("get_attr", "call_module"):
                    gm.graph.erase_node(left)
            names.append(site._fxmask_name)
        if hasattr(gm, CONTAINER):
            delattr(gm, CONTAINER)
        return names


def graph_sites(gm: GraphModule) -> Iterator[tuple[GraphSite, Tensor | None]]:
    """The masks of one graph, each with its weight (None where the graph computes it)."""
    container = getattr(gm, CONTAINER, None)
    for site in container.children() if isinstance(container, nn.Module) else ():
        if isinstance(site, GraphSite):
            owner, _, leaf = (site.weight_path or "").rpartition(".")
            yield site, getattr(gm.get_submodule(owner), leaf) if site.weight_path else None


def _add_site(gm: GraphModule, name: str, site: GraphSite) -> str:
    if not hasattr(gm, CONTAINER):
        gm.add_module(CONTAINER, nn.Module())
    container = gm.get_submodule(CONTAINER)
    key = base = name.replace(".", "_") or "root"
    number = 1
    while hasattr(container, key):
        key, number = f"{base}_{number}", number + 1
    container.add_module(key, site)
    return f"{CONTAINER}.{key}"


def _rewrite(gm: GraphModule, nodes: list[Node], target: str, site: GraphSite) -> None:
    graph, c = gm.graph, site._fxmask_config
    mask: Node | None = None
    for node in nodes:
        with graph.inserting_before(node):
            if node.op == "call_module":
                path, origin = str(node.target), f"module:{node.target}"
                w: Any = graph.get_attr(f"{path}.weight")
                b: Any = None if gm.get_submodule(path).bias is None else graph.get_attr(f"{path}.bias")
            else:
                w, b = weight_arg(node), bias_arg(node)
                origin = "aten" if node.target is torch.ops.aten.linear.default else "functional"
            if mask is None:  # one weight, one mask, however often the graph uses it
                mask = graph.call_module(target, (w,))
                mask.meta = {k: v for k, v in node.meta.items() if k in ("nn_module_stack", "stack_trace")}
            args = [input_arg(node), w, b, mask, *c.block, c.backward]
            if site._fxmask_dense is not None or c.impl != "auto":
                args.append(None if site._fxmask_dense is None else graph.get_attr(f"{target}._fxmask_dense"))
            if c.impl != "auto":
                args.append(c.impl)
            new = graph.call_function(MASKED_LINEAR, tuple(args))
        _replace(gm, node, new)
        site.origins.append(origin)


def _replace(gm: GraphModule, old: Node, new: Node) -> None:
    new.meta = dict(old.meta)
    old.replace_all_uses_with(new)
    gm.graph.erase_node(old)
