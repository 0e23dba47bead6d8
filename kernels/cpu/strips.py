"""Strips: the kept blocks of a mask as the CPU's matmuls want them.

A strip is what one block row of W computes of the forward, or one block column of dX: a few output features, out of the kept blocks along the reduction axis.
Its weights are packed once a call, [features of the kept blocks, features of the strip], one behind the other as the matmuls read them. A ragged edge is padded
along the reduction axis with zeros, which the gathered inputs have there, too; across the strips it is cut off.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

CPU = torch.device("cpu")  # whatever torch.set_default_device says


class Strips(NamedTuple):
    """Kept blocks of one direction: forward, or dX, where the axes change places."""

    across: int  # features on the strip axis
    along: int  # features on the reduction axis
    width: int  # of a strip: the last one may be narrower
    unit: int  # features of a block on the reduction axis
    units: int  # blocks on the reduction axis
    kept: tuple[Tensor, ...]  # for each strip the kept blocks, int64, ascending
    counts: tuple[int, ...]  # for each strip how many these are
    places: Tensor  # int64: the pieces of W's rows that the kept blocks consist of, strip by strip; see `strips_of`
    weights: tuple[Tensor, ...]  # for each strip [kept * unit, width]; empty where only dW is wanted

    @property
    def longest(self) -> int:
        """Features that the longest strip gathers."""
        return max(self.counts) * self.unit

    @property
    def sizes(self) -> list[int]:
        """Elements of each strip's kept blocks."""
        return [c * self.unit * self.width for c in self.counts]


def strips_of(mask: Tensor, shape: tuple[int, int], block: tuple[int, int], transposed: bool, group: int = 1) -> Strips:
    """The strips of a mask bool (NB, KB) of a weight `shape` (N, K), without weights. `group` neighbours make one strip, of what any of them keeps.

    Of the (padded) weight a piece is what one row has in one block: of a block forward, of `group` neighbours in dX. The pieces of a strip follow each other as
    the rows do forward, and block by block in dX.
    """
    m = mask.t() if transposed else mask
    m = m if group == 1 else _grouped(m, group).any(1)
    across, along = shape[::-1] if transposed else shape
    width, unit = block[::-1] if transposed else block
    width, unit = min(width, across) * group, min(unit, along)
    strip, kept = m.nonzero().unbind(1)  # sorted by strip
    if transposed:
        places = ((kept * (unit * len(m)) + strip)[:, None] + torch.arange(0, unit * len(m), len(m), device=m.device)).view(-1)
    else:
        places = m.repeat_interleave(width, 0).view(-1).nonzero().view(-1)
    counts = m.sum(1).tolist()
    return Strips(across, along, width, unit, m.shape[1], kept.contiguous().split(counts), tuple(counts), places, ())


def _grouped(m: Tensor, group: int) -> Tensor:
    """bool [strips, blocks] -> [groups, group, blocks]."""
    return F.pad(m, (0, 0, 0, -m.shape[0] % group)).unflatten(0, (-1, group))


def packed(strips: Strips, w: Tensor, mask: Tensor, transposed: bool, dtype: torch.dtype, group: int = 1) -> Strips:
    """The same strips with the kept blocks of `w` (N, K) in `dtype`; what a neighbour keeps and a strip does not is zero."""
    n, k = len(strips.kept) * strips.width, strips.units * strips.unit
    n, k = (k, n) if transposed else (n, k)
    pad = (0, k - w.shape[1], 0, n - w.shape[0])
    found = (F.pad(w, pad) if any(pad) else w).reshape(-1, strips.width if transposed else strips.unit).index_select(0, strips.places)
    if group > 1:
        found = _own(found, strips, mask, transposed, group)
    parts = found.to(dtype).view(-1).split(strips.sizes)
    weights = [p.view(-1, strips.width) if transposed else p.view(strips.width, -1).t() for p in parts]
    weights[-1] = weights[-1][:, : strips.across - (len(weights) - 1) * strips.width]
    return strips._replace(weights=tuple(weights))


def _own(found: Tensor, strips: Strips, mask: Tensor, transposed: bool, group: int) -> Tensor:
    """The same pieces of grouped strips, zero where a neighbour's mask alone has a block."""
    m = _grouped(mask.t() if transposed else mask, group)
    if transposed:
        keeps = m.permute(2, 0, 1).repeat_interleave(strips.unit, 0).reshape(-1, group)
    else:
        keeps = m.flatten(0, 1).repeat_interleave(strips.width // group, 0).view(-1, 1)
    keeps = keeps[strips.places]
    return torch.where(keeps[:, :, None], found.unflatten(1, (keeps.shape[1], -1)), 0).flatten(1)


class Sums:
    """dW of the kept blocks of all strips, in one buffer: zero to begin with. `turned`: in memory [kept * unit, width], as `Strips.places` has them in dX."""

    def __init__(self, strips: Strips, dtype: torch.dtype, turned: bool = False) -> None:
        self.all, self.turned, width = torch.zeros(sum(strips.sizes), dtype=dtype, device=CPU), turned, strips.width
        self.parts = [s.view(-1, width).t() if turned else s.view(width, -1) for s in self.all.split(strips.sizes)]  # [width, kept * unit]
        self.whole = list(self.parts)  # with the features that pad the last strip
        self.parts[-1] = self.parts[-1][: strips.across - (len(self.parts) - 1) * width]


class Chunks:
    """The tokens of one operand in chunks, as blocks: a view where the layout allows it, else copied (and cast) into one buffer."""

    def __init__(self, t: Tensor, units: int, unit: int, chunk: int, dtype: torch.dtype) -> None:
        self.t, self.units, self.unit = t, units, unit
        whole = t.shape[1] == units * unit and t.is_contiguous() and t.dtype == dtype
        self.buffer = None if whole else torch.zeros(chunk, units * unit, dtype=dtype, device=CPU)

    def __call__(self, lo: int, hi: int) -> Tensor:
        """Tokens `lo` to `hi`: [tokens, units * unit], contiguous."""
        if self.buffer is None:
            return self.t[lo:hi]
        out = self.buffer[: hi - lo]
        out[:, : self.t.shape[1]].copy_(self.t[lo:hi])
        return out


class Target:
    """Where the results of chunks go: the output itself, or one buffer of the dtype they are computed in, which `write` rounds into the output."""

    def __init__(self, y: Tensor, chunk: int, dtype: torch.dtype) -> None:
        self.y = y
        self.buffer = None if y.dtype == dtype else torch.empty(chunk, y.shape[1], dtype=dtype, device=CPU)

    def __call__(self, lo: int, hi: int) -> Tensor:
        """Tokens `lo` to `hi`: [tokens, features], to be written to."""
        return self.y[lo:hi] if self.buffer is None else self.buffer[: hi - lo]

    def write(self, lo: int, hi: int) -> None:
        """They have been."""
        if self.buffer is not None:
            self.y[lo:hi].copy_(self.buffer[: hi - lo])


def biases_of(bias: Tensor | None, strips: Strips, dtype: torch.dtype) -> tuple[Tensor, ...] | None:
    """The part of a bias that each strip adds."""
    return None if bias is None else bias.to(dtype).expand(strips.across).split(strips.width)
