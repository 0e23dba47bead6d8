"""Masks inside FX graphs: the module that a rewritten graph calls for a mask, and how such masks are found again."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from ...kernels.errors import UnsupportedError, first_of, message
from ...kernels.lists import listed
from ..finding.candidate import join
from ..settings.config import WeightMask
from ..state.site import Site, install
from ..state.site_forward import forward_lists, forward_mask
from ..state.site_mask import is_traced_anew
from .graph_calls import calls_of, resolve


class GraphSite(Site):
    """The mask of a weight inside an FX graph: called with the weight, it gives what the masked_linear node takes beside it (`outputs`).

    `weight_path` is the parameter's path in the GraphModule, None for a weight that the graph computes. `origins` says what the calls were, in graph order:
    `module:<path>`, `functional` or `aten`; `names` has the names of their nodes.
    """

    def __init__(self, config: WeightMask, name: str, weight: Tensor, weight_path: str | None, stream_name: str, own: Tensor | None = None) -> None:
        super().__init__()
        self.weight_path = weight_path
        self.origins: list[str] = []
        self.names: list[str] = []
        install(self, config, name, weight, stream_name, own)

    @property
    def outputs(self) -> tuple[str, ...]:
        """What a call gives: the mask, then the flag of `rigl` and the lists, where there are such. A mask alone comes without a tuple."""
        reads = self._fxmask_config.impl == "triton" and listed(self._fxmask_config.block)
        return ("mask", *(["dense"] if self._fxmask_dense is not None else []), *(["lists"] if reads else []))

    def forward(self, weight: Tensor) -> Tensor | tuple[Tensor, ...]:
        """weight (N, K) -> mask bool (NB, KB), or (mask, 0-d bool, lists int32), see `outputs`."""
        if forward_ad._current_level >= 0:
            what = "forward-mode AD would silently see a zero tangent through the custom op of a rewritten graph."
            fix = "call fxmask.apply on the nn.Module instead of its traced graph; that form differentiates forward too."
            raise UnsupportedError(message(what, self._fxmask_name, fix))
        mask, dense = forward_mask(self, weight), self._fxmask_dense
        if dense is not None and is_traced_anew(dense, weight):
            dense = torch.full((), self._fxmask_dense_now, device=weight.device)
        found = [t for t in (mask, dense, forward_lists(self, mask, self._fxmask_config.impl)) if t is not None]
        return mask if len(found) == 1 else tuple(found)

    def extra_repr(self) -> str:
        c = self._fxmask_config
        return f"{self._fxmask_name}, ratio={c.ratio}, block={c.block}, backward={c.backward!r}"


def containers(gm: GraphModule) -> list[tuple[str, nn.Module]]:
    """The submodules of a graph module that hold its masks: one, by whatever name was free."""
    return [(name, m) for name, m in gm.named_children() if any(isinstance(c, GraphSite) for c in m.children())]


def refuse_split(model: nn.Module, caller: str) -> None:
    """Raise UnsupportedError for graphs that somebody has cut up since (torch.fx's split_module): a site's calls, weight and container are in several."""
    inside = ((join(path, name), m) for path, gm in model.named_modules() if isinstance(gm, GraphModule) for name, m in gm.named_children())
    cut = [name for name, m in inside if isinstance(m, GraphSite) or "_fxmask_held" in m.__dict__]
    if cut:
        what = f"{caller} of a traced model that was split after fxmask.apply: expected the graph as fxmask.apply has left it."
        raise UnsupportedError(message(what, first_of(cut), f"call {caller} on the model before it is split."))


def graph_sites(gm: GraphModule) -> Iterator[tuple[GraphSite, Tensor | None]]:
    """The masks of one graph, each with its weight (None where the graph computes it)."""
    for _, container in containers(gm):
        for site in container.children():
            if isinstance(site, GraphSite):
                yield site, resolve(gm, site.weight_path) if site.weight_path else None


def graph_weights(gm: GraphModule) -> Iterator[tuple[Node, GraphSite]]:
    """(node of the weight, mask) of every call of a mask in one graph."""
    calls: Iterator[tuple[Any, GraphSite]] = calls_of(gm, GraphSite)
    return ((node.args[0], site) for node, site in calls)


def made_by(gm: GraphModule, mask: Node) -> tuple[Node, GraphSite] | None:
    """(call, mask) of what gives a node, alone or among others; None where no `GraphSite` does."""
    call: Any = mask.args[0] if mask.target is operator.getitem else mask
    site = gm.get_submodule(str(call.target)) if isinstance(call, Node) and call.op == "call_module" else None
    return (call, site) if isinstance(site, GraphSite) else None
