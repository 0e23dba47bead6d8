"""One row of `explain`: what became of a layer, by `apply` or in the graphs of `backend="fxmask"`."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from ..compiler.backend_watch import Done, seen
from ..compiler.shards import gathered
from ..health.health_signs import signs
from ..kernels import ops
from ..kernels.grid import grid_shape, kept_elements, matrix_shape
from ..passes.finding.weights import is_wrapped
from ..passes.graphs.exported import Inside
from ..passes.settings.config import WeightMask
from ..passes.state.ranks import whole
from ..passes.state.site import Site, stream_of
from ..passes.state.site_mask import mask_outside
from ..passes.state.tensors import has_values, is_taken
from .impl_words import asked_for, runs

IN_GRAPHS = "in graphs of backend='fxmask' alone"
IN_TRACE = "masked before it was traced; the mask is part of the graph"
LOST = "; its mask was lost on the meta device, and its forward raises until weights or the mask are loaded, or masks built by fxmask.refresh"
TAKEN = "; a wrapper has flattened or freed its weight, which it gives the forward alone"
RESIZED = "; its weight has been replaced by one of another size, and its forward raises"
UNFIT = {"taken": TAKEN, "resized": "; its weight has been replaced by one of another size"}  # of a layer in a trace


def dense_row(name: str, weight: Tensor, reason: str) -> dict[str, Any]:
    columns = ["block", "blocks", "target_ratio", "final_ratio", "achieved_ratio", "backward", "masked_weights", "ranks_by", "impl", "why", "step"]
    row, shape = dict.fromkeys([*columns, "mask_age", "flips"]), "x".join(map(str, weight.shape))
    return {"name": name, "masked": False, "reason": reason, "shape": shape, **row, "elements": weight.numel(), "kept": weight.numel()}


def _policy(site: Site, weight: Tensor | None) -> str:
    why = "no guard" if site._fxmask_guard is None or isinstance(weight, nn.Parameter) else "other parameters make this weight"
    policy = site._fxmask_policy or f"left to the optimiser ({why})"
    return f"{policy}, from step {site._fxmask_config.softened_from}; free till then" if site._fxmask_softening and policy in ("freeze", "decay") else policy


def _ranking(c: WeightMask) -> str | None:
    """What decides which blocks are kept, where it is more than the norm of the weight."""
    parts = [] if c.criterion == "fro" else [c.criterion]
    parts += [f"{name} {value:g}" for name, value in (("average", c.average), ("hysteresis", c.hysteresis)) if value]
    parts += [f"regrow {c.regrow.by} {c.regrow.fraction:g}"] if c.regrow is not None else []
    parts += [name for name in ("cover", "soft", "gain") if getattr(c, name)]
    return ", ".join(parts) or None


@torch.no_grad()
def masked_row(name: str, site: Site, weight: Tensor | None) -> dict[str, Any]:
    c = site._fxmask_config
    nb, kb = site._fxmask_grid
    wrapped = weight is not None and is_wrapped(weight)
    taken = weight is not None and not wrapped and is_taken(weight)
    resized = weight is not None and not taken and matrix_shape(weight.shape) != site._fxmask_shape
    known = weight is not None and has_values(weight) and not wrapped and not taken and not resized and not site._fxmask_lost
    shape = site._fxmask_shape if taken else tuple(weight.shape) if weight is not None else (nb * c.block[0], kb * c.block[1])
    mask = mask_outside(site, weight.detach()) if known and weight is not None else None
    kept = None if mask is None else int(kept_elements(mask, matrix_shape(shape), c.block))
    elements = math.prod(shape)
    soft = f"selected; soft: computes densely until step {c.softened_from}, masked blocks at {c.soft_scale_at(site._fxmask_step):.3g}"
    reason = soft if site._fxmask_softening else "selected"
    reason += f"; its weight has become a {type(weight).__name__} since, and its forward raises" if wrapped else ""
    reason += TAKEN if taken else ""
    reason += f"{RESIZED}: the mask is of {site._fxmask_shape}" if resized else LOST if site._fxmask_lost else ""
    row = dense_row(name, torch.empty(shape, device="meta"), reason)
    row.update(
        masked=True,
        block="x".join(map(str, c.block)),
        blocks=nb * kb,
        target_ratio=0.0 if site._fxmask_is_dense else c.ratio_at(site._fxmask_step),
        final_ratio=site._fxmask_given.final_ratio,
        achieved_ratio=None if kept is None or not elements else 1 - kept / elements,
        backward=c.backward,
        masked_weights=_policy(site, weight),
        ranks_by=_ranking(c),
        **({} if wrapped or taken or resized or site._fxmask_lost else runs(c, weight, mask, site)),
        step=site._fxmask_step,
        mask_age=site._fxmask_step - site._fxmask_built if c.cached else None,
        flips=None if site._fxmask_flips is None or not has_values(site._fxmask_flips) else int(site._fxmask_flips),
        kept=kept,
        elements=elements,
    )
    return row


def unapplied_row(name: str, weight: Tensor, unseen: str, health: bool = False) -> dict[str, Any]:
    """A layer of which `apply` knows nothing: what graphs of the backend do, and else what is to be said of one that nobody has seen."""
    return graph_made_row(name, weight, seen(weight), unseen, health)


def graph_made_row(name: str, weight: Tensor, done: Done | None, unseen: str, health: bool = False, made_there: bool = False) -> dict[str, Any]:
    """The row, by what a graph does to the layer. `made_there`: its weight is no model's: the graph computes it, and `weight` has its shape alone."""
    if made_there and done is not None:
        row = graph_made_row(name, weight, done, unseen)
        there = {"impl": done.mask.impl, "why": "the graph computes its weight"} if done.mask else {}
        return {**row, **there, "reason": f"{row['reason']}; the graph computes its weight", "kept": 0, "elements": 0}
    if done is None:
        return dense_row(name, weight, unseen)
    c = done.mask
    if c is None:
        reason = f"not masked; input pruned {IN_GRAPHS}" if done.activations else f"{done.dense} (backend='fxmask')"
        return {**dense_row(name, weight, reason), "activations": done.activations}
    if weight.dim() != 2:
        return dense_row(name, weight, f"selected {IN_GRAPHS}, and given another shape since")
    row = {**_graph_row(name, weight, c, done, health), "activations": done.activations}
    if done.dense:  # an owner of two ways to use it
        row |= {"reason": f"{row['reason']}, in some of its uses; in others: {done.dense}", "kept": weight.numel()}
    return row


@torch.no_grad()
def exported_row(i: Inside) -> dict[str, Any]:
    """A layer that was masked before its model was traced: what stands in the graph, with the mask as it is now."""
    row = dense_row(i.name, i.weight, IN_TRACE + UNFIT.get(i.unfit, ""))
    known = i.weight.dim() >= 2
    nb, kb = grid_shape(matrix_shape(i.weight.shape), i.block) if known and i.block else (0, 0)
    row.update(masked=True, shape=row["shape"] if known else None, block="x".join(map(str, i.block)) if i.block else "N:M", blocks=nb * kb or None)
    row.update(backward=i.backward, masked_weights="left to the optimiser (no guard)")
    if i.backward is None:
        why = "the graph multiplies by W∘M"
    else:
        why = "chosen when it runs" if i.impl == "auto" else asked_for(i.impl, i.block, i.weight) if known and i.block else "asked for"
    row.update(impl=i.impl, why=why)
    if known and i.kept is not None and nb * kb:
        row["target_ratio"] = row["final_ratio"] = 1 - i.kept / (nb * kb)
    kept = None
    if i.mask is not None and known and has_values(i.mask):
        kept = int(kept_elements(i.mask, matrix_shape(i.weight.shape), i.block) if i.block else i.mask.count_nonzero())
    row.update(kept=kept, achieved_ratio=None if kept is None or not i.weight.numel() else 1 - kept / i.weight.numel())
    return row


@torch.no_grad()
def _graph_row(name: str, weight: Tensor, c: WeightMask, done: Done, health: bool) -> dict[str, Any]:
    """A layer that compiled graphs of the backend mask. They keep nothing, so the mask is made here, from the weight as it is now."""
    nb, kb = grid_shape(weight.shape, c.block)
    row: dict[str, Any] = {**dense_row(name, weight, f"selected {IN_GRAPHS}"), "kept": None}
    mask = None
    if (given := gathered(weight)) is not None:  # and not its values, which are there in forwards alone
        weight = whole(weight.detach()).to(given.dtype)
    if is_taken(weight):
        row["reason"] += TAKEN
    elif has_values(weight):
        keep, count = (torch.full((), n, dtype=torch.int64, device=weight.device) for n in (c.keep_at(0, nb * kb), 0))
        stream = stream_of(c.seed, done.stream_name) if c.criterion == "random" else 0
        mask = ops.index(weight.detach(), keep, count, c.block, c.criterion, c.ties, stream, c.impl, c.cover)
        row["kept"] = int(kept_elements(mask, matrix_shape(weight.shape), c.block))
        row["achieved_ratio"] = 1 - row["kept"] / weight.numel() if weight.numel() else None
        row |= signs(weight.detach(), mask, c.block)[0] if health else {}
    by = runs(c, weight, mask) if done.called else {"impl": "reference", "why": "its reader takes W∘M as an argument"}
    row.update(
        masked=True,
        block="x".join(map(str, c.block)),
        blocks=nb * kb,
        target_ratio=c.ratio,
        final_ratio=c.ratio,
        backward=c.backward,
        masked_weights="left to the optimiser (no guard)",
        ranks_by=_ranking(c),
        **by,
    )
    return row
