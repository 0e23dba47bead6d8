"""The elements of a weight's kept blocks, gathered into one dense tensor and scattered back: what a step on kept blocks alone reads and writes.

A block is a run of `width` elements in each of its rows, and runs are what is moved, one index for each. Where the number of kept blocks is known on the host,
all sizes are, and a GPU is not waited for: runs are then as long as divides a row, and a block at a ragged edge has its last ones more than once, which an
elementwise step makes the same of. Else ragged edges have shorter runs, or fewer, and nothing is there twice.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ...kernels.grid import as_matrix, matrix_shape

SHORT = 4  # elements of a run; an index for less costs more than what it moves


class Part(NamedTuple):
    """The runs of one width, `cols` of them side by side in a row from column `left` on.

    Of each, int64 [runs]: where it `begins` in memory, in runs where they fill whole rows, else in elements; and where they do not, what is `held`, its row
    and its place there.
    """

    left: int
    cols: int
    width: int
    begins: Tensor
    held: tuple[Tensor, Tensor] | None

    @property
    def fills(self) -> bool:
        """Whether the runs fill whole rows."""
        return self.held is None

    def places(self) -> tuple[Tensor, Tensor]:
        """The row of each run and its place there; of whole rows only weights in another order than memory's ask for them."""
        return (self.begins // self.cols, self.begins % self.cols) if self.held is None else self.held


class KeptBlocks:
    """Where the kept blocks of a mask bool (NB, KB) lie in a weight of `shape`, (N, K) as a matrix; `count` of them, None where only the mask knows.

    A `count` that is not the mask's selects other blocks than the kept ones: the caller must pass the right one. Cost: 8 bytes a run held, 24 where runs do not
    fill whole rows; without a count, or where runs would be shorter than SHORT, the mask expanded to a byte for each row of each block.
    """

    def __init__(self, mask: Tensor, shape: tuple[int, ...], block: tuple[int, int], count: int | None = None) -> None:
        (n, k), kb = matrix_shape(shape), mask.shape[1]
        height, width = min(block[0], n), min(block[1], k)
        whole, run = k // width, math.gcd(width, k)
        if count is not None and (run == width or run >= SHORT):
            found = [(0, k // run, run, *_of_blocks(mask, height, width // run, n, k // run, count))]
        else:
            runs = mask.repeat_interleave(height, 0)[:n]  # in the order of memory, which caches like
            rows, at = runs[:, :whole].nonzero(as_tuple=True)
            found = [(0, whole, width, rows, at)]
            if whole < kb:
                rows = runs[:, whole].nonzero().squeeze(1)
                found.append((whole * width, 1, k - whole * width, rows, torch.zeros_like(rows)))
        self.parts = [
            Part(left, cols, w, rows * cols + at, None) if cols * w == k else Part(left, cols, w, rows * k + (at * w + left), (rows, at))
            for left, cols, w, rows, at in found
        ]
        self.sizes = [p.begins.numel() * p.width for p in self.parts]
        self.numel = sum(self.sizes)

    def gather(self, t: Tensor) -> Tensor:
        """The kept elements of `t`, of the weight's shape, any strides: a new tensor (1, kept), of its dtype and device."""
        t = as_matrix(t)
        out = t.new_empty((1, self.numel))
        for p, runs in zip(self.parts, self._runs(out), strict=True):
            if t.is_contiguous():
                # in ragged columns every place where a run may begin is a row of a view of memory: an index a run, and none an element
                places = t.view(-1, p.width) if p.fills else t.as_strided((t.numel() - p.width + 1, p.width), (1, 1))
                torch.index_select(places, 0, p.begins, out=runs)
            else:
                runs.copy_(_blocked(t, p)[p.places()])
        return out

    def scatter(self, t: Tensor, kept: Tensor) -> None:
        """Write `kept` (1, kept) into the kept elements of `t`, in place; the other elements keep their bits."""
        matrix = as_matrix(t)
        for p, runs in zip(self.parts, self._runs(kept), strict=True):
            if matrix.is_contiguous() and p.fills:
                matrix.view(-1, p.width).index_copy_(0, p.begins, runs)
            else:
                _blocked(matrix, p).index_put_(p.places(), runs)
        if not t.is_contiguous() and t.dim() > 2:  # a channels_last convolution has no view as a matrix, and all of it is written
            t.copy_(matrix.view(t.shape))

    def _runs(self, kept: Tensor) -> list[Tensor]:
        """Views of a gathered tensor, one for each part: [runs, width]."""
        return [t.view(-1, p.width) for t, p in zip(kept.view(-1).split(self.sizes), self.parts, strict=True)]


def _of_blocks(mask: Tensor, height: int, across: int, n: int, cols: int, count: int) -> tuple[Tensor, Tensor]:
    """(rows, places) of the runs of `count` kept blocks of `height` rows with `across` runs each, of n rows with `cols`. What lies behind an edge is the last
    row or run of its block once more. All sizes are known: nothing waits for the device."""
    flat, kb, device = mask.flatten(), mask.shape[1], mask.device
    kept = flat.to(torch.uint8).sort(descending=True, stable=True).indices[:count, None, None]
    rows = torch.div(kept, kb, rounding_mode="floor") * height + torch.arange(height, device=device)[:, None]
    at = torch.remainder(kept, kb) * across + torch.arange(across, device=device)
    rows, at = (t.clamp(max=most - 1) if most % side else t for t, most, side in ((rows, n, height), (at, cols, across)))
    shape = (count, height, across)
    return rows.expand(shape).flatten(), at.expand(shape).flatten()


def _blocked(t: Tensor, p: Part) -> Tensor:
    """The columns of a part as [N, cols, width]: a view, whatever the strides."""
    return t[:, p.left : p.left + p.cols * p.width].unflatten(1, (p.cols, p.width))
