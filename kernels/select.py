"""Selection: keep exactly k blocks with the highest keys, ties to the lowest flat index; where it is asked for, every block row and column gets one."""

from __future__ import annotations

import torch
from torch import Tensor

from .errors import ConfigError

TIES = ("lowest", "keep")
NO_COVER = "impl='triton' has no kernel for cover=True: expected impl='auto' or impl='reference' with it."


def select_blocks(keys: Tensor, keep: Tensor, ties: str = "lowest", cover: bool = False) -> Tensor:
    """Mask of the `keep` best blocks.

    Args:
        keys: int32 (NB, KB), see `kernels.score`.
        keep: 0-d int64 tensor on the same device, 1 <= keep <= NB * KB; a device scalar, so that a schedule moves it without a recompile or a sync.
        ties: `lowest` keeps exactly `keep`; `keep` also keeps every block that ties with the last one, as the thesis' `norms >= threshold` does.
        cover: first the blocks of `covering`, then the best of the rest; no block row and no block column is empty where keep >= max(NB, KB).

    Returns: bool (NB, KB), True = kept. Fixed shapes, no host sync. A stable sort, because `topk` leaves the order of ties open on CUDA.
    Raises: ConfigError for `cover` with ties other than `lowest`.
    """
    flat = keys.flatten()
    if cover and ties != "lowest":
        raise ConfigError(f"cover=True keeps exactly k blocks: expected ties='lowest', got {ties!r}.")
    if cover and flat.numel():
        flat = flat.long() + (covering(keys, keep).flatten().long() << 32)  # above any key
    ordered, order = torch.sort(flat, descending=True, stable=True)
    if ties == "keep" and flat.numel():
        return keys >= ordered.gather(0, (keep - 1).reshape(1))
    best = torch.arange(flat.numel(), device=keys.device) < keep
    return torch.zeros_like(best).scatter(0, order, best).reshape(keys.shape)


def select_ranked(scores: Tensor, keys: Tensor, keep: Tensor) -> Tensor:
    """Mask of the `keep` best blocks by their scores; ties by `keys`, then to the lowest flat index.

    scores: float32 (NB, KB), of any sign, NaN highest and 0.0 as -0.0; keys: int32 (NB, KB), none negative; keep as of `select_blocks`.
    Returns: bool (NB, KB), True = kept. Fixed shapes, no host sync. Cost: one sort of int64.
    """
    return select_blocks(ordered(scores).long() * (1 << 32) + keys, keep)


def ordered(scores: Tensor) -> Tensor:
    """int32 in the order of floats, exactly; NaN of either sign highest, both zeros equal."""
    bits = (scores.float() + 0.0).view(torch.int32)  # -0.0 + 0.0 is 0.0
    return torch.where(torch.isnan(scores), 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))  # a negative float's bits sort the wrong way round


def covering(keys: Tensor, keep: Tensor) -> Tensor:
    """Blocks without which a block row or a block column of the weight would be empty, and with it units dead: bool (NB, KB), not empty.

    The best block of every row, then the best block of every column that these leave empty; ties to the lowest flat index. These are up to NB + KB - 1.
    Where that is more than `keep`, rows move, as many as it takes: a row whose block's column has a better one moves to a column that would be empty, and
    that column needs no other block. The rows that lose least move first, to the columns that lose least. So max(NB, KB) blocks are always enough; a smaller
    `keep` gets the best of those, and leaves rows or columns empty.

    Args and cost: as of `select_blocks`, with two small sorts. Why units must not be cut off: Vysogorets and Kempe 2023 (JMLR 24:99, effective sparsity); the
    rule is ours.
    """
    nb, kb = keys.shape
    index = torch.arange(nb * kb, device=keys.device).reshape(nb, kb)
    unique = keys.long() * (nb * kb) + (nb * kb - 1 - index)  # no two are equal, so that a maximum is one block
    top = unique.amax(1)
    of_row = unique == top[:, None]
    filled = of_row.any(0)
    of_column = (unique == unique.amax(0)) & ~filled
    holder = torch.where(of_row, unique, -1).amax(0)  # of each column, the best among the rows' blocks
    column = of_row.int().argmax(1)
    most = torch.iinfo(torch.int64).max
    rows = torch.where(top < holder[column], top, most).sort(stable=True).indices[: min(nb, kb)]
    columns = torch.where(filled, most, unique.amax(0)).sort(stable=True).indices[: min(nb, kb)]
    can = torch.minimum((top < holder[column]).sum(), (~filled).sum())
    need = of_row.sum() + of_column.sum() - keep
    move = torch.arange(min(nb, kb), device=keys.device) < torch.minimum(need, can)
    leaves, gets = torch.zeros_like(top, dtype=torch.bool).scatter(0, rows, move), torch.zeros_like(filled).scatter(0, columns, move)
    moved = torch.zeros(nb * kb, dtype=torch.bool, device=keys.device).scatter(0, rows * kb + columns, move).reshape(nb, kb)
    return (of_row & ~leaves[:, None]) | (of_column & ~gets) | moved
