"""Masks that a recorded run cannot show: of weights that are computed, whose fakes have no values, of layers that do not run, and cached ones in traces."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ...kernels.grid import kept_elements, matrix_shape
from ..finding.weights import peek_weight
from ..graphs.exported import exported_masks
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
def masks_in_traces(root: nn.Module) -> list[tuple[Tensor, tuple[int, int], tuple[int, int]]]:
    """(mask, block, its weight's shape) of the layers of traces of masked models, where these are known: a mask that was cached stands there alone."""
    every = exported_masks(root)
    return [(i.mask, i.block, matrix_shape(i.weight.shape)) for i in every if i.mask is not None and i.block is not None and i.weight.dim() > 1]


@torch.no_grad()
def kept_of_idle(sites: Mapping[str, Site], parameters: Mapping[str, Tensor], read: set[str]) -> dict[str, int]:
    """Elements in kept blocks of the masked parameters that are not among those that an op has read. Sites are ready for a look."""
    found = {}
    for name in sorted(set(sites) & set(parameters) - read):
        site, p = sites[name], parameters[name]
        mask = current_mask(site, p.detach()) if is_real(p) else typical_mask(site._fxmask_grid, int(site._fxmask_keep))
        found[name] = int(kept_elements(mask, site._fxmask_shape, site._fxmask_config.block))
    return found
