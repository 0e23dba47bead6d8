"""Strips: the kept blocks of a mask as the CPU's matmuls want them.

A strip is what one block row of W computes of the forward, or one block column of dX: a few output features, out of the kept blocks along the reduction axis.
Its weights are packed once a call, [features of the kept blocks, features of the strip], so that the matmuls read them from one end to the other. A ragged edge
is padded along the reduction axis with zeros, which the gathered inputs have there, too; across the strips it is cut off.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Strips(NamedTuple):
    """Kept blocks of one direction: forward, or dX, where the axes change places."""

    across: int  # features on the strip axis
    along: int  # features on the reduction axis
    width: int  # of a strip: the last one may be narrower
    unit: int  # features of a block on the reduction axis
    units: int  # blocks on the reduction axis
    kept: tuple[Tensor, ...]  # for each strip the kept blocks, int64, ascending
    weights: tuple[Tensor, ...]  # for each strip [kept * unit, width]; empty where only dW is wanted

    @property
    def longest(self) -> int:
        """Features that the longest strip gathers."""
        return max((len(k) for k in self.kept), default=0) * self.unit


def strips_of(mask: Tensor, shape: tuple[int, int], block: tuple[int, int], transposed: bool, group: int = 1) -> Strips:
    """The strips of a mask bool (NB, KB) of a weight `shape` (N, K), without weights. `group` neighbours make one strip, of what any of them keeps."""
    m = _grouped(mask.t() if transposed else mask, group).any(1)
    found = m.nonzero()  # sorted by strip
    kept = found[:, 1].contiguous().split(m.sum(1).tolist())
    across, along = shape[::-1] if transposed else shape
    width, unit = block[::-1] if transposed else block
    return Strips(across, along, min(width, across) * group, min(unit, along), m.shape[1], kept, ())


def _grouped(m: Tensor, group: int) -> Tensor:
    """bool [strips, blocks] -> [groups, group, blocks]."""
    return F.pad(m, (0, 0, 0, -m.shape[0] % group)).unflatten(0, (-1, group))


def packed(strips: Strips, w: Tensor, mask: Tensor, transposed: bool, dtype: torch.dtype, group: int = 1) -> Strips:
    """The same strips with the kept blocks of `w` (N, K) in `dtype`; what a neighbour keeps and a strip does not is zero."""
    m, t = (mask.t(), w.t()) if transposed else (mask, w)
    m = _grouped(m, group)
    pad = (0, strips.units * strips.unit - t.shape[1], 0, len(strips.kept) * strips.width - t.shape[0])
    blocks = (F.pad(t, pad) if any(pad) else t).unflatten(0, (len(strips.kept), strips.width)).unflatten(2, (strips.units, strips.unit))
    found = blocks.permute(0, 2, 3, 1)[m.any(1)]  # [kept blocks, unit, width]
    if group > 1:
        found = torch.where(m.transpose(1, 2)[m.any(1)][:, None, :, None], found.unflatten(2, (group, -1)), 0)
    weights = list(found.reshape(-1, strips.width).to(dtype).split([len(k) * strips.unit for k in strips.kept]))
    weights[-1] = weights[-1][:, : strips.across - (len(weights) - 1) * strips.width]
    return strips._replace(weights=tuple(weights))


class Chunks:
    """The tokens of one operand in chunks, as blocks: a view where the layout allows it, else copied (and cast) into one buffer."""

    def __init__(self, t: Tensor, units: int, unit: int, chunk: int, dtype: torch.dtype) -> None:
        self.t, self.units, self.unit = t, units, unit
        whole = t.shape[1] == units * unit and t.is_contiguous() and t.dtype == dtype
        self.buffer = None if whole else torch.zeros(chunk, units * unit, dtype=dtype)

    def __call__(self, lo: int, hi: int) -> Tensor:
        """Tokens `lo` to `hi`: [tokens, units * unit], contiguous."""
        if self.buffer is None:
            return self.t[lo:hi]
        out = self.buffer[: hi - lo]
        out[:, : self.t.shape[1]].copy_(self.t[lo:hi])
        return out
