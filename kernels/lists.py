"""Strip lists: which blocks a tile of the list matmul must visit, in plain PyTorch.

The output's feature axis is cut into strips of 64 or 128 features (`strip_of`); along the reduction axis the mask is cut into units of at most `step` features,
one step of the matmul taking `per_step` of them. A strip's list holds the units in which any of its blocks is kept, ascending, as `bits << 16 | unit`: bit g
says that block g of the strip is kept there. Lists have full capacity and a zero tail of at least one step, so that shapes are static, nothing is read back
to the host, and the matmul may load one step ahead. For dX the same is built over the transposed mask. Both directions lie behind one another in one int32
tensor (`packed`), which depends on the mask and the block alone: forward, dX and dW of any dtype read it, and it can outlive a step.

| tensor | shape | what |
| --- | --- | --- |
| entries | [strips, capacity] int32 | the lists |
| counts | [strips] int32 | real entries of each list |
| order | [strips] int32 | strips, longest list first, ties to the lower index |

Why lists of unions and not of blocks: a tile's matmul instruction wants 64 features or more at once, more than a small block has (`DESIGN.md`).
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from .errors import UnsupportedError

UNITS = 1 << 16  # an entry names a unit in 16 bits
LISTED = (16, 32, 64, 128)  # block sizes that the list matmul takes, in either direction
STRIP, STEP = 128, 64  # features of a strip at most, and of a step at most


def listed(block: tuple[int, int]) -> bool:
    """Whether the list matmul takes a block; others are masked and cast, then multiplied densely."""
    return block[0] in LISTED and block[1] in LISTED


def skips(op: str, shape: tuple[int, ...], block: tuple[int, int]) -> bool:
    """Whether the kernels skip blocks in an op (`forward`, `dx`, `dw`) of a weight `shape` (N, K), or of an input (..., K) of it. Else those are masked in one
    pass, then multiplied: rows of an odd number of elements cannot be copied in pieces of 4 bytes. The forward reads rows of K alone.
    """
    return listed(block) and shape[1] % 2 == 0 and (op == "forward" or shape[0] % 2 == 0)


def strip_of(row_block: int) -> int:
    """Features of a strip over blocks of `row_block` features.

    Half as wide a strip has half as many blocks in its union, and so multiplies less for nothing, but loads X twice as often. Blocks of 64 and 32 gain by it
    on an H200 (`examples/results/h200/tile_scan.csv`); 128 would be cut, and the union of four of 16 is nearly that of eight.
    """
    return 64 if row_block in (32, 64) else STRIP


class Layout(NamedTuple):
    """Static numbers of one direction's lists. `rows` and `cols` count blocks along the strip axis and the reduction axis."""

    rows: int
    cols: int
    row_block: int  # features of a block along the strip axis
    col_block: int  # and along the reduction axis
    strip: int  # features of a strip
    step: int = STEP  # features that one step of the matmul takes at most along the reduction axis

    @property
    def unit(self) -> int:
        """Features of a list entry along the reduction axis."""
        return min(self.col_block, self.step)

    @property
    def units(self) -> int:
        """Units along the reduction axis, block edges included."""
        return self.cols * (self.col_block // self.unit)

    @property
    def per_step(self) -> int:
        """Entries that one step takes."""
        return self.step // self.unit

    @property
    def group(self) -> int:
        """Blocks of a strip along the strip axis; 1 where a block is at least as wide as the strip."""
        return max(1, self.strip // self.row_block)

    @property
    def strips(self) -> int:
        return -(-self.rows * self.row_block // self.strip)

    @property
    def capacity(self) -> int:
        """Entries of a list, with a whole step of zeros behind the last one."""
        return (-(-self.units // self.per_step) + 1) * self.per_step


def layout(grid: tuple[int, int], block: tuple[int, int], transposed: bool, strip: int | None = None) -> Layout:
    """Lists of the forward (strips of out_features) or, transposed, of dX (strips of in_features); `strip`: another width than `strip_of` says."""
    rows, cols = grid[::-1] if transposed else grid
    row_block, col_block = block[::-1] if transposed else block
    return Layout(rows, cols, row_block, col_block, strip or strip_of(row_block))


def pair(grid: tuple[int, int], block: tuple[int, int], strip: int | None = None) -> tuple[Layout, Layout]:
    """Lists of the forward and of dX. UnsupportedError where an entry could not name every unit."""
    found = layout(grid, block, False, strip), layout(grid, block, True, strip)
    most = max(lay.units for lay in found)
    if most > UNITS:
        what = f"a mask over {most} units of {min(lay.unit for lay in found)}: expected at most {UNITS} along either axis for impl='triton'"
        raise UnsupportedError(f"{what}; use a larger block, or impl='auto' or impl='reference'.")
    return found


def _sections(lay: Layout) -> tuple[int, int, int]:
    """Lengths of entries, counts and order in a packed tensor, each up to a multiple of 4 (16 bytes)."""
    return -(-lay.strips * lay.capacity // 4) * 4, -(-lay.strips // 4) * 4, -(-lay.strips // 4) * 4


def packed_length(grid: tuple[int, int], block: tuple[int, int], strip: int | None = None) -> int:
    """Length of the packed lists of a mask. Asks nothing of the grid, whose sizes a compiler may not know.

    One more in strips of another width than `strip_of` says: no multiple of 4, as all others are, so that neither is ever taken for the other.
    """
    other = any(strip not in (None, strip_of(side)) for side in block)
    return sum(sum(_sections(layout(grid, block, transposed, strip))) for transposed in (False, True)) + int(other)


fixed_length = lru_cache(maxsize=1024)(packed_length)  # of plain numbers, which every op asks for; a compiler's sizes cannot be remembered


def unpack(lists: Tensor, grid: tuple[int, int], block: tuple[int, int], transposed: bool, strip: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """One direction's (entries, counts, order), views into packed lists."""
    shape, *places = _places(grid, block, transposed, strip)
    entries, counts, order = (lists.narrow(0, at, length) for at, length in places)
    return entries.view(shape), counts, order


@lru_cache(maxsize=1024)  # asked at every launch
def _places(grid: tuple[int, int], block: tuple[int, int], transposed: bool, strip: int | None) -> tuple[tuple[int, int], ...]:
    """Shape of one direction's entries; where entries, counts and order begin in packed lists, and how long they are."""
    lay = layout(grid, block, transposed, strip)
    entries, counts, _ = _sections(lay)
    at = sum(_sections(layout(grid, block, False, strip))) if transposed else 0
    return (lay.strips, lay.capacity), (at, lay.strips * lay.capacity), (at + entries, lay.strips), (at + entries + counts, lay.strips)


def packed(mask: Tensor, block: tuple[int, int], strip: int | None = None) -> Tensor:
    """Lists of both directions of a mask bool [NB, KB]: int32 [packed_length], what is between the parts is zero."""
    grid = (mask.shape[0], mask.shape[1])
    lists = torch.zeros(packed_length(grid, block, strip), dtype=torch.int32, device=mask.device)
    for lay, transposed in zip(pair(grid, block, strip), (False, True), strict=True):
        for part, values in zip(unpack(lists, grid, block, transposed, strip), strip_lists(mask, lay, transposed), strict=True):
            part.copy_(values)
    return lists


def strip_lists(mask: Tensor, lay: Layout, transposed: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Lists of a mask bool [NB, KB]: (entries, counts, order), see the module. No host sync, fixed shapes."""
    m = mask.t() if transposed else mask
    wide = lay.col_block // lay.unit
    units = m.repeat_interleave(wide, 1) if wide > 1 else m  # [rows, units]
    first = torch.arange(lay.strips, device=m.device) * lay.strip // lay.row_block  # first block of each strip
    bits = torch.zeros(lay.strips, lay.units, dtype=torch.int32, device=m.device)
    for g in range(lay.group):
        row = first + g
        there = units[row.clamp(max=lay.rows - 1)] & (row < lay.rows)[:, None]
        bits |= there.int() << g
    kept = bits != 0
    counts = kept.sum(1, dtype=torch.int32)
    place = torch.where(kept, kept.cumsum(1) - 1, lay.capacity)  # what is not kept falls behind the list, and is cut off
    entries = torch.zeros(lay.strips, lay.capacity + 1, dtype=torch.int32, device=m.device)
    entries.scatter_(1, place, bits << 16 | torch.arange(lay.units, dtype=torch.int32, device=m.device))
    order = torch.sort(counts, descending=True, stable=True).indices.int()
    return entries[:, :-1].contiguous(), counts, order
