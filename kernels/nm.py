"""N:M masks in plain PyTorch: n kept of every m consecutive elements of a row.

Shapes: w (rows, K) with K a multiple of m, seen as G = rows * K / m groups; table (P, m) bool, one row a pattern; logits (G, P); masks bool, True = kept.
"""

from __future__ import annotations

from itertools import combinations, product

import torch
from torch import Tensor

from .bits import bits_as

PAIRED = (2, 4, 8)  # m of the kernel, which compares every two of a group in registers
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def patterns(n: int, m: int) -> Tensor:
    """Every way to keep n of m, (C(m, n), m) bool; the first keeps the lowest indices. The published code trains this matrix; here it is fixed."""
    table = torch.zeros(0, m, dtype=torch.bool, device="cpu")
    rows = [[i in kept for i in range(m)] for kept in combinations(range(m), n)]
    return torch.cat([table, torch.tensor(rows, dtype=torch.bool, device="cpu")])


def transposable_patterns() -> Tensor:
    """The 90 tiles of 4x4 that keep 2 of 4 in every row and every column, (90, 16) bool, row-major."""
    tiles = product(patterns(2, 4).tolist(), repeat=4)
    kept = [tile for tile in tiles if all(sum(column) == 2 for column in zip(*tile, strict=True))]
    return torch.tensor(kept, dtype=torch.bool, device="cpu").reshape(-1, 16)


def magnitude_mask(w: Tensor, n: int, m: int) -> Tensor:
    """(rows, K) bool: the n largest |w| of every group of m, exactly n; ties to the lowest index. NaN counts as larger than Inf, so that it is kept.

    Bit patterns are compared, which order as magnitudes do and leave no NaN to be compared. Cost: m passes over w.
    """
    key = bits_as(w.detach().abs().reshape(-1, m).contiguous(), _BITS[w.element_size()])
    place = torch.arange(m, device=w.device)
    better = torch.zeros_like(key, dtype=torch.int16)
    for j in range(m):
        other = key[:, j : j + 1]
        better = better + ((other > key) | ((other == key) & (place > j)))
    return (better < n).reshape(w.shape)


def transposable_mask(w: Tensor, table: Tensor) -> Tensor:
    """(rows, K) bool: of every 4x4 tile the one of the 90 patterns that keeps the largest sum of |w|; ties to the lowest pattern (Hubara et al. 2021).

    Exact, in float64. `table`: `transposable_patterns()` on the device of w; rows and K are multiples of 4.
    """
    rows, columns = w.shape
    tiles = w.detach().reshape(rows // 4, 4, columns // 4, 4).transpose(1, 2)
    most = 1e300 if w.dtype == torch.float64 else 1e60  # NaN and Inf weigh more than any finite tile, and sums of them stay finite
    size = tiles.reshape(-1, 16).abs().double().nan_to_num(most, most)
    kept = table[(size @ table.double().t()).argmax(1)]
    return kept.reshape(rows // 4, columns // 4, 4, 4).transpose(1, 2).reshape(rows, columns)


def retained(w: Tensor, mask: Tensor) -> float:
    """Sum of |w| that a mask keeps, in float64; what is not finite counts as 0."""
    return float(torch.where(mask, w.detach(), 0).double().abs().nan_to_num(0, 0).sum())


def argmax_mask(logits: Tensor, table: Tensor) -> Tensor:
    """(G, m) bool: the pattern of the largest logit in every group; ties to the lowest pattern."""
    return table[logits.detach().argmax(1)]


def gumbel(like: Tensor) -> Tensor:
    """Gumbel(0, 1) noise of a shape, at least float32, from PyTorch's generator of the device; always finite."""
    e = torch.empty_like(like, dtype=torch.promote_types(like.dtype, torch.float32)).exponential_()
    return -e.clamp_min(torch.finfo(e.dtype).tiny).log()


def sample(logits: Tensor, table: Tensor, tau: float | Tensor) -> tuple[Tensor, Tensor]:
    """A draw of masks: soft (G, m) = softmax((g + logits) / tau) D with gradient to the logits, and hard (G, m) bool, the pattern that is the most likely of
    that softmax (Danhofer 2024).
    """
    with torch.autocast(logits.device.type, enabled=False):  # a product in 16 bits would round the masks
        noisy = logits.to(torch.promote_types(logits.dtype, torch.float32)) + gumbel(logits.detach())
        return torch.softmax(noisy / tau, 1) @ table.to(noisy.dtype), argmax_mask(noisy, table)


def magnitude_logits(w: Tensor, table: Tensor) -> Tensor:
    """(G, P): the sum of |w| that each pattern keeps, over the mean |w| of the layer: sure where weights are large, even where they are small."""
    size = w.detach().double().abs().nan_to_num(0, 0)
    return size.reshape(-1, table.shape[1]) @ table.double().t() / size.mean().clamp_min(1e-30)
