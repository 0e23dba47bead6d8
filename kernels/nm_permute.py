"""A permutation of a weight's columns under which its n:m mask by magnitude keeps more: greedy swaps between groups (after Pool and Yu 2021).

With the rest of a group sorted, |w| of a new column d adds max(t, d) to its largest n - 1, t the n-th of the rest; so one table of
sum over rows of max(t_i, |w_j|) holds the gain of every swap (i, j) at once, exactly.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .nm import magnitude_mask, retained

COLUMNS = 512  # searched together; wider weights are searched in parts, whose groups change from pass to pass
LEAST = 1e-6  # of a group's kept magnitude: gains below it are rounding


def permutation(w: Tensor, n: int, m: int, passes: int) -> Tensor:
    """(K) int64: the columns of w (rows, K) in their new order; position p holds column permutation[p]. Deterministic; never keeps less than no permutation.

    Every pass takes the best swaps of two columns between two groups, no group twice; it ends where no swap gains, or after `passes`.
    Cost: passes * rows * K * min(K, 512) maxima.
    """
    columns = w.shape[1]
    size = w.detach().abs().nan_to_num(0, 0, 0).to(torch.promote_types(w.dtype, torch.float32))
    order = torch.arange(columns, device=w.device)
    parts = -(-columns // COLUMNS)
    every = torch.arange(columns // m, device=w.device)
    idle = 0
    for k in range(passes):
        moved = False
        groups = order.reshape(-1, m)
        for part in range(parts):  # by stride in one pass, in runs in the next, so that all groups meet some others
            members = every[part::parts] if k % 2 == 0 else every.tensor_split(parts)[part]
            found = groups[members]
            better = _swapped(size, found, n)
            moved = moved or better is not found
            groups[members] = better
        idle = 0 if moved else idle + 1
        if idle == min(parts, 2):
            break
    identity = torch.arange(columns, device=w.device)
    return order if retained(w, permuted_mask(w, order, n, m)) > retained(w, magnitude_mask(w, n, m)) else identity


def permuted_mask(w: Tensor, order: Tensor, n: int, m: int) -> Tensor:
    """(rows, K) bool in the order that w has: n of every m columns that stand together in `order`."""
    return put_back(magnitude_mask(w.detach()[:, order], n, m), order)


def put_back(t: Tensor, order: Tensor) -> Tensor:
    """(rows, K) whose columns stand in `order`, in the order that W has. Differentiable: t."""
    return t.index_select(1, order.argsort())


def _swapped(size: Tensor, groups: Tensor, n: int) -> Tensor:
    """groups (G, m) of column numbers after one pass of swaps; the same object where nothing gains."""
    g, m = groups.shape
    if g < 2 or not size.numel():
        return groups
    w = size[:, groups.reshape(-1)]  # (rows, G * m)
    rest = torch.stack([w.reshape(-1, g, m)[:, :, [j for j in range(m) if j != i]] for i in range(m)], 2).sort(3, descending=True).values  # (rows, G, m, m - 1)
    best, then = rest[..., : n - 1].sum(3).reshape(w.shape), rest[..., n - 1].reshape(w.shape)
    kept = (best + torch.maximum(then, w)).sum(0).reshape(g, m)[:, 0]  # of each group as it is
    at_once = max(1, 2**20 // w.numel())
    reached = torch.cat([torch.maximum(t[:, :, None], w[:, None]).sum(0) for t in then.split(at_once, 1)]) + best.sum(0)[:, None]  # (i, j): j in place of i
    gain = (reached + reached.t()).reshape(g, m, g, m).transpose(1, 2) - (kept[:, None] + kept)[:, :, None, None]  # (g, h, i, j)
    gain, swap = gain.reshape(g, g, m * m).max(2)
    first, second = (gain > LEAST * (kept[:, None] + kept)).triu(1).nonzero(as_tuple=True)
    order = gain[first, second].argsort(descending=True, stable=True)
    new, used = groups.clone(), set()
    for a, b, s in zip(first[order].tolist(), second[order].tolist(), swap[first, second][order].tolist(), strict=True):
        if a not in used and b not in used:
            used |= {a, b}
            i, j = divmod(s, m)
            new[a, i], new[b, j] = groups[b, j], groups[a, i]
    return new if used else groups
