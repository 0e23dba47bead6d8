"""How a budget of blocks is shared out among layers: arithmetic on the host, in integers and fractions, so that every machine gets the same blocks.

A layer keeps between one block and all of them. What k blocks cost is `Item.spent(k)`; no allocation costs more than its budget. Two ways to spend it:
`proportional` gives every layer a share that a formula names, `ranked` takes the blocks with the highest scores of all layers.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from fractions import Fraction
from math import floor, prod
from typing import NamedTuple

import torch
from torch import Tensor

from ...kernels.errors import ConfigError
from ...kernels.grid import RATIO_UNIT, as_matrix, grid_shape
from ...kernels.score import block_keys, sum_of_keys


class Item(NamedTuple):
    """A layer that takes part: its blocks, what one of them costs, and what all cost together."""

    blocks: int
    each: int
    whole: int  # less than blocks * each where blocks at the edges are ragged and count as what they hold

    def spent(self, kept: int) -> int:
        """The cost of any `kept` blocks, at most."""
        return min(kept * self.each, self.whole)


def check_budget(items: Sequence[Item], budget: int, ratio: float, unit: str) -> None:
    """Raise ConfigError where not even one block a layer can be paid for."""
    need, whole = sum(i.spent(1) for i in items), sum(i.whole for i in items)
    if need > budget:
        most = floor(10**4 * (1 - Fraction(need, whole))) / 10**4
        what = f"ratio={ratio} leaves {budget:,} of {whole:,} {unit}, and one block in each of {len(items)} layers is {need:,}"
        raise ConfigError(f"a budget that cannot be met: {what}; expected a ratio of at most {most:g}, smaller blocks, or fewer layers (exclude=).")


def erk_densities(shapes: Sequence[tuple[int, ...]]) -> list[Fraction]:
    """Density of each weight up to a common factor: the sum of its axes over their product, Erdős-Rényi for linears (out, in), Erdős-Rényi-Kernel for
    convolutions (out, in, kh, kw) (Evci et al. 2020, arXiv:1911.11134, sec. 3)."""
    return [Fraction(sum(shape), prod(shape)) for shape in shapes]


def proportional(items: Sequence[Item], densities: Sequence[Fraction], budget: int) -> list[int]:
    """Kept blocks of each layer: shares eps * density, cut to one block below and to all blocks above, where eps spends the budget.

    What a cut layer leaves goes to the others, as in the authors' code. Shares are rounded down, and what is left of the budget goes to the largest
    remainders, then to the lowest index. With blocks of one cost all of the budget is spent.
    """
    rates = [d * i.blocks for d, i in zip(densities, items, strict=True)]  # blocks for each unit of eps

    def share(eps: Fraction) -> list[Fraction]:
        return [min(max(eps * r, Fraction(1)), Fraction(i.blocks)) for r, i in zip(rates, items, strict=True)]

    def cost(eps: Fraction) -> Fraction:
        return sum((s * i.each for s, i in zip(share(eps), items, strict=True)), Fraction(0))

    corners = sorted({c for r, i in zip(rates, items, strict=True) for c in (1 / r, i.blocks / r)})
    last = bisect_right(corners, Fraction(budget), key=cost) - 1  # between two corners the cost is a straight line
    eps = corners[max(last, 0)]
    if 0 <= last < len(corners) - 1:
        low, high = cost(eps), cost(corners[last + 1])
        eps += (corners[last + 1] - eps) * (budget - low) / (high - low)
    ideal = share(eps)
    kept = [floor(s) for s in ideal]
    left = budget - sum(i.spent(k) for i, k in zip(items, kept, strict=True))
    order = sorted(range(len(items)), key=lambda j: (kept[j] - ideal[j], j))
    while True:
        fits = [j for j in order if kept[j] < items[j].blocks and items[j].each <= left]
        if not fits:
            return kept
        for j in fits:
            if items[j].each <= left:
                kept[j] += 1
                left -= items[j].each


def mean_squares(w: Tensor, block: tuple[int, int]) -> Tensor:
    """Mean square of each block's elements, float64 [NB * KB] on the CPU, from the keys of `fro`: the same bits everywhere. Infinite for a broken block."""
    w = as_matrix(w)
    (nb, kb), (bh, bw) = grid_shape(w.shape, block), block
    rows = torch.tensor([min(bh, w.shape[0] - i * bh) for i in range(nb)], dtype=torch.float64, device="cpu")
    cols = torch.tensor([min(bw, w.shape[1] - j * bw) for j in range(kb)], dtype=torch.float64, device="cpu")
    return (sum_of_keys(block_keys(w, block, "fro")).cpu() / (rows[:, None] * cols)).flatten()


def ranked(items: Sequence[Item], scores: Sequence[Tensor], budget: int) -> list[int]:
    """Kept blocks of each layer: its best block, then the best of all layers for as long as the budget lasts, ties to the lower layer.

    One threshold cuts all layers; where the next block costs more than is left, cheaper ones further down may follow. With blocks of one cost all of the
    budget is spent. scores: [blocks] of each layer, what a unit of cost gains.
    """
    falling = [s.sort(descending=True).values[1:] for s in scores]  # the best of each is taken
    owner = torch.cat([torch.full((len(f),), j, device="cpu") for j, f in enumerate(falling)])
    prices = torch.cat([_prices(i) for i in items])
    order = torch.cat(falling).sort(descending=True, stable=True).indices
    left = budget - sum(i.spent(1) for i in items)
    paid = prices[order].cumsum(0)
    taken = int(torch.searchsorted(paid, left, right=True))
    counts = torch.bincount(owner[order[:taken]], minlength=len(items))
    kept = [1 + int(c) for c in counts]
    left -= int(paid[taken - 1]) if taken else 0
    while True:  # the next block of some layer may still fit
        fits = [j for j, i in enumerate(items) if kept[j] < i.blocks and i.spent(kept[j] + 1) - i.spent(kept[j]) <= left]
        if not fits:
            return kept
        best = max(fits, key=lambda j: (float(falling[j][kept[j] - 1]), -j))
        left -= items[best].spent(kept[best] + 1) - items[best].spent(kept[best])
        kept[best] += 1


def _prices(item: Item) -> Tensor:
    """What the second, third, ... block of a layer adds to the cost: int64 [blocks - 1]."""
    spent = (torch.arange(1, item.blocks + 1, device="cpu") * item.each).clamp(max=item.whole)
    return spent.diff()


def budget_of(total: int, ratio_in_units: int, up: bool) -> int:
    """total * (1 - ratio), rounded up as the kept blocks of one layer are, or down."""
    kept = total * (RATIO_UNIT - ratio_in_units)
    return -(-kept // RATIO_UNIT) if up else kept // RATIO_UNIT
