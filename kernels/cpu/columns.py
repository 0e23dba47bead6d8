"""Strips over transposed tokens: a chunk is transposed once, and then a block is a few whole rows, gathered by plain copies, that the matmul reads fastest.

The transposes cost the same at any ratio: where little is masked, or blocks are small, gathers of tokens as they lie (`rows`) cost more.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import rows
from .strips import Chunks, Strips


class Transposed:
    """The tokens of one operand in chunks, features first, in one buffer; features behind the last one are zero."""

    def __init__(self, t: Tensor, features: int, chunk: int, dtype: torch.dtype) -> None:
        self.t, self.features, self.buffer = t, features, torch.empty(features * chunk, dtype=dtype)

    def __call__(self, lo: int, hi: int) -> Tensor:
        """Tokens `lo` to `hi`: [features, tokens], contiguous."""
        out, real = self.buffer[: self.features * (hi - lo)].view(self.features, hi - lo), self.t.shape[1]
        out[:real].copy_(self.t[lo:hi].to(out.dtype).t())  # cast first: a transposing copy is fast within one dtype only
        out[real:].zero_()
        return out


class Product:
    """The product of a chunk with every strip, [across, tokens], in one buffer."""

    def __init__(self, strips: Strips, bias: Tensor | None, chunk: int, dtype: torch.dtype) -> None:
        self.strips, self.weights = strips, [w.t() for w in strips.weights]
        self.gathered = torch.empty(strips.longest * chunk, dtype=dtype)
        self.result = torch.empty(strips.across * chunk, dtype=dtype)
        self.n = 0
        self.biases = None if bias is None else bias.to(dtype).expand(strips.across)[:, None].split(strips.width)

    def _places(self, n: int) -> tuple[Tensor, list[tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]]]:
        """The result of `n` tokens, and for each strip: kept blocks, where they go as blocks and as a matrix, its part of the result, its weights."""
        if self.n != n:
            s, self.n = self.strips, n
            self.out = self.result[: s.across * n].view(s.across, n)
            self.jobs = []
            for i, (part, k) in enumerate(zip(self.out.split(s.width), s.kept, strict=True)):
                flat = self.gathered[: len(k) * s.unit * n].view(len(k) * s.unit, n)
                if len(k):
                    self.jobs.append((k, flat.view(len(k), -1), flat, part, self.weights[i], None if self.biases is None else self.biases[i]))
                elif self.biases is not None:
                    part.copy_(self.biases[i])
                else:
                    part.zero_()
        return self.out, self.jobs

    def __call__(self, t: Tensor, into: Tensor) -> None:
        """t [features, tokens] -> into [tokens, across]."""
        out, jobs = self._places(t.shape[1])
        blocks = t.view(self.strips.units, -1)
        for kept, pieces, flat, part, w, bias in jobs:
            torch.index_select(blocks, 0, kept, out=pieces)
            if bias is None:
                torch.mm(w, flat, out=part)
            else:
                torch.addmm(bias, w, flat, out=part)
        into.copy_(out.to(into.dtype).t())


def matmul(x: Tensor, strips: Strips, bias: Tensor | None, y: Tensor, lo: int, hi: int, chunk: int, dtype: torch.dtype) -> None:
    """As `rows.matmul`."""
    size = min(chunk, hi - lo)
    source, product = Transposed(x, strips.units * strips.unit, size, dtype), Product(strips, bias, size, dtype)
    for a in range(lo, hi, size):
        b = min(a + size, hi)
        product(source(a, b), y[a:b])


def backward(
    gy: Tensor, x: Tensor, strips: Strips, wanted: Strips, dx: Tensor | None, sums: list[Tensor], lo: int, hi: int, chunk: int, dtype: torch.dtype
) -> None:
    """dX and dW of tokens lo to hi, off one transpose of dY. `strips` are those of dX, `wanted` the forward's, which say what of dW is wanted.

    `sums`: for each block row dW of its kept blocks, [rows, kept * columns], added to.
    """
    size = min(chunk, hi - lo)
    source = Transposed(gy, strips.units * strips.unit, size, dtype)
    product = None if dx is None else Product(strips, None, size, dtype)
    inputs = Chunks(x, wanted.units, wanted.unit, size, dtype)
    gathered = torch.empty(wanted.longest * size, dtype=dtype)
    for a in range(lo, hi, size):
        b = min(a + size, hi)
        t = source(a, b)
        if product is not None and dx is not None:
            product(t, dx[a:b])
        blocks, left = inputs(a, b).view(b - a, wanted.units, wanted.unit), t[: wanted.across].split(wanted.width)
        for s, rows_of_t, g in zip(sums, left, rows.gathers(wanted, gathered, b - a), strict=True):
            if g is not None:
                torch.index_select(blocks, 1, g.kept, out=g.blocks)
                s.addmm_(rows_of_t, g.flat)


def scatter(sums: list[Tensor], wanted: Strips, dw: Tensor) -> None:
    """Put every block row's dW in its place of a zeroed, padded dW, [block rows, rows, block columns, columns]."""
    for i, (s, k) in enumerate(zip(sums, wanted.kept, strict=True)):
        if len(k):
            dw[i, : s.shape[0]].index_copy_(1, k, s.view(s.shape[0], len(k), wanted.unit).to(dw.dtype))
