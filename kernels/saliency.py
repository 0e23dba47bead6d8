"""Scores of blocks off a step's gradient, and the averages that they go into: plain forms of what the kernels do in one pass over weight and gradient."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .grid import as_matrix, clipped, grid_shape

BY_GRADIENT = ("gradient", "taylor", "movement")


def block_sums(t: Tensor, block: tuple[int, int]) -> Tensor:
    """Sum over each block of a matrix (N, K): [NB, KB], of its dtype. First over rows, which lie one behind the other, so that nothing is rearranged."""
    t = as_matrix(t)
    (nb, kb), (bh, bw), (n, k) = grid_shape(t.shape, block), clipped(block, t.shape), t.shape
    whole = n // bh * bh
    rows = t[:whole].reshape(n // bh, bh, k).sum(1)
    if whole < n:
        rows = torch.cat([rows, t[whole:].sum(0, keepdim=True)])
    if kb * bw > k:
        rows = F.pad(rows, (0, kb * bw - k))
    return rows.reshape(nb, kb, bw).sum(2)


def saliency(w: Tensor, grad: Tensor, block: tuple[int, int], criterion: str) -> Tensor:
    """One step's `gradient`, `taylor` or `movement` of each block, float32 [NB, KB]; see `passes.state.saliency` for what they are. w, grad: (N, K)."""
    g = grad.detach().float()
    if criterion == "gradient":
        return block_sums(g.square(), block).sqrt()
    products = block_sums(g * w.detach().float(), block)
    return products.abs() if criterion == "taylor" else -products


def take_in(score: Tensor, new: Tensor, average: float, adds: bool, holds: bool, skipped: Tensor | None = None) -> None:
    """Put what a step shows into scores that last, both float32 [NB, KB], in place. No host sync.

    average: a, by which s becomes a s + (1 - a) new; 0: new. A score that is not finite, and scores that are all 0 still, become `new`.
    adds: s becomes a s + new instead, s + new where a is 0.
    holds: where an element of `new` is not finite, or `skipped`, one number on any device, is not 0, all scores stay as they were.
    """
    if adds:
        blended = (average or 1.0) * score + new
    elif average:
        goes_on = torch.isfinite(score) & (score != 0).any()
        blended = torch.where(goes_on, average * score + (1 - average) * new, new)
    else:
        blended = new
    score.copy_(torch.where(taken(new, skipped), blended, score) if holds else blended)


def taken(new: Tensor, skipped: Tensor | None = None) -> Tensor:
    """Whether what a gradient shows is finite, and of a step that is taken: 0-d bool."""
    finite = torch.isfinite(new).all()
    return finite if skipped is None else finite & (skipped.to(new.device) == 0).all()
