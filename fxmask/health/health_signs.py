"""What a mask does to its layer, at one glance: the share of the squared norm that is kept, and features that nobody reads or writes."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..kernels.grid import as_matrix, expand_mask

SIGNS = ("kept_norm_fraction", "dead_rows", "dead_cols")
HISTORY = ("flip_rate", "age_mean", "age_max", "never_kept")


@torch.no_grad()
def signs(w: Tensor, mask: Tensor, block: tuple[int, int]) -> tuple[dict[str, float], float, float]:
    """({kept_norm_fraction: |W∘M|^2 / |W|^2, dead_rows and dead_cols: shares of output and input features without a kept block}, |W∘M|^2, |W|^2).

    w: (N, K) as a matrix; mask: bool (NB, KB). In float64, with a host sync. Of a weight that is not finite the fraction is NaN.
    """
    w = as_matrix(w)
    kept = expand_mask(mask.to(w.device), w.shape, block)
    square = w.double().square()
    held, total = float(torch.where(kept, square, 0).sum()), float(square.sum())
    rows, cols = (1 - float(kept.any(axis).double().mean()) for axis in (1, 0))
    share = (held / total if total else 0.0) if math.isfinite(total) else math.nan
    return {"kept_norm_fraction": share, "dead_rows": rows, "dead_cols": cols}, held, total
