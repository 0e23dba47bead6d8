"""The keys of `kernels.score` for float sums, faster: chunks of block rows that stay in the cache, few passes over them, the same bits.

A term u * u * 2^44, truncated, is an integer below 2^44. Here the factor 2^22 goes into the scale of u, so that the truncated product is that integer, as a
float32 (by `floor`, as none is negative: PyTorch's `trunc` takes 20 to 40 times as long); up to 512 of them add up exactly in float64, and from there on in
int64.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ..grid import grid_shape
from ..score import block_keys as plain_keys
from ..score import sum_bits, sum_shift
from . import pool

SHIFT = 44  # fixed-point bits of a term, see `kernels.score.sum_shift`
ROWS = 512  # of a block: more would not add up exactly in float64
CHUNK = 1 << 17  # weight elements at a time
SHARE = 1 << 19  # weight elements that are worth a thread
LEAST = 1 << 14  # weight elements below which the definition's fewer calls are faster
GRAIN = 1 << 15  # elements up to which PyTorch's own ops take one thread anyway: the process's count of threads need not be touched for them


def block_keys(w: Tensor, block: tuple[int, int], criterion: str, step: Tensor | None = None, stream: int = 0) -> Tensor:
    """As `kernels.score.block_keys`, bit for bit."""
    (nb, kb), (n, k) = grid_shape(w.shape, block), w.shape
    bh, bw = min(block[0], max(1, n)), min(block[1], max(1, k))
    keys = None
    if criterion in ("fro", "l1") and bh <= ROWS and sum_shift(bh * bw) == SHIFT and w.numel() >= LEAST:
        with torch.no_grad():
            keys = _sum_keys(w.detach(), nb, kb, bh, bw, criterion == "fro")
    return plain_keys(w, block, criterion, step, stream) if keys is None else keys


def _parts(n: int, k: int, bh: int, lo: int, hi: int) -> Iterator[tuple[slice, slice, int]]:
    """Block rows `lo` to `hi` in chunks: which they are, their rows, and how many those are in each; a ragged last one by itself."""
    whole, per = min(hi, n // bh), max(1, CHUNK // (bh * k))
    for i in range(lo, whole, per):
        j = min(i + per, whole)
        yield slice(i, j), slice(i * bh, j * bh), bh
    if whole < hi:
        yield slice(whole, hi), slice(whole * bh, n), n - whole * bh


def _sum_keys(w: Tensor, nb: int, kb: int, bh: int, bw: int, squared: bool) -> Tensor | None:
    """int32 [NB, KB]; None where an element is not finite."""
    n, k = w.shape
    largest, total = (torch.empty(nb, k, dtype=d, device=w.device) for d in (torch.float32, torch.float64))  # whatever the defaults are

    def blocks(t: Tensor) -> Tensor:
        return (F.pad(t, (0, kb * bw - k)) if kb * bw > k else t).unflatten(1, (kb, bw))

    def part(rows: slice, height: int) -> Tensor:
        return w[rows].float().view(-1, height, k)

    def maxima(lo: int, hi: int) -> None:
        space = torch.empty(max(CHUNK, bh * k), dtype=torch.float32, device=w.device)
        for at, rows, height in _parts(n, k, bh, lo, hi):
            p = part(rows, height)
            torch.amax(torch.abs(p, out=space[: p.numel()].view(p.shape)), 1, out=largest[at])

    def sums(lo: int, hi: int) -> None:
        space = torch.empty(max(CHUNK, bh * k), dtype=torch.float32, device=w.device)
        for at, rows, height in _parts(n, k, bh, lo, hi):
            p = part(rows, height)
            u = torch.mul(p, scales[0][at], out=space[: p.numel()].view(p.shape))
            for s in scales[1:]:
                u.mul_(s[at])
            u = u.mul_(u) if squared else u.abs_()  # rounded to float32, as the definition says
            torch.sum(u.floor_(), 1, dtype=torch.float64, out=total[at])

    with pool.one_thread() if w.numel() > GRAIN else nullcontext(1) as threads:
        shares = pool.ranges(nb, threads, max(1, SHARE // (bh * k)))
        pool.run([partial(maxima, lo, hi) for lo, hi in shares])
        top = blocks(largest).amax(2)
        if not torch.isfinite(top).all():
            return None
        exponent = torch.frexp(top).exponent
        up = (SHIFT // 2 if squared else SHIFT) - exponent  # the scale's power of two, in two steps where it is no float32, as 2 ** 170
        half = torch.div(up, 2, rounding_mode="floor")
        powers = [up] if int(up.abs().max()) < 126 else [half, up - half]
        scales = [torch.exp2(p.float())[..., None].expand(nb, kb, bw).reshape(nb, 1, kb * bw)[..., :k] for p in powers]
        pool.run([partial(sums, lo, hi) for lo, hi in shares])
        return sum_bits(blocks(total).long().sum(2), exponent, SHIFT, squared).int()
