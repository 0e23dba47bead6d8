"""The keys of `kernels.score` for float sums, faster: chunks of block rows that stay in the cache, few passes over them, the same bits.

A term u * u * 2^44, truncated, is an integer below 2^44. Here the factor 2^22 goes into the scale of u, so that the truncated product is that integer, as a
float32; up to 512 of them add up exactly in float64, and from there on in int64.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from ..grid import grid_shape
from ..score import block_keys as plain_keys
from ..score import sum_bits, sum_shift

SHIFT = 44  # fixed-point bits of a term, see `kernels.score.sum_shift`
ROWS = 512  # of a block: more would not add up exactly in float64
CHUNK = 1 << 17  # weight elements at a time


def block_keys(w: Tensor, block: tuple[int, int], criterion: str, step: Tensor | None = None, stream: int = 0) -> Tensor:
    """As `kernels.score.block_keys`, bit for bit."""
    (nb, kb), (n, k) = grid_shape(w.shape, block), w.shape
    bh, bw = min(block[0], max(1, n)), min(block[1], max(1, k))
    keys = None
    if criterion in ("fro", "l1") and bh <= ROWS and sum_shift(bh * bw) == SHIFT and w.numel():
        with torch.no_grad():
            keys = _sum_keys(w.detach(), nb, kb, bh, bw, criterion == "fro")
    return plain_keys(w, block, criterion, step, stream) if keys is None else keys


def _parts(w: Tensor, bh: int) -> Iterator[tuple[slice, Tensor]]:
    """Block rows in chunks, each [rows, bh, K] in float32; a ragged last one by itself."""
    whole, per = w.shape[0] // bh, max(1, CHUNK // (bh * w.shape[1]))
    for i in range(0, whole, per):
        rows = min(per, whole - i)
        yield slice(i, i + rows), w[i * bh : (i + rows) * bh].float().unflatten(0, (rows, bh))
    if whole * bh < w.shape[0]:
        yield slice(whole, whole + 1), w[None, whole * bh :].float()


def _sum_keys(w: Tensor, nb: int, kb: int, bh: int, bw: int, squared: bool) -> Tensor | None:
    """int32 [NB, KB]; None where an element is not finite."""
    k = w.shape[1]

    def blocks(t: Tensor) -> Tensor:
        return (F.pad(t, (0, kb * bw - k)) if kb * bw > k else t).unflatten(1, (kb, bw))

    space = torch.empty(min(w.numel(), max(CHUNK, bh * k)))
    largest, total = torch.empty(nb, k), torch.empty(nb, k, dtype=torch.float64)
    for at, part in _parts(w, bh):
        torch.amax(torch.abs(part, out=space[: part.numel()].view(part.shape)), 1, out=largest[at])
    top = blocks(largest).amax(2)
    if not torch.isfinite(top).all():
        return None
    exponent = torch.frexp(top).exponent
    up = (SHIFT // 2 if squared else SHIFT) - exponent  # the scale's power of two, in two steps, since 2 ** 170 is no float32
    powers = [up] if int(up.abs().max()) < 126 else [torch.div(up, 2, rounding_mode="floor"), up - torch.div(up, 2, rounding_mode="floor")]
    scales = [torch.exp2(p.float())[..., None].expand(nb, kb, bw).reshape(nb, kb * bw)[:, None, :k] for p in powers]
    for at, part in _parts(w, bh):
        u = torch.mul(part, scales[0][at], out=space[: part.numel()].view(part.shape))
        for s in scales[1:]:
            u.mul_(s[at])
        u = u.mul_(u) if squared else u.abs_()  # rounded to float32, as the definition says
        torch.sum(u.trunc_(), 1, dtype=torch.float64, out=total[at])
    return sum_bits(blocks(total).long().sum(2), exponent, SHIFT, squared).int()
