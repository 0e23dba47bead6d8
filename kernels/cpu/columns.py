"""Strips over transposed tokens: a chunk is transposed once, and then a block is a few whole rows, gathered by plain copies, that the matmul reads fastest.

The transposes cost the same at any ratio: where little is masked, or blocks are small, gathers of tokens as they lie (`rows`) cost more.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import rows
from .strips import CPU, Chunks, Strips, Sums


class Transposed:
    """The tokens of one operand in chunks, features first, in one buffer; features behind the last one are zero."""

    def __init__(self, t: Tensor, features: int, chunk: int, dtype: torch.dtype) -> None:
        self.t, self.features, self.buffer = t, features, torch.empty(features * chunk, dtype=dtype, device=CPU)

    def __call__(self, lo: int, hi: int) -> Tensor:
        """Tokens `lo` to `hi`: [features, tokens], contiguous."""
        out, real = self.buffer[: self.features * (hi - lo)].view(self.features, hi - lo), self.t.shape[1]
        out[:real].copy_(self.t[lo:hi].to(out.dtype).t())  # cast first: a transposing copy is fast within one dtype only
        out[real:].zero_()
        return out


class Job(NamedTuple):
    """One strip of a chunk."""

    kept: Tensor
    pieces: Tensor  # [kept, unit * tokens]: where the blocks are gathered to
    flat: Tensor  # the same memory, [kept * unit, tokens]
    weights: Tensor  # [width, kept * unit]
    out: Tensor  # [width, tokens]


class Product:
    """The product of a chunk with every strip, [across, tokens], in one buffer."""

    def __init__(self, strips: Strips, chunk: int, dtype: torch.dtype) -> None:
        self.strips, self.tokens = strips, 0
        self.gathered = torch.empty(strips.longest * chunk, dtype=dtype, device=CPU)
        self.result = torch.empty(strips.across * chunk, dtype=dtype, device=CPU)

    def _prepare(self, tokens: int) -> None:
        """Views for chunks of so many tokens; strips that keep nothing are written once."""
        s, self.tokens, self.jobs = self.strips, tokens, []
        self.out = self.result[: s.across * tokens].view(s.across, tokens)
        for i, (part, k, n) in enumerate(zip(self.out.split(s.width), s.kept, s.counts, strict=True)):
            if n:
                flat = self.gathered[: n * s.unit * tokens].view(-1, tokens)
                self.jobs.append(Job(k, flat.view(n, -1), flat, s.weights[i].t(), part))
            else:
                part.zero_()

    def __call__(self, t: Tensor, into: Tensor) -> None:
        """t [features, tokens] -> into [tokens, across]."""
        if t.shape[1] != self.tokens:
            self._prepare(t.shape[1])
        blocks = t.view(self.strips.units, -1)
        for job in self.jobs:
            torch.index_select(blocks, 0, job.kept, out=job.pieces)
            torch.mm(job.weights, job.flat, out=job.out)
        into.copy_(self.out.to(into.dtype).t())


def backward(
    gy: Tensor, x: Tensor, strips: Strips, wanted: Strips, dx: Tensor | None, sums: Sums, lo: int, hi: int, chunk: int, dtype: torch.dtype
) -> None:
    """dX and dW of tokens lo to hi, off one transpose of dY. `strips` are those of dX, `wanted` the forward's, which say what of dW is wanted.

    `sums`: dW of each block row's kept blocks is added to.
    """
    size = min(chunk, hi - lo)
    source = Transposed(gy, strips.units * strips.unit, size, dtype)
    product = None if dx is None else Product(strips, size, dtype)
    inputs = Chunks(x, wanted.units, wanted.unit, size, dtype)
    gathered = torch.empty(wanted.longest * size, dtype=dtype, device=CPU)
    for a in range(lo, hi, size):
        b = min(a + size, hi)
        t = source(a, b)
        if product is not None and dx is not None:
            product(t, dx[a:b])
        blocks, left = inputs(a, b).view(b - a, wanted.units, wanted.unit), t[: wanted.across].split(wanted.width)
        for s, rows_of_t, g in zip(sums.parts, left, rows.gathers(wanted, gathered, b - a), strict=True):
            torch.index_select(blocks, 1, g.kept, out=g.blocks)
            s.addmm_(rows_of_t, g.flat)


def pieces(sums: Sums, wanted: Strips) -> Tensor:
    """dW of the kept blocks, [pieces, unit], in the order of `wanted.places`: as it was summed."""
    return sums.all.view(-1, wanted.unit)
