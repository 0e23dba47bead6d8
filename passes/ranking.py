"""The mask from scores: moving averages and gradients for norms of the weight, hysteresis, regrowth, and what a change of the mask does to the weights.

Runs between steps, on [NB, KB] tensors, in plain PyTorch on any device. The selection itself is `kernels.select`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..kernels.grid import expand_mask
from ..kernels.score import random_keys
from ..kernels.select import select_blocks
from .saliency import NORMS, norms

if TYPE_CHECKING:
    from .site import Site


def ranks_of(scores: Tensor, second: Tensor) -> Tensor:
    """Scores float32 [NB, KB], of any sign, as distinct keys int32 that `select_blocks` takes: 0 for the lowest, NaN highest.

    Ties go by `second`, float32 [NB, KB], and then to the lowest flat index.
    """
    order = _ordered(second).sort(descending=True, stable=True).indices
    order = order[_ordered(scores)[order].sort(descending=True, stable=True).indices]
    places = torch.arange(order.numel() - 1, -1, -1, dtype=torch.int32, device=order.device)
    return torch.empty_like(places).scatter(0, order, places).reshape(scores.shape)


def _ordered(scores: Tensor) -> Tensor:
    """Integers [blocks] in the order of the floats, exactly: a float's bits sort like its magnitude."""
    bits = scores.float().flatten().view(torch.int32).long()
    signed = torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)
    return torch.where(torch.isnan(scores.flatten()), 1 << 31, signed)


def held_mask(site: Site) -> Tensor | None:
    """The cached mask that is in force, also inside fxmask.dense."""
    return site._fxmask_mask if site._fxmask_saved is None else site._fxmask_saved[0]


def ranked(site: Site, weight: Tensor, grow: bool = False, anew: bool = False) -> Tensor:
    """The mask of a configuration that ranks by more than the weight's norm now: bool (NB, KB).

    Scores that nothing was added to yet, and blocks whose scores tie, rank by the weight's norm. `grow`: with the exchange of `regrow`. `anew`: the weight is
    another one, and the mask that is held means nothing for it.
    """
    c, old = site._fxmask_config, None if anew else held_mask(site)
    if c.criterion == "random":
        keys = random_keys(torch.Size(site._fxmask_grid), weight.device, site._fxmask_count, site._fxmask_stream)
    else:
        size = norms(weight, c.block, c.criterion if c.criterion in NORMS else "fro")
        scores = size if site._fxmask_score is None else site._fxmask_score
        if old is not None and c.hysteresis:
            scores, size = (torch.where(old, s + c.hysteresis * s.abs(), s) for s in (scores, size))
        keys = ranks_of(scores, size)
    if old is None or c.regrow is None:
        return select_blocks(keys, site._fxmask_keep, "lowest", c.cover)
    keep = c.keep_at(site._fxmask_step, old.numel())
    n = c.regrow.exchanged(site._fxmask_step - c.start, keep) if grow else 0
    growth = _growth(site) if n else None
    if growth is None:  # under regrowth nothing else moves a mask but its number of blocks
        return select_blocks(torch.where(old, (1 << 31) + keys.long(), keys.long()), site._fxmask_keep, "lowest", c.cover)
    site._fxmask_exchanges = True
    return regrown(keys, old, site._fxmask_keep, n, growth, c.cover)


def _growth(site: Site) -> Tensor | None:
    """Keys int32 [NB, KB] by which blocks come back; None while there was no dense gradient since the last exchange."""
    c = site._fxmask_config
    assert c.regrow is not None
    if c.regrow.by == "gradient":
        growth, site._fxmask_growth = site._fxmask_growth, None
        return None if growth is None else ranks_of(growth, growth)
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
def start_at_zero(site: Site, weight: Tensor, mask: Tensor, old: Tensor) -> None:
    """Zero the weights of blocks that an exchange has brought back, in place, where there was one."""
    if site._fxmask_exchanges:
        weight.masked_fill_(expand_mask(mask & ~old, weight.shape, site._fxmask_config.block), 0)


@torch.no_grad()
def keep_norm(weight: Tensor, mask: Tensor, old: Tensor, block: tuple[int, int]) -> None:
    """`gain`: where the number of kept blocks changes, multiply kept weights by sqrt(|W∘old|^2 / |W∘mask|^2), in place.

    So the layer keeps its Frobenius norm and, of random weights, its outputs their variance: 1/sqrt(density) at a random init (Evci et al. 2022,
    arXiv:2010.03533, sec. 3, for single weights). Where blocks come back it is a division, so that a ratio that goes up and down adds nothing up.
    """
    square = weight.detach().double().square()
    before, after = (torch.where(expand_mask(m, weight.shape, block), square, 0).sum() for m in (old, mask))
    moves = (mask.sum() != old.sum()) & (before > 0) & (after > 0) & torch.isfinite(before) & torch.isfinite(after)
    factor = torch.where(moves, (before / after).sqrt(), 1.0)
    scaled = (weight.double() * factor).to(weight.dtype)
    weight.copy_(torch.where(expand_mask(mask, weight.shape, block), scaled, weight))
