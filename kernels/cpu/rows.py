"""Strips over tokens as they lie in memory: the kept blocks of a chunk of tokens are gathered, then multiplied by one strip's weights.

A gather copies pieces of one block's width for every token, so small blocks pay for it; nothing is transposed, so high ratios gain most.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .strips import CPU, Chunks, Strips, Sums, Target, biases_of

SHORT = 192  # features that a strip gathers; see `sums_of`. On an EPYC both ways are as fast there


class Gather(NamedTuple):
    """Where the kept blocks of one strip go, of a chunk of tokens: one piece of memory, seen twice."""

    kept: Tensor
    blocks: Tensor  # [tokens, kept, unit]
    flat: Tensor  # [tokens, kept * unit]


def gathers(strips: Strips, buffer: Tensor, tokens: int) -> list[Gather]:
    """One for each strip, all in the same buffer; that of a strip that keeps nothing is empty, and its product zero."""
    views = {}
    for n in set(strips.counts):  # fewer than strips
        g = buffer[: tokens * n * strips.unit].view(tokens, n, strips.unit)
        views[n] = g, g.view(tokens, n * strips.unit)
    return [Gather(k, *views[n]) for k, n in zip(strips.kept, strips.counts, strict=True)]


def matmul(x: Tensor, strips: Strips, bias: Tensor | None, y: Tensor, lo: int, hi: int, chunk: int, dtype: torch.dtype) -> None:
    """y = x (W∘M)^T + bias of tokens lo to hi; or dX, by its strips. x [T, along], y [T, across]; `chunk` tokens at a time, computed in `dtype`."""
    size = min(chunk, hi - lo)
    source, target, biases = Chunks(x, strips.units, strips.unit, size, dtype), Target(y, size, dtype), biases_of(bias, strips, dtype)
    buffer = torch.empty(strips.longest * size, dtype=dtype, device=CPU)
    places = gathers(strips, buffer, size)
    for a in range(lo, hi, size):
        b = min(a + size, hi)
        if b - a != size:
            places = gathers(strips, buffer, b - a)
        blocks = source(a, b).view(b - a, strips.units, strips.unit)
        for i, (part, g) in enumerate(zip(target(a, b).split(strips.width, 1), places, strict=True)):
            torch.index_select(blocks, 1, g.kept, out=g.blocks)
            if biases is None:
                torch.mm(g.flat, strips.weights[i], out=part)
            else:
                torch.addmm(biases[i], g.flat, strips.weights[i], out=part)
        target.write(a, b)


def backward(gy: Tensor, x: Tensor, strips: Strips, dx: Tensor | None, sums: Sums, lo: int, hi: int, chunk: int, dtype: torch.dtype) -> None:
    """dX and dW of tokens lo to hi, off one gather of dY. `strips` are those of dX; `sums`: dW^T of each of them is added to."""
    size = min(chunk, hi - lo)
    grads, inputs = Chunks(gy, strips.units, strips.unit, size, dtype), Chunks(x, 1, strips.across, size, dtype)
    buffer = torch.empty(strips.longest * size, dtype=dtype, device=CPU)
    target = None if dx is None else Target(dx, size, dtype)
    places = gathers(strips, buffer, size)
    for a in range(lo, hi, size):
        b = min(a + size, hi)
        if b - a != size:
            places = gathers(strips, buffer, b - a)
        blocks = grads(a, b).view(b - a, strips.units, strips.unit)
        parts = None if target is None else target(a, b).split(strips.width, 1)
        for i, (column, g) in enumerate(zip(inputs(a, b).t().split(strips.width), places, strict=True)):
            torch.index_select(blocks, 1, g.kept, out=g.blocks)
            if parts is not None:
                torch.mm(g.flat, strips.weights[i], out=parts[i])
            sums.parts[i].addmm_(column, g.flat)
        if target is not None:
            target.write(a, b)


def sums_of(strips: Strips, dtype: torch.dtype) -> Sums:
    """Turned where strips are short: nothing is transposed at the end then, and the matmul is faster, too; into long ones it is up to twice as slow."""
    return Sums(strips, dtype, turned=sum(strips.counts) * strips.unit <= SHORT * len(strips.counts))


def pieces(sums: Sums, strips: Strips) -> Tensor:
    """dW of the kept blocks, [pieces, width], in the order of `strips.places`."""
    return sums.all.view(-1, strips.width) if sums.turned else torch.cat([s.t() for s in sums.whole])
