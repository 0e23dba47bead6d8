"""What the backend takes no graph for: masks that need state between calls, and function transforms, which cannot see into the masked op."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch.fx import GraphModule, Node

from ..kernels.errors import UnsupportedError, message
from ..passes.finding.choose import Decision
from ..passes.graphs.bodies import Body
from ..passes.graphs.graph_calls import LINEARS
from ..passes.graphs.lifted import READERS
from ..passes.graphs.regions import attribute
from .backend_options import APPLY, WHERE

FORWARD_AD = ("make_dual", "_make_dual")
REGION = re.compile(r"_(jvp|grad|vmap)_(increment|decrement)_nesting")  # where a function transform begins and ends


def refuse_state(decisions: list[Decision]) -> None:
    """UnsupportedError for options that count steps or cache a mask."""
    for d in decisions:
        if d.config is not None and (d.config.needs_steps or d.config.cached):
            what = f"the backend keeps no state between calls, and the options of {d.candidate.name!r} count optimiser steps or cache a mask: {d.config}."
            raise UnsupportedError(message(what, WHERE, APPLY))


def refuse_transforms(bodies: Sequence[Body]) -> None:
    """UnsupportedError for forward AD anywhere, and for linears, or bodies that may hold some, inside a function transform.

    Beside one they are masked: transformers makes masks by vmap.
    """
    for body in bodies:
        inside: list[str] = []
        for node in body.graph.graph.nodes:
            name = getattr(node.target, "__name__", "")
            region = REGION.fullmatch(name)
            if region is not None:
                inside = [*inside, region[1]] if region[2] == "increment" else inside[:-1]
            if name in FORWARD_AD or (inside and (node.target in LINEARS or node.target in READERS or _has_body(body.graph, node))):
                by = name if name in FORWARD_AD else inside[-1]
                what = f"this graph differentiates or maps linears by a function transform ({by}), which cannot see into the masked op."
                raise UnsupportedError(message(what, WHERE, "use fxmask.apply(model, ...) and torch.compile(...) without backend."))


def _has_body(gm: GraphModule, node: Node) -> bool:
    return any(n.op == "get_attr" and isinstance(attribute(gm, n), GraphModule) for n in node.all_input_nodes)
