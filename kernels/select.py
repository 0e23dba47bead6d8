"""Selection: keep exactly k blocks with the highest keys, ties to the lowest flat index."""

from __future__ import annotations

import torch
from torch import Tensor

TIES = ("lowest", "keep")


def select_blocks(keys: Tensor, keep: Tensor, ties: str = "lowest") -> Tensor:
    """Mask of the `keep` best blocks.

    Args:
        keys: int32 (NB, KB), see `kernels.score`.
        keep: 0-d int64 tensor on the same device, 1 <= keep <= NB * KB; a device scalar, so that a schedule moves it without a recompile or a sync.
        ties: `lowest` keeps exactly `keep`; `keep` also keeps every block that ties with the last one, as the thesis' `norms >= threshold` does.

    Returns: bool (NB, KB), True = kept. Fixed shapes, no host sync. A stable sort, because `topk` leaves the order of ties open on CUDA.
    """
    flat = keys.flatten()
    ordered, order = torch.sort(flat, descending=True, stable=True)
    if ties == "keep":
        return keys >= ordered.gather(0, (keep - 1).reshape(1))
    best = torch.arange(flat.numel(), device=keys.device) < keep
    return torch.zeros_like(best).scatter(0, order, best).reshape(keys.shape)
