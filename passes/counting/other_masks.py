"""Masks that a recorded run cannot show: of weights that are computed, whose fakes have no values, of idle layers, cached ones in traces, N:M ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from ...kernels.grid import kept_elements
from ..finding.weights import peek_weight
from ..graphs.exported import Inside, exported_masks
from ..state.site import Site
from ..state.site_mask import current_mask
from .calls import is_real, typical_mask


@torch.no_grad()
def masks_of_computed(root: nn.Module) -> dict[str, Tensor]:
    """The masks of weights that are no Parameters, by module, from what they are computed of, as a parametrisation does; none where that has no values."""
    found = {}
    for name, m in root.named_modules():
        if isinstance(m, Site) and isinstance(m, (nn.Linear, nn.Conv2d)) and "weight" not in m._parameters and all(map(is_real, m.parameters())):
            found[name] = current_mask(m, peek_weight(m)).cpu()
    return found


@torch.no_grad()
def masks_in_traces(root: nn.Module) -> list[Inside]:
    """The layers of traces of masked models."""
    return list(exported_masks(root))


@torch.no_grad()
def kept_of_nm(root: nn.Module, parameters: Mapping[str, Tensor], traced: Iterable[Inside]) -> tuple[dict[str, int], set[str]]:
    """Elements that N:M masks keep of their parameters, n of every m, and which of traces have masks that nobody knows. A soft one in training keeps all."""
    names = {id(p): name for name, p in parameters.items()}
    found, unknown = {}, set()
    for m in root.modules():
        config, p = m.__dict__.get("_fxmask_nm"), m._parameters.get("weight")
        if config is None or p is None or (config.soft and m.training and m.nm_mask is None):
            continue
        if id(p) in names:
            found[names[id(p)]] = p.numel() // config.m * config.n
    for inside in traced:
        name = names.get(id(inside.weight)) if inside.block is None else None
        if name is not None and inside.mask is not None:
            found[name] = int(inside.mask.sum())
        elif name is not None:
            unknown.add(name)
    return found, unknown


@torch.no_grad()
def kept_of_idle(sites: Mapping[str, Site], parameters: Mapping[str, Tensor], read: set[str]) -> dict[str, int]:
    """Elements in kept blocks of the masked parameters that are not among those that an op has read. Sites are ready for a look."""
    found = {}
    for name in sorted(set(sites) & set(parameters) - read):
        site, p = sites[name], parameters[name]
        mask = current_mask(site, p.detach()) if is_real(p) else typical_mask(site._fxmask_grid, int(site._fxmask_keep))
        found[name] = int(kept_elements(mask, site._fxmask_shape, site._fxmask_config.block))
    return found
