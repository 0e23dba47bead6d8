"""Block-structured dropout fused with the matmul, in plain PyTorch (SparseDrop, Lo 2024): the mask, and the oracle of the ops.

X (..., K) with M tokens is cut into blocks (tokens, features), ragged at the edges; each is kept with probability 1 - p, independently. With m the mask and
s = 1 / (1 - p):

    y = s (X∘m) W^T + b        dX = s (dY W)∘m        dW = s dY^T (X∘m)        db = sum dY

A block mixes samples, because M counts the tokens of the whole batch.
"""

from __future__ import annotations

from numbers import Real

import torch
import torch.nn.functional as F
from torch import Tensor

from .errors import ConfigError
from .grid import expand_mask, grid_shape
from .reference import product, rows
from .score import mix

BITS = 30  # of a block's random number


def check_probability(p: object) -> float:
    """p as a float; ConfigError unless it is a number in [0, 1)."""
    if isinstance(p, Real) and not isinstance(p, bool) and 0 <= float(p) < 1:  # numpy's scalars are Real, too
        return float(p)
    raise ConfigError(f"p, the probability that a block is dropped: expected a number in [0, 1), got {p!r}.")


def draw(tokens: int, features: int, block: tuple[int, int], p: float, seed: Tensor) -> Tensor:
    """The mask bool (ceil(M / bm), ceil(K / bk)), True = kept: a hash of (seed, flat index), the same bits on every device.

    seed: 0-d int64 on the device where the mask is wanted. No host sync. Cost: a few passes over the blocks.
    """
    mb, kb = grid_shape((tokens, features), block)
    low = 0xFFFFFFFF
    h = mix(mix(seed & low) ^ (seed >> 32 & low))
    index = torch.arange(mb * kb, device=seed.device)
    number = mix(mix(index & low) ^ h) >> (32 - BITS)
    return (number >= int(p * 2**BITS)).view(mb, kb)


def drop(x: Tensor, keep: Tensor, block: tuple[int, int], p: float) -> Tensor:
    """s X∘m, (..., K); a dropped element is zero whatever it was."""
    flat = rows(x)
    return torch.where(expand_mask(keep, flat.shape, block), flat * (1 / (1 - p)), 0).view(x.shape)


def linear(x: Tensor, w: Tensor, bias: Tensor | None, keep: Tensor, block: tuple[int, int], p: float, lists: Tensor | None = None) -> Tensor:
    """y, (..., N). `lists`, here and below, serve kernels that skip blocks."""
    return F.linear(drop(x, keep, block, p), w, bias)


def dx(gy: Tensor, w: Tensor, keep: Tensor, block: tuple[int, int], p: float, lists: Tensor | None = None) -> Tensor:
    """dX, (..., K)."""
    return drop(product(gy, w.t()), keep, block, p)


def dw(gy: Tensor, x: Tensor, keep: Tensor, block: tuple[int, int], p: float, lists: Tensor | None = None) -> Tensor:
    """dW, (N, K)."""
    return rows(gy).t() @ rows(drop(x, keep, block, p))
