"""Cached masks built anew: all of a model together, so that kernels may build them in one set of launches. When: `taken_steps`, `loaded`, and on demand."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from ...kernels import dispatch, gpu_choice
from ...kernels.grid import as_matrix
from . import ranks, site_mask, tensors
from . import site as state
from .ranking import held_mask, in_groups, keep_norm, size_of, start_at_zero
from .site import Site

switching = threading.RLock()  # the switch of `fxmask.dense`: a thread that sets it anew would undo what another one does to it meanwhile


class Job(NamedTuple):
    """A cached mask that is due."""

    site: Site
    weight: Tensor
    first: bool = False  # nothing was masked before: blocks that change place are no flips
    step: bool = False  # an optimiser step has made it due: blocks may be exchanged, and weights follow
    anew: bool = False  # the weight is another one than that of the mask before
    other: tuple[Tensor, tuple[int, int]] | None = None  # a mask in other blocks that this one follows, and these blocks


@torch.inference_mode(False)
@torch.no_grad()
def rebuild(jobs: Sequence[Job], compute: Callable[[Sequence[Job]], None] | None = None) -> None:
    """Replace cached masks, and their lists, by their weights', and count the blocks that changed place. Nothing to do where every forward builds its own.

    The old masks are not overwritten, but for CUDA graphs: a backward that is still to come holds them. `compute`: what runs `computed`, such as a graph of it.
    """
    jobs = [j for j in jobs if j.site._fxmask_mask is not None and j.site._fxmask_step >= j.site._fxmask_config.start]
    if not jobs:
        return
    with switching:
        inside = [j.site._fxmask_is_dense for j in jobs]
        try:
            for j in jobs:
                j.site._fxmask_is_dense = False
            tensors.sync(*(j.site for j in jobs))
            (compute or computed)(jobs)
        finally:
            for j, dense in zip(jobs, inside, strict=True):
                j.site._fxmask_is_dense = dense
            tensors.sync(*(j.site for j in jobs))
    for site, *_ in jobs:
        state.note_weight(site, site._parameters.get("weight"))
        site._fxmask_built = site._fxmask_step
        site._fxmask_lost, site._fxmask_restored, site._fxmask_brought = False, None, False


def computed(jobs: Sequence[Job]) -> None:
    """What the device does of a rebuild; all of the masks are built before the first is replaced."""
    for (site, weight, first, step, _, other), (mask, lists) in zip(jobs, _build(jobs), strict=True):
        old = held_mask(site)
        assert old is not None  # of cached masks
        start_at_zero(site, weight)
        if site._fxmask_config.gain and (other is not None or step):
            keep_norm(site, weight, mask, *(other or (old,)))  # of blocks that had no mask before, all were kept
        if not first and site._fxmask_flips is not None:
            flips = torch.ne(mask, old).sum()
            site._fxmask_flips = site._fxmask_flips.add_(flips) if in_place(site, mask) else site._fxmask_flips + flips
        if site._fxmask_saved is None:
            hold(site, mask, lists)
        else:  # inside fxmask.dense the mask waits until its end
            site._fxmask_saved = (mask, lists)


def in_place(site: Site, mask: Tensor) -> bool:
    """Whether a CUDA graph reads the site's tensors, or is about to."""
    return site._fxmask_in_place or tensors.capturing(mask)


def hold(site: Site, mask: Tensor, lists: Tensor | None) -> None:
    """Cache a mask and its lists. Inside a CUDA graph, and for one, they go where the graph's forward reads them in every replay."""
    old, old_lists = site._fxmask_mask, site._fxmask_lists
    if old is not None and in_place(site, mask):
        old.copy_(mask)
        if old_lists is not None and lists is not None:
            old_lists.copy_(lists)
        return
    site._fxmask_mask, site._fxmask_lists = mask, lists


def _build(jobs: Sequence[Job]) -> list[tuple[Tensor, Tensor | None]]:
    """Masks and lists: in groups of one dtype, block and device, with scores or without, where the kernels build them, one by one elsewhere."""
    groups: dict[object, list[int]] = {}
    for i, (site, weight, *_) in enumerate(jobs):
        site_mask.fits(site, weight)
        if _in_a_group(site, weight):
            groups.setdefault((weight.dtype, weight.device, site._fxmask_config.block, site._fxmask_score is None), []).append(i)
    found: dict[int, tuple[Tensor, Tensor | None]] = {}
    for members in groups.values():
        weights = [as_matrix(jobs[i].weight.detach()) for i in members]
        keeps = [jobs[i].site._fxmask_keep for i in members]
        scores = [s for i in members if (s := jobs[i].site._fxmask_score) is not None] or None
        block = jobs[members[0]].site._fxmask_config.block
        for i, (mask, lists) in zip(members, dispatch.triton_ops().refresh_group(weights, keeps, block, scores), strict=True):
            found[i] = (mask, lists if tensors.reads_lists(jobs[i].site, mask.device) else None)
    tied: dict[object, Tensor] = {}  # of a weight that several layers share, each of which loads: one mask, and a copy for each
    for i, (site, weight, first, step, anew, _) in enumerate(jobs):
        if i not in found:
            key = (id(weight), site_mask.mask_key(site))
            same = None if site._fxmask_config.remembers else tied.get(key)
            if same is None:
                grow = step and weight.requires_grad  # one that rests would keep the zeros that its blocks come back with
                mask = site_mask.build(site, ranks.whole(weight.detach()), grow, first or anew)  # gathered one at a time
                tied[key] = mask
            else:
                mask = same.clone()
            found[i] = (mask, tensors.lists_of(site, mask))
    return [found[i] for i in range(len(jobs))]


def _in_a_group(site: Site, weight: Tensor) -> bool:
    """Whether kernels build the mask, together with those of other weights."""
    c = site._fxmask_config
    if not dispatch.uses_kernels(c.impl, weight.device) or (c.impl == "auto" and not gpu_choice.listable(site._fxmask_shape, c.block)):
        return False
    if ranks.is_shard(weight) or isinstance(weight, FakeTensor) or not in_groups(c):
        return False
    return bool(dispatch.triton_ops().groups(weight, c.block, size_of(c), c.ties, c.cover, site._fxmask_score))


def start_gain(sites: Sequence[tuple[Site, Tensor]]) -> None:
    """Let layers whose masks have just begun keep the norm that they had with all blocks: all of them, or none, for which the host holds their weights."""
    held: list[tuple[Tensor, Tensor]] = []
    try:
        for site, weight in sites:
            c, mask = site._fxmask_config, site._fxmask_mask
            if c.gain and mask is not None and not c.start:
                held.append((weight, weight.detach().to("cpu", copy=True)))
                keep_norm(site, weight, mask, torch.ones_like(mask))
    except BaseException:
        for weight, before in held:
            weight.detach().copy_(before)
        raise
