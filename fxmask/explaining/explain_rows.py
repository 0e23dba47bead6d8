"""The rows of `explain`: who has decided about a layer says what its row is, and a weight that no layer has may have one, too."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..compiler.backend_watch import seen
from ..decided import decided_by_apply, left_by_apply
from ..health import HealthLog
from ..health.health_signs import HISTORY, SIGNS, signs
from ..inputs import PRUNED_INPUT, RESTS
from ..nm.nm_masking import nm_row
from ..passes.finding.candidate import Candidate
from ..passes.finding.products import find_products
from ..passes.graphs.exported import Inside
from ..passes.state import ranks
from ..passes.state.site import Site
from ..passes.state.site_mask import mask_outside
from ..sites import sites, values_of
from .layer_rows import computed_row, exported_row, graph_row, masked_row, row_of, unapplied_row

LEFT = "left dense by fxmask.apply of a larger model, whose explain says why, or by an earlier one"


class Known(NamedTuple):
    """What rows of layers are made from."""

    masked: dict[str, tuple[Site, Tensor | None]]  # by the parameters' names; a layer takes its own out, here and of `by_graphs`
    reasons: dict[str, str]  # why layers are dense, by `apply`
    nm: dict[str, Any]
    by_graphs: dict[Any, Any]  # weights that compiled graphs compute
    unseen: str
    health: bool
    history: dict[int, dict[str, Any]] | None  # by the mask; None where no log is asked


def rows_of(model: nn.Module, found: list[Candidate], traced: list[Inside], known: Known) -> tuple[list[tuple[dict[str, Any], Tensor]], list[dict[str, Any]]]:
    """The rows of linears and convolutions with their weights, and those of products with parameters."""
    told = [(_layer_row(c, known), c.weight) for c in found]
    held = (*model.named_parameters(), *model.named_buffers())
    others = [(name, p, done) for name, p in held if (done := seen(p)) and not any(p is c.weight for c in found)]
    told += [(unapplied_row(name, p, known.unseen, known.health), p) for name, p, done in others if not done.product]  # of calls such as F.linear
    told += [(computed_row(name, done), torch.empty(done.shape, device="meta")) for (name, _), done in known.by_graphs.items()]  # what no layer has taken
    told += [(exported_row(i), i.weight) for i in reversed({id(i.weight): i for i in reversed(traced)}.values())]  # of several calls of a layer the first
    products = [row_of(c.name, c.weight, _reason(c, known.reasons)) for c in find_products(model) if c.name in known.reasons]
    products += [unapplied_row(name, p, known.unseen) for name, p, done in others if done.product]
    return told, products


def _layer_row(c: Candidate, known: Known) -> dict[str, Any]:
    """The row of a linear or convolution, by whoever has decided about it."""
    if c.name in known.nm:
        return {**row_of(c.name, c.weight, "selected"), **nm_row(known.nm[c.name])}
    entry = known.masked.pop(c.param_name, None)
    if entry is not None:
        row = masked_row(c.name, *entry)
        return {**row, **(_health(entry[0], None if row["kept"] is None else entry[1], known.history) if known.health else {})}
    done = seen(c.weight)
    key = _computed(c, known.by_graphs) if done is None else None
    by_graph = done if key is None else known.by_graphs[key]
    if c.key in known.reasons and (by_graph is None or by_graph.mask is None):  # a graph may mask what `apply` was not to change
        known.by_graphs.pop(key, None)
        return row_of(c.name, c.weight, _reason(c, known.reasons))
    if key is None:
        left = decided_by_apply(c.weight) if c.module is None else left_by_apply(c.module)  # a packed projection is no layer
        return unapplied_row(c.name, c.weight, LEFT if left else known.unseen, known.health)
    done = known.by_graphs.pop(key)
    casts = isinstance(c.weight, nn.Parameter) or c.module is None
    return computed_row(c.name, done) if casts else graph_row(c.name, c.weight, done, known.health)


def _computed(c: Candidate, by_graphs: dict[Any, Any]) -> Any:
    """Which of the weights that graphs compute is a layer's: a cast of it, as `F.linear(x, self.weight.to(x.dtype))` makes one, or what its parameters make."""
    alike = (key for key, done in by_graphs.items() if done.shape == tuple(c.weight.shape))
    if isinstance(c.weight, nn.Parameter) or c.module is None:
        return next((key for key in alike if id(c.weight) in key[1]), None)
    own = {id(p) for p in c.module.parameters()}  # they make its weight, for the graph, too
    return next((key for key in alike if key[1] <= own), None)


@torch.no_grad()
def _health(site: Site, weight: Tensor | None, history: dict[int, dict[str, Any]] | None) -> dict[str, Any]:
    """A masked weight's signs now, None where it is, and what a log has seen of it."""
    found: dict[str, Any] = dict.fromkeys(SIGNS)
    if weight is not None:
        w = values_of(site._fxmask_name, weight, "fxmask.explain").detach()
        found.update(signs(ranks.whole(w), mask_outside(site, w), site._fxmask_config.block)[0])
    return found if history is None else found | history.get(id(site), dict.fromkeys(HISTORY))


def history_of(log: HealthLog) -> dict[int, dict[str, Any]]:
    """What a log has seen last of each mask: of the same one, which may have another name in the log's model."""
    last = {r["name"]: r for r in log.rows}
    return {id(site): {k: last[name][k] for k in HISTORY} for name, site, _ in sites(log.model) if name in last}


def _reason(c: Candidate, reasons: dict[str, str]) -> str:
    """Why it is dense. Nothing is saved for a parameter that rests: as it is by now, where the weight is none that comes into a graph."""
    said = reasons[c.key]
    if said in (PRUNED_INPUT, RESTS) and isinstance(c.weight, nn.Parameter):
        return PRUNED_INPUT if c.weight.requires_grad else RESTS
    return said
