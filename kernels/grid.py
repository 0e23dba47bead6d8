"""The block grid: how a weight is cut into blocks, and exactly how many of them are kept.

Everything here is integer arithmetic on shapes, or views of tensors; no score, no mask is computed.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from .errors import ConfigError, ShapeError

RATIO_UNIT = 10**9  # ratios are read as the nearest multiple of 1 / RATIO_UNIT, so that 0.1 + 0.2 means 0.3


def check_block(block: object) -> tuple[int, int]:
    """Return `block` as (rows, cols) = (out_features, in_features); raise ConfigError unless it is two positive ints."""
    ok = isinstance(block, (tuple, list)) and len(block) == 2 and all(type(b) is int and b > 0 for b in block)
    if not ok:
        raise ConfigError(f"block must be two positive ints (out_features, in_features): expected e.g. (16, 16), got {block!r}.")
    return block[0], block[1]  # type: ignore[index]


def ratio_units(ratio: object) -> int:
    """Return `ratio` as an integer number of 1e-9; raise ConfigError unless it is a finite number in [0, 1).

    Cost: none. A ratio that rounds to 1 keeps nothing and is refused as well.
    """
    number = isinstance(ratio, (int, float)) and not isinstance(ratio, bool)
    if not number or not math.isfinite(ratio) or not 0 <= ratio < 1 or round(ratio * RATIO_UNIT) >= RATIO_UNIT:  # type: ignore[operator,arg-type]
        raise ConfigError(f"ratio is the fraction of blocks that are masked (sparsity): expected a finite number in [0, 1), got {ratio!r}.")
    return round(ratio * RATIO_UNIT)  # type: ignore[operator]


def grid_shape(shape: tuple[int, ...] | torch.Size, block: tuple[int, int]) -> tuple[int, int]:
    """Block rows and block columns of a weight `shape` (N, K) cut into `block`; the last row and column may be ragged."""
    if len(shape) != 2:
        raise ShapeError(f"a masked weight has two axes (out_features, in_features): got shape {tuple(shape)}.")
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])


def keep_count(n_blocks: int, ratio: float) -> int:
    """Number of kept blocks (nnzb): `max(1, ceil(n_blocks * (1 - ratio)))`, exact in integers.

    Floats give one block too many for 27 of the 99 two-decimal ratios at some `n_blocks`; see `ratio_units`.
    """
    return max(1, -(-n_blocks * (RATIO_UNIT - ratio_units(ratio)) // RATIO_UNIT))


def to_blocks(w: Tensor, block: tuple[int, int]) -> Tensor:
    """View or copy of `w` (N, K) as (NB, KB, bh * bw), ragged edges padded with zeros. Same dtype and device; differentiable."""
    (nb, kb), (bh, bw) = grid_shape(w.shape, block), block
    pad_rows, pad_cols = nb * bh - w.shape[0], kb * bw - w.shape[1]
    if pad_rows or pad_cols:
        w = F.pad(w, (0, pad_cols, 0, pad_rows))
    return w.reshape(nb, bh, kb, bw).transpose(1, 2).reshape(nb, kb, bh * bw)


def expand_mask(mask: Tensor, shape: tuple[int, ...] | torch.Size, block: tuple[int, int]) -> Tensor:
    """Block mask [NB, KB] bool -> element mask of `shape` (N, K) bool. No host sync, no gradient."""
    (nb, kb), (bh, bw) = mask.shape, block
    full = mask[:, None, :, None].expand(nb, bh, kb, bw).reshape(nb * bh, kb * bw)
    return full[: shape[0], : shape[1]]


def kept_elements(mask: Tensor, shape: tuple[int, ...] | torch.Size, block: tuple[int, int]) -> Tensor:
    """Number of weight elements inside kept blocks, a 0-d int64 tensor; ragged edge blocks count what they really hold."""
    (nb, kb), (bh, bw) = grid_shape(shape, block), block
    rows = torch.full((nb,), bh, dtype=torch.int64, device=mask.device)
    cols = torch.full((kb,), bw, dtype=torch.int64, device=mask.device)
    if nb:
        rows[-1] = shape[0] - (nb - 1) * bh
    if kb:
        cols[-1] = shape[1] - (kb - 1) * bw
    return (mask * rows[:, None] * cols[None, :]).sum()
