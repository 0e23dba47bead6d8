"""The block grid: how a weight is cut into blocks, and exactly how many of them are kept.

Everything here is integer arithmetic on shapes, or views of tensors; no score, no mask is computed.
"""

from __future__ import annotations

import operator
from math import prod
from numbers import Real
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .errors import ConfigError, ShapeError

RATIO_UNIT = 10**9  # ratios are read as the nearest multiple of 1 / RATIO_UNIT, so that 0.1 + 0.2 means 0.3


def plain_int(value: Any) -> int | None:
    """`value` as a plain int, where `__index__` says that it is one, as NumPy's are; None for bools and all else."""
    if isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool"):  # NumPy's, too, which NumPy 2.2 takes for an index
        return None
    try:
        return operator.index(value)
    except (TypeError, RuntimeError):  # RuntimeError: of a tensor without values
        return None


def check_block(block: object, axes: str = "(out_features, in_features)") -> tuple[int, int]:
    """Return `block` as (rows, cols), which `axes` names in the message; raise ConfigError unless it is two positive ints below 2^31."""
    hint = f"; a square is ({block}, {block})." if type(block) is int and block > 0 else "."
    if isinstance(block, (tuple, list)) and len(block) == 2:
        rows, cols = (plain_int(b) or 0 for b in block)
        if 0 < rows < 2**31 and 0 < cols < 2**31:
            return rows, cols
        if rows > 0 and cols > 0:
            hint = "; a side is below 2^31."
    raise ConfigError(f"block must be two positive ints {axes}: expected e.g. (16, 16), got {block!r}{hint}")


def ratio_units(ratio: object) -> int:
    """Return `ratio` as an integer number of 1e-9; raise ConfigError unless it is a finite number in [0, 1).

    Cost: none. A ratio that rounds to 1 keeps nothing and is refused as well.
    """
    percent = isinstance(ratio, Real) and 2 <= ratio < 100  # type: ignore[operator]
    hint = f"; {float(ratio):g} % is {float(ratio) / 100:g}." if percent else "."  # type: ignore[arg-type]
    if isinstance(ratio, Real) and not isinstance(ratio, bool) and 0 <= ratio < 1:  # type: ignore[operator]  # numpy's scalars are Real, too
        units = round(float(ratio) * RATIO_UNIT)
        if units < RATIO_UNIT:
            return units
        hint = ", which nine decimals round to 1."
    raise ConfigError(f"ratio is the fraction of blocks that are masked (sparsity): expected a finite number in [0, 1), got {ratio!r}{hint}")


def grid_shape(shape: tuple[int, ...] | torch.Size, block: tuple[int, int]) -> tuple[int, int]:
    """Block rows and block columns of a weight `shape` (N, K) cut into `block`; the last row and column may be ragged."""
    if len(shape) != 2:
        raise ShapeError(f"a masked weight has two axes (out_features, in_features): got shape {tuple(shape)}.")
    if block[0] < 1 or block[1] < 1:
        check_block(block)
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])


def matrix_shape(shape: tuple[int, ...] | torch.Size) -> tuple[int, int]:
    """(N, K) as which a weight of `shape` is cut into blocks: a convolution's (c_out, c_in, kh, kw) is a matrix (c_out, c_in * kh * kw)."""
    if len(shape) < 2:
        raise ShapeError(f"a masked weight has at least two axes (out_features, in_features): got shape {tuple(shape)}.")
    return shape[0], prod(shape[1:])


def as_matrix(w: Tensor) -> Tensor:
    """A weight as `matrix_shape` says: a view where its memory allows, which that of a channels_last convolution does not; then a copy."""
    return w if w.dim() == 2 else w.reshape(matrix_shape(w.shape))


def keep_count(n_blocks: int, ratio: float) -> int:
    """Number of kept blocks (nnzb): `max(1, ceil(n_blocks * (1 - ratio)))`, exact in integers.

    Floats give one block too many for 27 of the 99 two-decimal ratios at some `n_blocks`; see `ratio_units`.
    """
    return max(1, -(-n_blocks * (RATIO_UNIT - ratio_units(ratio)) // RATIO_UNIT))


def ratio_keeping(kept: int, n_blocks: int) -> float:
    """The ratio that keeps exactly `kept` of `n_blocks` blocks, 1 <= kept <= n_blocks < 1e9: `keep_count(n_blocks, ratio) == kept`."""
    return -(-(n_blocks - kept) * RATIO_UNIT // n_blocks) / RATIO_UNIT


def clipped(block: tuple[int, int], shape: tuple[int, ...] | torch.Size) -> tuple[int, int]:
    """A block of at most the weight's size: the same grid, without padding up to the block."""
    return min(block[0], max(1, shape[0])), min(block[1], max(1, shape[1]))


def to_blocks(w: Tensor, block: tuple[int, int]) -> Tensor:
    """View or copy of `w`, as a matrix (N, K), as (NB, KB, bh * bw), ragged edges padded with zeros. Same dtype and device; differentiable.

    A block that is larger than the weight is cut to it first.
    """
    w = as_matrix(w)
    (nb, kb), (bh, bw) = grid_shape(w.shape, block), clipped(block, w.shape)
    pad_rows, pad_cols = nb * bh - w.shape[0], kb * bw - w.shape[1]
    if pad_rows or pad_cols:
        w = F.pad(w, (0, pad_cols, 0, pad_rows))
    return w.reshape(nb, bh, kb, bw).transpose(1, 2).reshape(nb, kb, bh * bw)


def expand_mask(mask: Tensor, shape: tuple[int, ...] | torch.Size, block: tuple[int, int]) -> Tensor:
    """Block mask [NB, KB] bool -> element mask of `shape`, (N, K) or what is seen as that matrix, bool. No host sync, no gradient."""
    n, k = matrix_shape(shape)
    (nb, kb), (bh, bw) = mask.shape, clipped(block, (n, k))
    full = mask[:, None, :, None].expand(nb, bh, kb, bw).reshape(nb * bh, kb * bw)[:n, :k]
    return full if len(shape) == 2 else full.reshape(shape)


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
