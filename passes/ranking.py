"""The mask from scores: moving averages and gradients for norms of the weight, hysteresis, regrowth, and what a change of the mask does to the weights.

Runs between steps, on [NB, KB] tensors, in plain PyTorch on any device. The selection itself is `kernels.select`.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..kernels.errors import ConfigError
from ..kernels.grid import expand_mask
from ..kernels.score import KEY_NAN, random_keys
from ..kernels.select import select_blocks
from .saliency import NORMS, norms

if TYPE_CHECKING:
    from .site import Site

GROWTH = ("gradient", "random")


@dataclasses.dataclass(frozen=True)
class Regrow:
    """Exchange of blocks at every rebuild: the worst kept ones leave, and as many others come back by something else than their weights.

    Of k kept blocks floor(f k) are exchanged, f = fraction / 2 (1 + cos(pi t / until)) at t steps after `start`, none from `until` on (Evci et al. 2020,
    arXiv:1911.11134, sec. 3). Blocks that come back start at zero weights, as there.

    Args:
        by: `gradient`: those with the largest norm of the dense gradient, as of the last step that had one (RigL; needs backward="rigl" or "ste").
            `random`: any, by a counter of (seed, step, name), equal on all ranks (SET, Mocanu et al. 2018, arXiv:1707.04780).
        fraction: in (0, 1). until: optimiser steps, None: for ever at `fraction`.

    Raises: ConfigError.
    """

    by: str = "gradient"
    fraction: float = 0.3
    until: int | None = None

    def __post_init__(self) -> None:
        if self.by not in GROWTH:
            raise ConfigError(f"unknown Regrow.by: expected one of {', '.join(GROWTH)}, got {self.by!r}.")
        if isinstance(self.fraction, bool) or not isinstance(self.fraction, (int, float)) or not 0 < self.fraction < 1:
            raise ConfigError(f"Regrow.fraction is the share of kept blocks that are exchanged: expected a number in (0, 1), got {self.fraction!r}.")
        object.__setattr__(self, "fraction", float(self.fraction))
        if self.until is not None and (type(self.until) is not int or self.until < 1):
            raise ConfigError(f"Regrow.until counts optimiser steps: expected None or an int of at least 1, got {self.until!r}.")

    def exchanged(self, step: int, kept: int) -> int:
        """Blocks exchanged `step` steps after the start, of `kept` ones; at least one stays."""
        share = self.fraction
        if self.until is not None:
            share *= 0.0 if step >= self.until else (1 + math.cos(math.pi * step / self.until)) / 2
        return min(int(share * kept), kept - 1)


def keys_of(scores: Tensor) -> Tensor:
    """Scores float32 [NB, KB], of any sign, as keys int32 that `select_blocks` takes: the same order, NaN highest."""
    low = torch.where(torch.isfinite(scores), scores, 0).amin().clamp(max=0)
    keys = ((scores - low).clamp(min=0) + 0.0).view(torch.int32)  # -0.0 + 0.0 is 0.0
    return torch.where(torch.isnan(scores), KEY_NAN, keys)


def current_scores(site: Site, weight: Tensor) -> Tensor:
    """What ranks the blocks now, float32 [NB, KB]; until something was observed, the norm of the weight."""
    c = site._fxmask_config
    if site._fxmask_score is not None and site._fxmask_observed:
        return site._fxmask_score
    return norms(weight, c.block, c.criterion if c.criterion in NORMS else "fro")


def held_mask(site: Site) -> Tensor | None:
    """The cached mask that is in force, also inside fxmask.dense."""
    return site._fxmask_mask if site._fxmask_saved is None else site._fxmask_saved[0]


def ranked(site: Site, weight: Tensor, grow: bool = False) -> Tensor:
    """The mask of a configuration that ranks by more than the weight's norm now: bool (NB, KB). `grow`: with the exchange of `regrow`."""
    c, old = site._fxmask_config, held_mask(site)
    if c.criterion == "random":
        keys = random_keys(torch.Size(site._fxmask_grid), weight.device, site._fxmask_count, site._fxmask_stream)
    else:
        scores = current_scores(site, weight)
        if c.hysteresis and old is not None:
            scores = torch.where(old, scores + c.hysteresis * scores.abs(), scores)
        keys = keys_of(scores)
    if grow and old is not None and c.regrow is not None:
        keep = c.keep_at(site._fxmask_step, old.numel())
        n = c.regrow.exchanged(site._fxmask_step - c.start, keep)
        growth = _growth(site)
        if n and growth is not None:
            return regrown(keys, old, site._fxmask_keep, n, growth, c.cover)
    return select_blocks(keys, site._fxmask_keep, "lowest", c.cover)


def _growth(site: Site) -> Tensor | None:
    """Keys int32 [NB, KB] by which blocks come back; None while no dense gradient was seen."""
    c = site._fxmask_config
    assert c.regrow is not None
    if c.regrow.by == "gradient":
        return None if site._fxmask_growth is None else keys_of(site._fxmask_growth)
    step = torch.full_like(site._fxmask_count, site._fxmask_step)
    return random_keys(torch.Size(site._fxmask_grid), step.device, step, site._fxmask_stream)


def regrown(keys: Tensor, old: Tensor, keep: Tensor, n: int, growth: Tensor, cover: bool) -> Tensor:
    """keep - n of the old blocks with the highest keys, then those of all others with the highest growth: bool (NB, KB), exactly `keep`.

    keys, growth: int32 (NB, KB); keep: 0-d int64. Ties to the lowest flat index. A block that has just left may come back, as in RigL.
    """
    inside = torch.where(old, keys.long() + 1, 0)
    stay = select_blocks(inside, (keep - n).clamp(min=1), "lowest") & old
    return select_blocks(torch.where(stay, (1 << 31) + keys.long(), growth.long()), keep, "lowest", cover)


@torch.no_grad()
def follow(site: Site, weight: Tensor, mask: Tensor, old: Tensor, grow: bool) -> None:
    """What a new mask does to the weight, in place: blocks that regrowth brought back start at zero, and with `gain` those that stay take over the norm.

    Gain: where the number of kept blocks falls, kept weights are multiplied by sqrt(|W∘old|^2 / |W∘mask|^2), so that the layer keeps its Frobenius norm and,
    of random weights, its outputs their variance: 1/sqrt(density) at a random init (Evci et al. 2022, arXiv:2010.03533, sec. 3, for single weights).
    """
    c = site._fxmask_config
    if grow and c.regrow is not None:
        came = expand_mask(mask & ~old, weight.shape, c.block)
        weight.masked_fill_(came, 0)
    if c.gain:
        square = weight.detach().double().square()
        before, after = (torch.where(expand_mask(m, weight.shape, c.block), square, 0).sum() for m in (old, mask))
        fewer = (mask.sum() < old.sum()) & (after > 0) & torch.isfinite(before)
        factor = torch.where(fewer, (before / after).sqrt(), 1.0).to(weight.dtype)
        weight.copy_(torch.where(expand_mask(mask, weight.shape, c.block), weight * factor, weight))
