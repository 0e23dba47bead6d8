"""The pass that fuses block dropout in a graph: `linear(dropout(x), w, b)` becomes `fxmask_dropped.<name>(x, w, b)`; and the one that turns it back."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from ..finding.choose import Decision
from ..infra import Pass, call_again, replace_node
from ..settings.block_dropout import BlockDropout
from ..state.noted import note
from ..state.scripting import refuse_symbolic
from .graph_calls import DROPPED, call_site, calls_of, give_back, input_arg, linear_parts
from .writes import Writes

aten = torch.ops.aten
IN_PLACE = (torch.dropout_, aten.dropout_.default)
DROPOUTS = (F.dropout, torch.dropout, aten.dropout.default, *IN_PLACE)  # that are fused; their arguments are (input, p, training, inplace), the others' too
OTHERS = (
    F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, torch.native_dropout, torch.alpha_dropout, torch.alpha_dropout_,
    torch.feature_dropout, torch.feature_dropout_, torch.feature_alpha_dropout, torch.feature_alpha_dropout_, aten.native_dropout.default,
    aten.alpha_dropout.default, aten.alpha_dropout_.default, aten.feature_dropout.default, aten.feature_dropout_.default, aten.feature_alpha_dropout.default,
    aten.feature_alpha_dropout_.default,
)  # fmt: skip


class DroppedCall(nn.Module):
    """A linear call of a graph with its dropout: (x, w, b) -> y. Follows train() and eval(), whatever the trace was made in."""

    def __init__(self, config: BlockDropout, name: str, held: bool, origin: str, before: tuple[Any, ...] | None) -> None:
        super().__init__()
        self._fxmask_dropping, self._fxmask_name, self._fxmask_held, self._fxmask_origin = config, name, held, origin
        self._fxmask_before = before  # (name, op, target, further args, kwargs, module or None) of the dropout that was fused

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        note(self)
        refuse_symbolic(self, x, "a call with block dropout", "BlockDropout")
        return self._fxmask_dropping.linear(x, weight, bias, self.training)

    def extra_repr(self) -> str:
        return f"{self._fxmask_name}, {self._fxmask_dropping.words()}"


def settings(node: Node) -> tuple[Any, Any, Any]:
    """(p, whether it is on, whether it is in place) of the call of a function that drops; nodes where the graph computes them."""
    named = dict(zip(("input", "p", "training", "inplace"), node.args, strict=False)) | node.kwargs
    return named.get("p", 0.5), named.get("training", named.get("train", True)), named.get("inplace", node.target in IN_PLACE)


def left_in(gm: GraphModule) -> list[str]:
    """Names of the calls of functions that drop in a graph, but for those that are off."""
    calls = [n for n in gm.graph.nodes if n.op == "call_function" and n.target in (*DROPOUTS, *OTHERS)]
    return [n.name for n in calls if 0 not in settings(n)[:2]]  # neither p = 0 nor training = False


def dropout_before(writes: Writes, linear: Node) -> tuple[Node, float] | None:
    """The active dropout whose output a linear call reads, and its p.

    None for one that writes into what others read, too, one whose input or output is written into before the linear, and one whose forward was replaced.
    """
    gm, n = writes.gm, input_arg(linear)
    if n.op == "call_module" and is_plain_dropout(m := gm.get_submodule(str(n.target))):
        p, on, inplace = m.p, True, m.inplace
    elif n.op == "call_function" and n.target in DROPOUTS:
        p, on, inplace = settings(n)
    else:
        return None
    if on is not True or not isinstance(p, (int, float)):
        return None
    if inplace is not False and (len(input_arg(n).users) > 1 or writes.read_after(n, input_arg(n), linear)):
        return None
    if any(writes.between(n, linear, read) for read in (n, input_arg(n))):
        return None
    return n, float(p)


def is_plain_dropout(m: nn.Module) -> TypeGuard[nn.Dropout]:
    """Whether a module is PyTorch's Dropout, and computes what its class says."""
    return type(m) is nn.Dropout and "forward" not in m.__dict__


class FuseDropout(Pass):
    """Rewrites the selected linear calls of one graph: [(decision, configuration)], p None where that of the dropout counts."""

    def __init__(self, chosen: list[tuple[Decision, BlockDropout]]) -> None:
        self.chosen = chosen

    def run(self, gm: GraphModule) -> list[str]:
        names, writes = [], Writes(gm)
        dropouts = {n: dropout_before(writes, n) for d, _ in self.chosen if d.candidate.host is gm for n in d.candidate.nodes}
        for d, config in self.chosen:
            for node in d.candidate.nodes if d.candidate.host is gm else []:
                dropout, p = dropouts[node] or (None, config.p)
                if config.p is None and dropout is None:
                    continue
                own = config if config.p is not None else dataclasses.replace(config, p=p)
                w, b, origin = linear_parts(gm, node)
                before = None if dropout is None else _call(gm, dropout)
                site = DroppedCall(own, d.candidate.local, d.candidate.held, origin, before)
                new = call_site(gm, DROPPED, node, site, (input_arg(dropout or node), w, b))
                replace_node(gm, node, new)
                if dropout is not None:
                    new.meta["dropout"] = dropout.meta
                    if not dropout.users:
                        gm.graph.erase_node(dropout)
                names.append(d.candidate.name)
        return names


def _call(gm: GraphModule, n: Node) -> tuple[Any, ...]:
    """A dropout's node as plain values; its module is kept beside, for a graph whose unused modules somebody deletes."""
    kwargs = {k: v for k, v in n.kwargs.items() if k != "input"}
    return n.name, n.op, n.target, tuple(n.args[1:]), kwargs, gm.get_submodule(str(n.target)) if n.op == "call_module" else None


class UnfuseDropout(Pass):
    """Turns dropped calls of a graph back into what they were."""

    def run(self, gm: GraphModule) -> list[str]:
        names = []
        dropouts: dict[str, Node] = {n.name: n for n in gm.graph.nodes}
        for node, site in calls_of(gm, DroppedCall):
            x = node.args[0]
            if site._fxmask_before is not None:
                name, op, target, args, kwargs, module = site._fxmask_before
                if name not in dropouts:
                    if module is not None and target not in dict(gm.named_modules()):
                        gm.add_submodule(target, module)
                    with gm.graph.inserting_before(node):
                        dropouts[name] = gm.graph.create_node(op, target, (x, *args), kwargs, name)
                    call_again(gm, dropouts[name], name)
                    dropouts[name].meta = node.meta.pop("dropout", {})
                x = dropouts[name]
            node.meta.pop("dropout", None)
            give_back(gm, node, site._fxmask_origin, x)
            names.append(site._fxmask_name)
        if DROPPED in gm._modules:
            delattr(gm, DROPPED)
        return names
