"""What weights that are loaded make of masks: cached ones follow them, but for those that training has gone on with for good."""

from __future__ import annotations

import torch
from torch import Tensor

from ...kernels.errors import first_of, message, warn
from . import site as state
from . import site_mask, tensors
from .ranking import held_mask
from .rebuild import Job, rebuild
from .site import Site
from .site_forward import traced_alike


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
