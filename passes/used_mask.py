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
        site.__dict__["_fxmask_used"] = mask, _made_of(site, weight)


def forget(site: Site) -> None:
    """A step was taken, which moves weights, and not every one leaves a version behind."""
    site.__dict__.pop("_fxmask_used", None)


def mask_of_step(site: Site, weight: Tensor) -> Tensor:
    """The mask of the forward before this step where nothing since would make it another one, else that of the next forward: bool (NB, KB)."""
    used = site.__dict__.get("_fxmask_used")
    if used is not None and site._fxmask_mask is None and _same(used[1], _made_of(site, weight)):
        return used[0]
    return mask_outside(site, weight.detach())


def _made_of(site: Site, weight: Tensor) -> tuple[Any, ...]:
    """What decides about a mask that is no cached one."""
    return weight, site._fxmask_config, weight.data_ptr(), version(weight), site._fxmask_written, site._fxmask_is_dense


def _same(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    return a[0] is b[0] and a[1] is b[1] and a[2:] == b[2:] and a[3] is not None
