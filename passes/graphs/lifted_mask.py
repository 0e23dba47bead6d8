"""The pass that masks the linears of a Dynamo graph. Nothing is kept between calls: the number of kept blocks is a constant of the graph.

Before: `y = linear(x, w, b)` with `w` an input of the graph. After:

    keep = torch.full((), k, dtype=torch.int64)
    step = torch.full((), 0, dtype=torch.int64)
    mask = torch.ops.fxmask.block_index(w, keep, step, block_rows, block_cols, criterion, ties, stream, impl, cover)
    y    = torch.ops.fxmask.masked_linear(x, w, b, mask, block_rows, block_cols, backward)

A call that takes the weights of Linears as arguments (multi-head attention) gets W∘M instead, in ATen ops whose gradient is the backward mode's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node, Proxy
from torch.fx.proxy import GraphAppendingTracer

from ...kernels.errors import UnsupportedError, message
from ...kernels.grid import grid_shape
from ...kernels.lists import listed
from ..finding.choose import Decision
from ..infra import Pass, replace_node
from ..settings.config import WeightMask
from ..state.site import stream_of
from .graph_calls import BLOCK_INDEX, LINEARS, MASKED_LINEAR, bias_arg, input_arg, place_of
from .writes import Writes

STRIP_LISTS = torch.ops.fxmask.strip_lists.default
MODE, GRADS = "_inference_mode", "_set_grad_enabled"  # ends of names of calls that begin or end inference_mode, and no_grad


class MaskLifted(Pass):
    """Rewrites what `decisions` select in one graph: a Dynamo graph, or a body inside it."""

    def __init__(self, decisions: list[Decision]) -> None:
        self.decisions = decisions

    def run(self, gm: GraphModule) -> list[str]:
        here = [(d, d.config) for d in self.decisions if d.candidate.host is gm and d.config is not None]
        uses, writes = [(d.candidate.nodes, w) for d, _ in here if (w := d.candidate.weight_node) is not None], Writes(gm)
        # of each use a number that is equal where one mask serves, and one that is equal where one W∘M does
        sections = [(writes.sections(nodes, w, MODE), writes.sections(nodes, w, MODE, GRADS)) for nodes, w in uses]
        for (d, config), (masks, weights) in zip(here, sections, strict=True):
            new = _rewrite(gm, d, config, masks, weights)
            for other in self.decisions:  # the weight of another linear may be what this one gives
                other.candidate.weight_node = new.get(other.candidate.weight_node, other.candidate.weight_node)
        return [d.candidate.name for d, _ in here]


def _rewrite(gm: GraphModule, d: Decision, c: WeightMask, masks: list[int], weights: list[int]) -> dict[Node | None, Node]:
    """Mask the uses of one weight: the nodes that were replaced, and by what."""
    w, found, before = d.candidate.weight_node, d.candidate.weight, None
    replaced: dict[Node | None, Node] = {}
    assert w is not None
    nb, kb = grid_shape(found.shape, c.block)
    made: dict[int, Node] = {}  # W∘M
    for node, section, recorded in zip(d.candidate.nodes, masks, weights, strict=True):
        with gm.graph.inserting_before(node):
            if section != before:  # one weight, one mask, however often the graph uses it, until something writes into it
                made, before = {}, section
                keep, step = (
                    gm.graph.call_function(torch.full, ((), value), {"dtype": torch.int64, "device": found.device}) for value in (c.keep_at(0, nb * kb), 0)
                )
                stream = stream_of(c.seed, d.candidate.param_name) if c.criterion == "random" else 0
                mask = gm.graph.call_function(BLOCK_INDEX, (w, keep, step, *c.block, c.criterion, c.ties, stream, c.impl, c.cover))
                mask.meta = place_of(node)
                lists = gm.graph.call_function(STRIP_LISTS, (mask, *c.block, c.impl)) if c.impl == "triton" and listed(c.block) else None
            if node.target in LINEARS:
                args = (input_arg(node), w, bias_arg(node), mask, *c.block, c.backward, None, c.impl, lists)
                replaced[node] = gm.graph.call_function(MASKED_LINEAR, args)
                replace_node(gm, node, replaced[node])
            else:
                if c.backward == "unmasked":
                    reader = getattr(node.target, "__name__", node.target)
                    what = f"{reader} takes the weight of this layer as an argument, and backward='unmasked' needs the layer's own call."
                    raise UnsupportedError(message(what, d.candidate.name, f"overrides={{{d.candidate.name!r}: dict(backward='ste')}}, or exclude it."))
                if recorded not in made:  # of a part under no_grad, the rest of the graph would get no gradient
                    made[recorded] = _masked_weight(w, mask, c, found.shape)
                node.replace_input_with(w, made[recorded])
    return replaced


def _masked_weight(w: Node, mask: Node, c: WeightMask, shape: torch.Size) -> Node:
    """W∘M with the mode's gradient."""
    (n, k), (nb, kb) = shape, grid_shape(shape, c.block)
    bh, bw = min(c.block[0], n), min(c.block[1], k)
    tracer = GraphAppendingTracer(w.graph)
    blocks: Any = Proxy(mask, tracer).reshape(nb, 1, kb, 1)
    full = blocks.expand(nb, bh, kb, bw).reshape(nb * bh, kb * bw)[:n, :k]
    weight: Any = Proxy(w, tracer)
    if c.backward == "ste":  # as kernels.reference.straight_through
        zero: Any = torch.where(full | ~torch.isfinite(weight), 0, weight)
        found: Any = torch.where(full, weight, zero - zero.detach())
    else:
        found = torch.where(full, weight, 0)
    node: Node = found.node
    return node
