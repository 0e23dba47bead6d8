"""The mask from scores: moving averages and gradients for norms of the weight, hysteresis, regrowth, and what a change of the mask does to the weights.

Runs between steps. The weight is read by `kernels.scoring`; what follows is on [NB, KB] tensors, in plain PyTorch on any device. The selection itself is
`kernels.select`. Masks of the best scores alone do not come here where kernels build them in groups (`in_groups`, `passes.state.rebuild`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...kernels import scoring
from ...kernels.errors import StateError, message
from ...kernels.grid import as_matrix, expand_mask
from ...kernels.score import NORMS, norms_of, random_keys
from ...kernels.select import ordered, select_blocks, select_ranked
from ..settings.config import WeightMask
from .saliency import GIVEN
from .site import Site


def ranks_of(scores: Tensor, *ties: Tensor) -> Tensor:
    """Scores float32 [NB, KB], of any sign, or integers, as distinct keys int32 that `select_blocks` takes: 0 for the lowest, NaN highest.

    Ties go by `ties`, each [NB, KB], one after the other, and then to the lowest flat index.
    """
    order = torch.arange(scores.numel(), device=scores.device)
    for key in reversed((scores, *ties)):
        values = ordered(key) if key.is_floating_point() else key
        order = order[values.flatten()[order].sort(descending=True, stable=True).indices]
    places = torch.arange(order.numel() - 1, -1, -1, dtype=torch.int32, device=order.device)
    return torch.empty_like(places).scatter(0, order, places).reshape(scores.shape)


def held_mask(site: Site) -> Tensor | None:
    """The cached mask that is in force, also inside fxmask.dense."""
    return site._fxmask_mask if site._fxmask_saved is None else site._fxmask_saved[0]


def size_of(c: WeightMask) -> str:
    """The norm by which blocks go whose scores tie."""
    return c.criterion if c.criterion in NORMS else "fro"


def in_groups(c: WeightMask) -> bool:
    """Whether a mask is that of the best scores, or norms, alone, as kernels make it for many weights at once; what else there is, is `ranked`."""
    return not (c.hysteresis or c.regrow is not None or c.criterion in (GIVEN, "random"))


def ranked(site: Site, weight: Tensor, grow: bool = False, anew: bool = False) -> Tensor:
    """The mask of a configuration that ranks by more than the weight's norm now: bool (NB, KB).

    Scores that nothing was added to yet, and blocks whose scores tie, rank by the weight's norm; where that ties, too, hysteresis holds kept ones. `grow`: with
    the exchange of `regrow`. `anew`: the weight is another one, and the mask that is held means nothing for it.
    """
    c, old = site._fxmask_config, None if anew else held_mask(site)
    site._fxmask_grown = None
    if site._fxmask_own is not None and site._fxmask_own.is_meta:  # torch.load(map_location="meta") of a model that was pickled whole
        what = "the mask or scores that fxmask.apply was given were lost on the meta device: expected them with their values."
        raise StateError(message(what, site._fxmask_name, "bring them back by fxmask.load_state_dict; or fxmask.restore(model), and apply them again."))
    if c.criterion == "random":
        keys = random_keys(torch.Size(site._fxmask_grid), weight.device, site._fxmask_count, site._fxmask_stream)
    else:
        by = size_of(c)
        keys, scores = scoring.block_keys(as_matrix(weight), c.block, by, c.impl), site._fxmask_score
        if old is not None and c.hysteresis:
            size = norms_of(keys, weight, by)
            keys = ranks_of(*(torch.where(old, s + c.hysteresis * s.abs(), s) for s in (size if scores is None else scores, size)), old)
        elif scores is not None and c.regrow is None and not c.cover:
            return select_ranked(scores, keys, site._fxmask_keep)
        elif scores is not None:
            keys = ranks_of(scores, keys)
    if old is None or c.regrow is None:
        return select_blocks(keys, site._fxmask_keep, "lowest", c.cover)
    keep = c.keep_at(site._fxmask_step, old.numel())
    n = c.regrow.exchanged(site._fxmask_step - c.start, keep) if grow else 0
    growth = _growth(site) if n else None
    if growth is None:  # under regrowth nothing else moves a mask but its number of blocks
        return select_blocks(_before(old, keys, keys), site._fxmask_keep, "lowest", c.cover)
    mask, site._fxmask_grown = regrown(keys, old, site._fxmask_keep, n, growth, c.cover)
    return mask


def _growth(site: Site) -> Tensor | None:
    """Keys int32 [NB, KB] by which blocks come back; None while there was no dense gradient since the last exchange."""
    c = site._fxmask_config
    assert c.regrow is not None
    if c.regrow.by == "gradient":
        growth, site._fxmask_growth = site._fxmask_growth, None
        return None if growth is None else ranks_of(growth)
    step = torch.full_like(site._fxmask_count, site._fxmask_step)
    return random_keys(torch.Size(site._fxmask_grid), step.device, step, site._fxmask_stream)


def regrown(keys: Tensor, old: Tensor, keep: Tensor, n: int, growth: Tensor, cover: bool) -> tuple[Tensor, Tensor]:
    """The mask, bool (NB, KB), exactly `keep` blocks, and those of it that growth has brought back.

    First what the number of blocks asks for: the old ones with the lowest keys leave, or masked ones with the highest come back. Then n of the old ones that
    are left leave, those with the lowest keys, and at least one stays; as many come in, of all others, by the highest growth.

    keys, growth: int32 (NB, KB); keep: 0-d int64. Ties to the lowest flat index. A block that has just left may come back, as in RigL.
    """
    sized = select_blocks(_before(old, keys, keys), keep, "lowest")
    left, back = sized & old, sized & ~old
    stay = left & select_blocks(torch.where(left, keys.long() + 1, 0), (left.sum() - n).clamp(min=1), "lowest")
    mask = select_blocks(_before(stay | back, keys, growth), keep, "lowest", cover)
    return mask, mask & ~old & ~back


def _before(stay: Tensor, keys: Tensor, others: Tensor) -> Tensor:
    """Keys int64 by which all blocks of a mask, by their `keys`, come before the others, by theirs."""
    return torch.where(stay, (1 << 31) + keys.long(), others.long())


@torch.no_grad()
def start_at_zero(site: Site, weight: Tensor) -> None:
    """Zero the weights of blocks that growth has just brought back, in place."""
    if site._fxmask_grown is not None:
        weight.masked_fill_(expand_mask(site._fxmask_grown, weight.shape, site._fxmask_config.block), 0)
        site._fxmask_grown = None


@torch.no_grad()
def keep_norm(site: Site, weight: Tensor, mask: Tensor, old: Tensor, block: tuple[int, int] | None = None) -> None:
    """`gain`: where the number of kept blocks changes, multiply kept weights by sqrt(|W∘old|^2 / |W∘mask|^2), in place.

    `block`: of `old`, where a phase has just brought others, which alone scale nothing: then it is the number that the ratio keeps of the old ones.

    So the layer keeps its Frobenius norm and, of random weights, its outputs their variance: 1/sqrt(density) at a random init (Evci et al. 2022,
    arXiv:2010.03533, sec. 3, for single weights). Where blocks come back it is a division, so that a ratio that goes up and down adds nothing up.
    """
    c, square = site._fxmask_config, weight.detach().double().square()
    kept = mask.sum() if block is None else c.keep_at(site._fxmask_step, old.numel())
    before, after = (torch.where(expand_mask(m, weight.shape, b), square, 0).sum() for m, b in ((old, block or c.block), (mask, c.block)))
    moves = (old.sum() != kept) & (before > 0) & (after > 0) & torch.isfinite(before) & torch.isfinite(after)
    factor = torch.where(moves, (before / after).sqrt(), 1.0)
    scaled = (weight.double() * factor).to(weight.dtype)
    weight.copy_(torch.where(expand_mask(mask, weight.shape, c.block), scaled, weight))
