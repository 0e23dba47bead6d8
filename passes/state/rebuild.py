"""When cached masks are rebuilt: at steps, at loads and on demand; all of a model together, so that kernels may build them in one set of launches."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from ...kernels import dispatch, gpu_choice
from ...kernels.errors import UnsupportedError, first_of, message, warn
from ...kernels.grid import as_matrix
from ..settings import looks, phase_change
from . import ranks, site_mask, tensors
from . import site as state
from .ranking import held_mask, in_groups, keep_norm, size_of, start_at_zero
from .site import Site
from .site_forward import traced_alike

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


def after_load(site: Site, weight: Tensor) -> None:
    """New weights were loaded: follow them to their device, and rewrite a cached mask, unless it is one that training has gone on with for good."""
    before, restored = held_mask(site), site._fxmask_restored
    before = before.clone() if before is not None and site._fxmask_in_place else before
    ties = site.__dict__.get("_fxmask_tied")
    users = (site, *(ties.others(site, weight) if ties is not None else ()))
    stays = not weight.is_meta and all(map(_is_for_good, users))  # asked before anything moves
    if site._fxmask_keep.device != weight.device:  # load_state_dict(assign=True) replaces the Parameter and moves nothing else
        if stays:
            tensors.move(site, weight.device)
        else:
            tensors.place_on(site, weight.device)
            if site._fxmask_saved is not None and site._fxmask_mask is not None:  # inside fxmask.dense
                site._fxmask_saved = (site._fxmask_mask, site._fxmask_lists)
            site._fxmask_lost = site._fxmask_mask is not None and (weight.is_meta or site._fxmask_step >= site._fxmask_config.start)
    if weight.is_meta:
        return
    site._fxmask_loaded = site._fxmask_loaded_since_step = True
    if stays:
        site_mask.fits(site, weight)
        for s in users:
            state.note_weight(s, s._parameters.get("weight"))
        return
    rebuild([Job(s, weight, anew=True) for s in users])
    mask = held_mask(site)
    if restored and before is not None and mask is not None and (before.is_meta or not torch.equal(mask, before.to(mask.device))):
        _warn_of_order(site, restored)


def _is_for_good(site: Site) -> bool:
    """Whether the mask is never built anew by steps, and weights have been trained under it: blocks of other norms would be another model."""
    mask, used = held_mask(site), site._fxmask_called or site._fxmask_brought or traced_alike(site) is not None
    has_values = mask is not None and not mask.is_meta and not site._fxmask_lost
    return has_values and used and site._fxmask_config.refresh == 0 and site._fxmask_step > site._fxmask_built


def _warn_of_order(site: Site, restored: list[str]) -> None:
    """Once for all masks of a state: layers load one after the other, and the first one that loses its mask cannot know which of the others will."""
    what = "weights were loaded after fxmask.load_state_dict, and masks that it brought are built anew from them: expected the weights first, then the masks."
    names = first_of(restored, 3)
    fix = "load the weights first, then the masks: model.load_state_dict, then fxmask.load_state_dict, for all layers."
    restored.clear()
    warn(message(what, f"{site._fxmask_name}; masks had been brought for {names}", fix))


def start_gain(sites: Sequence[tuple[Site, Tensor]]) -> None:
    """Let layers whose masks have just begun keep the norm that they had with all blocks."""
    for site, weight in sites:
        c, mask = site._fxmask_config, site._fxmask_mask
        if c.gain and mask is not None and not c.start:
            keep_norm(site, weight, mask, torch.ones_like(mask))


TOLD = ("_fxmask_step", "_fxmask_announced", "_fxmask_unguarded", "_fxmask_copied")  # what a step changes, whatever its mask


def advance(found: Sequence[tuple[Site, Tensor | None]], n: int, compute: Callable[[Sequence[Job]], None] | None = None) -> None:
    """Take `n` optimiser steps; 0 only announces that steps will come. The weights are needed for cached masks only. `compute`: see `rebuild`.

    Raises: UnsupportedError inside a CUDA graph, whose replays would not count, where the number of steps matters.
    """
    captured = [site for site, _ in found if n and site._fxmask_given.needs_steps and tensors.capturing(site._fxmask_keep)]
    if captured:
        what = "a step is counted inside a CUDA graph, whose replays would not count: expected masks that no number of steps moves (start, schedule,"
        fix = "let fxmask.graphed(step, optimizer) capture the step, with every optimiser that it steps: its replays count."
        raise UnsupportedError(message(f"{what} refresh > 1, rigl, phases, scores that last).", captured[0]._fxmask_name, fix))
    jobs, past = [], [(site, {name: getattr(site, name) for name in TOLD}, phase_change.remembered(site)) for site, _ in found]
    try:
        for site, weight in found:
            job = _taken(site, weight, n)
            jobs += [] if job is None else [job]
        tensors.sync(*(site for site, _ in found))
        rebuild(jobs, compute)
        looks.look([(site, weight, site._fxmask_step - n) for site, weight in found])
        for site, _ in found if n else ():
            site.__dict__.update(_fxmask_restored=None, _fxmask_loaded=False)
    except BaseException:  # a step that failed may be told again
        for site, told, remembered in past:
            phase_change.take_back(site, remembered)
            site.__dict__.update(told)
        tensors.sync(*(site for site, _ in found))
        raise


def _taken(site: Site, weight: Tensor | None, n: int) -> Job | None:
    """Take the steps of one mask; what is due of it then."""
    before, now, mask, block = site._fxmask_step, site._fxmask_step + n, held_mask(site), site._fxmask_config.block
    site.__dict__.update(_fxmask_announced=True, _fxmask_unguarded=False, _fxmask_copied=False, _fxmask_step=now)
    entered = phase_change.follow(site, taken=n > 0)
    c = site._fxmask_config
    if not n or weight is None or not c.cached or now < c.start:
        return None
    begins = before < c.start
    due = c.refresh and (now - c.start) // c.refresh > (before - c.start) // c.refresh
    if not (due or begins or entered.anew):
        return None
    other = (mask, block) if entered.first and not begins and mask is not None else None
    return Job(site, weight, first=begins or entered.first, step=begins or not entered.first, other=other)
