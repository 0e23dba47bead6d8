"""The tensors of a mask's state: made on a device, moved to another one, and rewritten from what the host knows, without a transfer or a wait."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._subclasses import FakeTensor

from ...kernels import ops
from ...kernels.dispatch import runs_triton
from ...kernels.errors import UnsupportedError, message
from ...kernels.grid import keep_count
from . import gpu_site, ranks

if TYPE_CHECKING:
    from .site import Site

STATE = ("keep", "count", "dense", "mask", "lists", "flips", "score", "growth", "scale", "looked")  # the tensors among the attributes


@torch.inference_mode(False)  # tensors made inside inference_mode could never be rewritten
def place_on(site: Site, device: torch.device) -> None:
    """Make the state's tensors on a device, as after `install`."""
    config = site._fxmask_config
    site._fxmask_keep, site._fxmask_count = (torch.zeros((), dtype=torch.int64, device=device) for _ in range(2))
    site._fxmask_dense = torch.zeros((), dtype=torch.bool, device=device) if config.backward == "rigl" else None
    site._fxmask_mask = torch.ones(site._fxmask_grid, dtype=torch.bool, device=device) if config.cached else None
    site._fxmask_lists = None if site._fxmask_mask is None else lists_of(site, site._fxmask_mask)
    site._fxmask_written = site._fxmask_looked = None
    site._fxmask_flips = torch.zeros((), dtype=torch.int64, device=device) if config.cached else None
    site._fxmask_score = torch.zeros(site._fxmask_grid, dtype=torch.float32, device=device) if config.observes else None  # whatever the default dtype is
    if site._fxmask_own is not None and not site._fxmask_own.is_meta:
        site._fxmask_score = site._fxmask_own.to(device, copy=True)
    site._fxmask_scale, site._fxmask_scaled = torch.ones((), dtype=torch.float32, device=device) if config.soft else None, 1.0
    site._fxmask_softening = False  # `sync` tells, and of soft masks alone: a phase with refresh=0 is none
    site._fxmask_growth = None
    sync(site)


@torch.inference_mode(False)
def move(site: Site, device: torch.device) -> None:
    """Take the state's tensors to another device."""
    site._fxmask_forward = ()
    own, came = site._fxmask_own, site._fxmask_score is not None and site._fxmask_score.is_meta
    for name in STATE:
        value = getattr(site, f"_fxmask_{name}")
        setattr(site, f"_fxmask_{name}", None if value is None else _moved(value, device))
    if site._fxmask_saved is not None:  # inside fxmask.dense
        mask, lists = site._fxmask_saved
        site._fxmask_saved = (_moved(mask, device), None if lists is None else _moved(lists, device))
    if own is not None and came and not own.is_meta:
        site._fxmask_score = own.to(device, copy=True)
    site._fxmask_written = None  # what was moved from the meta device holds zeros
    sync(site)
    if site._fxmask_mask is not None and site._fxmask_lists is None:  # kernels may run on this device
        site._fxmask_lists = lists_of(site, site._fxmask_mask)


def _moved(t: Tensor, device: torch.device) -> Tensor:
    """A state tensor on another device; from the meta device come zeros, which the caller must replace."""
    return torch.zeros_like(t, device=device) if t.is_meta else t.to(device)


@torch.inference_mode(False)
@torch.no_grad()
def sync(*sites: Site) -> None:
    """Write the device scalars from the host's step, where they change; no transfer, no host sync. Many sites share a launch.

    Layers share configs, and each has a turn in every optimiser step: so a ratio is worked out once, and attributes are written past nn.Module's __setattr__.
    """
    scalars, changes = [], []
    ratios: dict[tuple[float, int, int, int], float] = {}
    for site in sites:
        config, step, (nb, kb) = site._fxmask_config, site._fxmask_step, site._fxmask_grid
        d, moment = site.__dict__, (config.ratio, id(config.schedule), config.start, step)
        d["_fxmask_kind"], d["_fxmask_from"] = config.kind, gpu_site.least_tokens(site, site._fxmask_keep.device)
        if moment not in ratios:
            ratios[moment] = config.ratio_at(step)
        keep = nb * kb if site._fxmask_is_dense else keep_count(nb * kb, ratios[moment])
        count = step if config.refresh and config.criterion == "random" else 0
        flag = site._fxmask_dense is not None and site._fxmask_dense_now
        if site._fxmask_scale is not None:
            scale = config.soft_scale_at(step)
            site._fxmask_softening = scale > 0 and not site._fxmask_is_dense  # the one switch of a soft mask that recompiles, once
            if scale != site._fxmask_scaled:
                site._fxmask_scale, site._fxmask_scaled = _filled(site, site._fxmask_scale, scale), scale
        old = site._fxmask_written
        if old is None:
            site._fxmask_keep.fill_(keep)
            site._fxmask_count.fill_(count)
        else:
            moves = [(site._fxmask_keep, keep - old[0]), (site._fxmask_count, count - old[1])]
            scalars += [t for t, change in moves if change]
            changes += [change for _, change in moves if change]
        if site._fxmask_dense is not None and (old is None or flag != old[2]):
            site._fxmask_dense = _filled(site, site._fxmask_dense, flag)
        d["_fxmask_written"] = (keep, count, flag)
    if scalars:
        torch._foreach_add_(scalars, changes)


def _filled(site: Site, t: Tensor, value: float) -> Tensor:
    """A scalar that backwards read, with another value: a new tensor, because one that is still to come holds the old."""
    return t.fill_(value) if site._fxmask_in_place else torch.full_like(t, value)


def has_values(t: Tensor) -> bool:
    """Whether a tensor has values, which one on the meta device, or of a FakeTensorMode, that memory is estimated in, has not."""
    return not t.is_meta and not isinstance(t, FakeTensor)


def is_taken(weight: Tensor) -> bool:
    """Whether a wrapper has flattened a weight, or freed its memory, between forwards."""
    return weight.dim() < 2 or (weight.layout is torch.strided and not ranks.is_shard(weight) and _is_freed(weight))


def _is_freed(weight: Tensor) -> bool:
    return weight.untyped_storage().size() == 0 and weight.numel() > 0 and not weight.is_meta


def refuse_freed(name: str, weight: Tensor) -> None:
    """UnsupportedError before a forward reads memory that is gone, by which the process would end."""
    plain = type(weight) is nn.Parameter or (type(weight) is Tensor and not is_functorch_wrapped_tensor(weight))
    if plain and weight.layout is torch.strided and _is_freed(weight):
        what = "this weight's memory was freed, as a wrapper does between its forwards: expected its values in a forward."
        raise UnsupportedError(message(what, name, "run the forward of the wrapper that freed it; or give it memory and values again."))


def capturing(t: Tensor) -> bool:
    """Whether a CUDA graph is being captured on this tensor's device, which would replay what is done now."""
    return t.is_cuda and torch.cuda.is_current_stream_capturing()


def lists_of(site: Site, mask: Tensor) -> Tensor | None:
    """The lists of a mask that is to be cached; None where no kernel can run on its device, or none reads them."""
    return ops.lists(mask, site._fxmask_config.block, "triton") if reads_lists(site, mask.device) else None


def reads_lists(site: Site, device: torch.device) -> bool:
    """Whether kernels that read lists may run on a device; under `auto` also where they do not pay now, so that lists do not come and go with a ratio."""
    return runs_triton(site._fxmask_config.impl, device) or gpu_site.may_take(site, device)
