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

UNGUARDED = "left to the optimiser (no guard)"
IN_GRAPHS = "in graphs of backend='fxmask' alone"
IN_TRACE = "masked before it was traced; the mask is part of the graph"
LOST = "; its mask was lost on the meta device, and its forward raises until weights or the mask are loaded, or masks built by fxmask.refresh"
TAKEN = "; a wrapper has flattened or freed its weight, which it gives the forward alone"
RESIZED = "; its weight has been replaced by one of another size, and its forward raises"
UNFIT = {"taken": TAKEN, "resized": "; its weight has been replaced by one of another size"}  # of a layer in a trace


def row_of(name: str, weight: Tensor, reason: str, **more: Any) -> dict[str, Any]:
    """The row of a dense layer, but for `more`."""
    columns = ["block", "blocks", "target_ratio", "final_ratio", "achieved_ratio", "backward", "masked_weights", "ranks_by", "impl", "why", "step"]
    row, shape = dict.fromkeys([*columns, "mask_age", "flips"]), "x".join(map(str, weight.shape))
    return {"name": name, "masked": False, "reason": reason, "shape": shape, **row, "elements": weight.numel(), "kept": weight.numel(), **more}


def ratios(kept: int | None, elements: int, target: float | None, final: float | None) -> dict[str, Any]:
    """Of a masked layer: the ratios that are asked for, now and in the end, and the achieved one."""
    achieved = None if kept is None or not elements else 1 - kept / elements
    return {"masked": True, "target_ratio": target, "final_ratio": final, "achieved_ratio": achieved, "kept": kept}


def _policy(site: Site, weight: Tensor | None) -> str:
    policy = site._fxmask_policy
    if policy is None:
        made = site._fxmask_guard is not None and not isinstance(weight, nn.Parameter)
        return "left to the optimiser (other parameters make this weight)" if made else UNGUARDED
    softening = site._fxmask_softening and policy in ("freeze", "decay")
    return f"{policy}, from step {site._fxmask_config.softened_from}; free till then" if softening else policy


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
    unfit = _unfit(site, weight)
    shape = (nb * c.block[0], kb * c.block[1]) if weight is None else site._fxmask_shape if unfit.startswith(TAKEN) else tuple(weight.shape)
    mask = mask_outside(site, weight.detach()) if weight is not None and has_values(weight) and not unfit else None
    kept = None if mask is None else int(kept_elements(mask, matrix_shape(shape), c.block))
    soft = f"; soft: computes densely until step {c.softened_from}, masked blocks at {c.soft_scale_at(site._fxmask_step):.3g}"
    return row_of(
        name,
        torch.empty(shape, device="meta"),
        f"selected{soft if site._fxmask_softening else ''}{unfit}",
        **ratios(kept, math.prod(shape), 0.0 if site._fxmask_is_dense else c.ratio_at(site._fxmask_step), site._fxmask_given.final_ratio),
        block="x".join(map(str, c.block)),
        blocks=nb * kb,
        backward=c.backward,
        masked_weights=_policy(site, weight),
        ranks_by=_ranking(c),
        **({} if unfit else runs(c, weight, mask, site)),
        step=site._fxmask_step,
        mask_age=site._fxmask_step - site._fxmask_built if c.cached else None,
        flips=None if site._fxmask_flips is None or not has_values(site._fxmask_flips) else int(site._fxmask_flips),
    )


def _unfit(site: Site, weight: Tensor | None) -> str:
    """Why a masked layer cannot run as it is; empty where it can."""
    lost = LOST if site._fxmask_lost else ""
    if weight is None:
        return lost
    wrapped = f"; its weight has become a {type(weight).__name__} since, and its forward raises" if is_wrapped(weight) else ""
    if not wrapped and is_taken(weight):
        return TAKEN + lost
    resized = f"{RESIZED}: the mask is of {site._fxmask_shape}" if matrix_shape(weight.shape) != site._fxmask_shape else ""
    return wrapped + (resized or lost)


def unapplied_row(name: str, weight: Tensor, unseen: str, health: bool = False) -> dict[str, Any]:
    """A layer of which `apply` knows nothing: what graphs of the backend do, and else what is to be said of one that nobody has seen."""
    done = seen(weight)
    return row_of(name, weight, unseen) if done is None else graph_row(name, weight, done, health)


def computed_row(name: str, done: Done) -> dict[str, Any]:
    """The row of a weight that a graph computes, and no model has."""
    row = graph_row(name, torch.empty(done.shape, device="meta"), done)
    there = {"impl": done.mask.impl, "why": "the graph computes its weight"} if done.mask else {}
    return {**row, **there, "reason": f"{row['reason']}; the graph computes its weight", "kept": 0, "elements": 0}


def graph_row(name: str, weight: Tensor, done: Done, health: bool = False) -> dict[str, Any]:
    """The row, by what a graph does to the layer."""
    c = done.mask
    if c is None:
        reason = f"not masked; input pruned {IN_GRAPHS}" if done.activations else f"{done.dense} (backend='fxmask')"
        return row_of(name, weight, reason, activations=done.activations)
    if weight.dim() != 2:
        return row_of(name, weight, f"selected {IN_GRAPHS}, and given another shape since")
    row = {**_masked_in_graph(name, weight, c, done, health), "activations": done.activations}
    if done.dense:  # an owner of two ways to use it
        row |= {"reason": f"{row['reason']}, in some of its uses; in others: {done.dense}", "kept": weight.numel()}
    return row


@torch.no_grad()
def exported_row(i: Inside) -> dict[str, Any]:
    """A layer that was masked before its model was traced: what stands in the graph, with the mask as it is now."""
    known = i.weight.dim() >= 2
    blocks = math.prod(grid_shape(matrix_shape(i.weight.shape), i.block)) if known and i.block else 0
    ratio = None if i.kept is None or not blocks else 1 - i.kept / blocks
    kept = None
    if i.mask is not None and known and has_values(i.mask):
        kept = int(kept_elements(i.mask, matrix_shape(i.weight.shape), i.block) if i.block else i.mask.count_nonzero())
    why = asked_for(i.impl, i.block, i.weight) if known and i.block else "asked for"
    if i.backward is None:
        why = "the graph multiplies by W∘M"
    elif i.impl == "auto":
        why = "chosen when it runs"
    block = "x".join(map(str, i.block)) if i.block else "N:M"
    columns = {"block": block, "blocks": blocks or None, "backward": i.backward, "masked_weights": UNGUARDED, "impl": i.impl, "why": why}
    columns |= {} if known else {"shape": None}
    return row_of(i.name, i.weight, IN_TRACE + UNFIT.get(i.unfit, ""), **columns, **ratios(kept, i.weight.numel(), ratio, ratio))


@torch.no_grad()
def _masked_in_graph(name: str, weight: Tensor, c: WeightMask, done: Done, health: bool) -> dict[str, Any]:
    """A layer that compiled graphs of the backend mask. They keep nothing, so the mask is made here, from the weight as it is now."""
    blocks = math.prod(grid_shape(weight.shape, c.block))
    if (given := gathered(weight)) is not None:  # and not its values, which are there in forwards alone
        weight = whole(weight.detach()).to(given.dtype)
    mask, found, taken = None, dict[str, Any](), is_taken(weight)
    if not taken and has_values(weight):
        keep, count = (torch.full((), n, dtype=torch.int64, device=weight.device) for n in (c.keep_at(0, blocks), 0))
        stream = stream_of(c.seed, done.stream_name) if c.criterion == "random" else 0
        mask = ops.index(weight.detach(), keep, count, c.block, c.criterion, c.ties, stream, c.impl, c.cover)
        found = signs(weight.detach(), mask, c.block)[0] if health else {}
    kept = None if mask is None else int(kept_elements(mask, matrix_shape(weight.shape), c.block))
    by = runs(c, weight, mask) if done.called else {"impl": "reference", "why": "its reader takes W∘M as an argument"}
    columns = {"block": "x".join(map(str, c.block)), "blocks": blocks, "backward": c.backward, "masked_weights": UNGUARDED, "ranks_by": _ranking(c), **by}
    columns |= ratios(kept, weight.numel(), c.ratio, c.ratio)
    return row_of(name, weight, f"selected {IN_GRAPHS}{TAKEN if taken else ''}", **columns, **found)
