"""The state of one masked weight: its configuration, its step, and the device scalars and mask that the forward reads.

The forward reads nothing from the host that moves: the number of kept blocks, the step and a cached mask are non-persistent buffers, rewritten between
optimiser steps. So a schedule recompiles nothing, and `state_dict` keys stay what they were. The state lives on the masked module itself, in attributes
that start with `_fxmask_`; what acts on it are functions, so that no method of a user's class is shadowed.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor, nn

from ..kernels import ops
from ..kernels.errors import StateError, UnsupportedError, message
from ..kernels.grid import grid_shape
from .config import WeightMask


class Site(nn.Module):
    """Mixin of every module that owns a mask."""

    _fxmask_config: WeightMask
    _fxmask_name: str  # the parameter's
    _fxmask_grid: tuple[int, int]
    _fxmask_stream: int  # seed of random masks
    _fxmask_step: int  # optimiser steps taken
    _fxmask_built: int  # step of the last rebuild of a cached mask
    _fxmask_announced: bool  # somebody counts the steps
    _fxmask_is_dense: bool  # inside fxmask.dense
    _fxmask_keep: Tensor  # 0-d int64, blocks to keep
    _fxmask_count: Tensor  # 0-d int64, the step as random masks see it
    _fxmask_dense: Tensor | None  # 0-d bool, rigl: dW is dense now
    _fxmask_mask: Tensor | None  # bool [NB, KB] where the mask is cached
    _fxmask_flips: Tensor | None  # 0-d int64, blocks that changed place over all rebuilds of a cached mask

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        result = super()._apply(fn, recurse)
        sync(self)  # to_empty leaves garbage in buffers, and the host knows their values
        return result


def stream_of(seed: int, name: str) -> int:
    """Seed of a weight's random masks: the same on every rank and in every run, another one for every weight."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:7], "big")


def install(site: Site, config: WeightMask, name: str, weight: Tensor, stream_name: str) -> None:
    """Attach the state. Only the shape and the device of `weight` are read; a cached mask keeps every block until `rebuild`."""
    device = weight.device
    site._fxmask_config, site._fxmask_name = config, name
    site._fxmask_grid = grid_shape(weight.shape, config.block)
    site._fxmask_stream = stream_of(config.seed, stream_name)
    site._fxmask_step = site._fxmask_built = 0
    site._fxmask_announced = site._fxmask_is_dense = False
    count = torch.zeros((), dtype=torch.int64, device=device)
    buffers = {
        "keep": count,
        "count": count.clone(),
        "dense": torch.zeros((), dtype=torch.bool, device=device) if config.backward == "rigl" else None,
        "mask": torch.ones(site._fxmask_grid, dtype=torch.bool, device=device) if config.cached else None,
        "flips": count.clone() if config.cached else None,
    }
    for what, value in buffers.items():
        site.register_buffer(f"_fxmask_{what}", value, persistent=False)
    sync(site)


def uninstall(site: nn.Module) -> None:
    """Remove every attribute that `install` made."""
    for name in [n for n in (*site._buffers, *site.__dict__) if n.startswith("_fxmask_")]:
        delattr(site, name)


@torch.no_grad()
def sync(site: Site) -> None:
    """Write the device scalars from the host's step; no transfer, no host sync."""
    config, step, (nb, kb) = site._fxmask_config, site._fxmask_step, site._fxmask_grid
    site._fxmask_keep.fill_(nb * kb if site._fxmask_is_dense else config.keep_at(step, nb * kb))
    site._fxmask_count.fill_(step if config.refresh else 0)
    if site._fxmask_dense is not None:
        site._fxmask_dense.fill_((step - config.start + 1) % config.dense_every == 0)


def build(site: Site, weight: Tensor) -> Tensor:
    """The mask of a weight (N, K) as it is now: bool (NB, KB)."""
    c = site._fxmask_config
    return ops.index(weight, site._fxmask_keep, site._fxmask_count, c.block, c.criterion, c.ties, site._fxmask_stream, c.impl)


@torch.no_grad()
def rebuild(site: Site, weight: Tensor) -> None:
    """Rewrite a cached mask from the weight, and count the blocks that changed place. Nothing to do where every forward builds its own."""
    if site._fxmask_mask is None or site._fxmask_flips is None:
        return
    mask = build(site, weight.detach())
    site._fxmask_flips += (mask != site._fxmask_mask).sum()
    site._fxmask_mask.copy_(mask)
    site._fxmask_built = site._fxmask_step


def advance(site: Site, n: int, weight: Tensor) -> None:
    """Take `n` optimiser steps; 0 only announces that steps will come."""
    c, before, now = site._fxmask_config, site._fxmask_step, site._fxmask_step + n
    site._fxmask_announced = True
    site._fxmask_step = now
    sync(site)
    if n and c.cached and now >= c.start:
        due = c.refresh and (now - c.start) // c.refresh > (before - c.start) // c.refresh
        if due or before < c.start:
            rebuild(site, weight)


def current_mask(site: Site, weight: Tensor) -> Tensor:
    """The mask of the next forward, cached or not: bool (NB, KB)."""
    if site._fxmask_mask is None:
        return build(site, weight)
    return site._fxmask_mask.clone()  # the backward may come after a step has rewritten the buffer


def forward_mask(site: Site, weight: Tensor) -> Tensor:
    """The mask, for a forward; StateError where training counts steps and nobody does."""
    if site.training and not site._fxmask_announced and site._fxmask_config.needs_steps:
        raise StateError(
            message(
                "start, schedule, refresh > 1 and backward='rigl' count optimiser steps: expected a step source before training, got none.",
                site._fxmask_name,
                "call fxmask.step(model, 0) once before training and fxmask.step(model) after every optimizer.step().",
            )
        )
    return current_mask(site, weight)


class GraphSite(Site):
    """The mask of a weight inside an FX graph: called with the weight, it gives the mask that the masked_linear node takes.

    `weight_path` is the parameter's path in the GraphModule, None for a weight that the graph computes. `origins` says what the calls were, in graph order:
    `module:<path>`, `functional` or `aten`.
    """

    def __init__(self, config: WeightMask, name: str, weight: Tensor, weight_path: str | None, stream_name: str) -> None:
        super().__init__()
        self.weight_path = weight_path
        self.origins: list[str] = []
        install(self, config, name, weight, stream_name)

    def forward(self, weight: Tensor) -> Tensor:
        """weight (N, K) -> mask bool (NB, KB)."""
        if forward_ad._current_level >= 0:
            raise UnsupportedError(
                message(
                    "forward-mode AD would silently see a zero tangent through the custom op of a rewritten graph.",
                    self._fxmask_name,
                    "call fxmask.apply on the nn.Module instead of its traced graph; that form differentiates forward too.",
                )
            )
        return forward_mask(self, weight)

    def extra_repr(self) -> str:
        c = self._fxmask_config
        return f"{self._fxmask_name}, ratio={c.ratio}, block={c.block}, backward={c.backward!r}"
