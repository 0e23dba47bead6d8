"""Strips without gathers: neighbours among the kept blocks are one matmul over the tokens as they lie, and a strip is the sum of its runs.

What a gather costs is saved, and every further run adds to the output once more: large blocks gain, small ones lose.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .strips import Chunks, Strips, Target, biases_of


def runs_of(kept: list[int]) -> list[tuple[int, int]]:
    """[0, 1, 2, 5] -> [(0, 3), (5, 6)]."""
    found: list[tuple[int, int]] = []
    for k in kept:
        if found and found[-1][1] == k:
            found[-1] = (found[-1][0], k + 1)
        else:
            found.append((k, k + 1))
    return found


def matmul(x: Tensor, strips: Strips, bias: Tensor | None, y: Tensor, lo: int, hi: int, chunk: int, dtype: torch.dtype) -> None:
    """As `rows.matmul`."""
    size, unit = min(chunk, hi - lo), strips.unit
    source, target, biases = Chunks(x, strips.units, unit, size, dtype), Target(y, size, dtype), biases_of(bias, strips, dtype)
    jobs: list[tuple[int, bool, int, int, Tensor]] = []  # strip, whether it begins here, features of the run, its weights
    for i, (kept, w) in enumerate(zip(strips.kept, strips.weights, strict=True)):
        at = 0
        for first, end in runs_of(kept.tolist()) or [(0, 0)]:  # without one the product is zero
            jobs.append((i, at == 0, first * unit, end * unit, w[at : at + (end - first) * unit]))
            at += (end - first) * unit
    for a in range(lo, hi, size):
        b = min(a + size, hi)
        t = source(a, b)
        parts = target(a, b).split(strips.width, 1)
        for i, begins, first, end, w in jobs:
            if not begins:
                parts[i].addmm_(t[:, first:end], w)
            elif biases is None:
                torch.mm(t[:, first:end], w, out=parts[i])
            else:
                torch.addmm(biases[i], t[:, first:end], w, out=parts[i])
        target.write(a, b)
