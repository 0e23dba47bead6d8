"""The mask that a forward has built, kept until the optimiser's step: under `refresh=1` that would else read the weight once more to build the same again."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from . import noted
from .site import Site, capturing, version
from .site_mask import mask_outside


def note(site: Site, weight: Tensor, mask: Tensor) -> None:
    """Keep the mask of an eager forward that trains, built from a weight that is a Parameter of its own; of a capture where the step is part of it."""
    trains = type(weight) is nn.Parameter and weight.requires_grad and torch.is_grad_enabled() and type(mask) is Tensor
    if site._fxmask_mask is None and trains and (noted.asked() or not capturing(mask)):
        site.__dict__["_fxmask_used"] = mask, weight, site._fxmask_config, _facts(site, weight)


def forget(site: Site) -> None:
    """A step was taken, which moves weights, and not every one leaves a version behind."""
    site.__dict__["_fxmask_used"] = None


def mask_of_step(site: Site, weight: Tensor) -> Tensor:
    """The mask of the forward before this step where nothing since would make it another one, else that of the next forward: bool (NB, KB)."""
    mask, of, config, facts = site._fxmask_used or (None, None, None, None)
    same = of is weight and config is site._fxmask_config and site._fxmask_mask is None
    return mask if same and facts == _facts(site, weight) else mask_outside(site, weight.detach())


def _facts(site: Site, weight: Tensor) -> tuple[Any, ...]:
    """What decides, besides the weight and the configuration, about a mask that is not cached; memory and version stand for the weight's values."""
    return weight.data_ptr(), version(weight), site._fxmask_written, site._fxmask_is_dense
