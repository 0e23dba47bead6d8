"""A mask goes from one phase to the next: the configuration in force, the grid, and the tensors that depend on them."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...kernels.grid import grid_shape
from ..state import tensors
from ..state.site import Site
from ..stepping.guarded_weight import policy_of
from . import looks, phases
from .feedback import held


class Entered(NamedTuple):
    """What a change asks of a cached mask."""

    anew: bool = False  # it has to be built
    first: bool = False  # in blocks that had no mask before: blocks that change place are no flips


def follow(site: Site, taken: bool = True) -> Entered:
    """Put in force what the site's step asks for, and if a step was taken what its feedback has decided. The caller syncs the device scalars.

    The old tensors are not overwritten where blocks change: a backward that is still to come holds them.
    """
    if taken:
        looks.take(site)
    given, old = site._fxmask_given, site._fxmask_config
    if given.phases is None:
        return Entered()
    begun = phases.begun(given, site._fxmask_step)
    if begun == site._fxmask_phase:
        return Entered()
    new = held(phases.in_force(given, site._fxmask_step), given, site._fxmask_progress)
    site._fxmask_config, site._fxmask_phase = new, begun
    _make_tensors(site, same_blocks=new.block == old.block)
    if site._fxmask_score is not None and new.criterion != old.criterion and (new.average or new.criterion == "movement"):
        site._fxmask_score = torch.zeros_like(site._fxmask_score)  # others are replaced by the next step, and rank until then
    if site._fxmask_policy is not None:
        site._fxmask_policy = policy_of(new, site._fxmask_choice)
    first = new.block != old.block or not old.cached
    moved = any(getattr(new, f) != getattr(old, f) for f in phases.FIELDS if f != "backward")
    return Entered(new.cached and moved, first)


def _make_tensors(site: Site, same_blocks: bool) -> None:
    """The tensors that the configuration in force wants; those that go on keep their values, but for the factor of a soft mask, which is the step's."""
    before = {name: getattr(site, f"_fxmask_{name}") for name in tensors.STATE}
    saved, device = site._fxmask_saved, site._fxmask_keep.device
    site._fxmask_grid = grid_shape(site._fxmask_shape, site._fxmask_config.block)
    tensors.place_on(site, device)
    site._fxmask_saved = None
    for name, t in before.items():
        if t is not None and name != "scale" and getattr(site, f"_fxmask_{name}") is not None and (same_blocks or name == "flips"):
            setattr(site, f"_fxmask_{name}", t)
    site._fxmask_looked, site._fxmask_growth = (before[name] if same_blocks else None for name in ("looked", "growth"))
    if site._fxmask_is_dense and site._fxmask_mask is not None:  # what the end of fxmask.dense brings back; a new mask is put there
        site._fxmask_saved = saved if same_blocks and saved is not None else (site._fxmask_mask, site._fxmask_lists)
    site._fxmask_lost = site._fxmask_lost and site._fxmask_mask is not None
    site._fxmask_written = None
    tensors.sync(site)


def remembered(site: Site) -> dict[str, object]:
    """What `follow` may change, to take it back after a failure; nothing where it changes nothing."""
    if site._fxmask_given.phases is None and site._fxmask_progress is None:
        return {}
    return {k: v for k, v in site.__dict__.items() if k.startswith("_fxmask_")}


def take_back(site: Site, remembered: dict[str, object]) -> None:
    """Undo a `follow`. The device scalars are to be synced then."""
    if remembered:
        site.__dict__.update(remembered)
        site._fxmask_written = None  # tensors that went on were written
