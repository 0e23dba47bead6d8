"""What tensors hold in masked blocks, set aside and put back: one launch each way for tensors of one dtype and block; no kept element is read or written.

What a guard does around an optimiser's step; its plain form, `clone` before and `where` after, is in `passes.stepping.optimiser`. A table on the device says
where each tensor lies, by its distance from the first one. It depends on addresses and shapes alone: the `KEPT` that were asked for last are kept, and those of
captured CUDA graphs for good.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..grid import grid_shape, matrix_shape
from . import device
from .elementwise import ALIGN, aside_kernel

ROWS, COLUMNS = 16, 128  # of a program
KEPT = 1024  # more than a step has of them: 7 B parameters are 400. A table takes 4 bytes for 2,048 elements


class Place(NamedTuple):
    """What the table depends on, of one tensor."""

    address: int
    rows: int
    cols: int
    mask: int  # number of its mask


class Layout(NamedTuple):
    """A table and the sizes that its launches need."""

    table: Tensor  # [tensors, FIELDS] int64
    owner: Tensor  # of every program, int32
    unit: int
    cols_unit: int
    starts: tuple[int, ...]  # where each tensor begins in what is set aside, and the length of the whole


class Aside:
    """Set aside when it is made; `back` puts it back into the same tensors."""

    def __init__(self, layout: Layout, tensors: Sequence[Tensor], masks: Sequence[Tensor], block: tuple[int, int]) -> None:
        self.layout, self.block = layout, block
        mask = torch.cat([m.reshape(-1) for m in masks])
        self.masks = [part.view(m.shape) for part, m in zip(mask.split([m.numel() for m in masks]), masks, strict=True)]  # as they were
        self.mask = mask.view(torch.int8)
        self.values = torch.empty(layout.starts[-1], dtype=tensors[0].dtype, device=tensors[0].device)
        self._launch(tensors[0], False)

    def back(self, first: Tensor) -> None:
        """Into the tensors that it came from, the first of which is given."""
        self._launch(first, True)

    def of(self, i: int, t: Tensor) -> Tensor:
        """What was set aside of the i-th tensor, in the shape of `t`; undefined in kept blocks."""
        at = self.layout.starts[i]
        return self.values[at : at + t.numel()].view(t.shape)

    def _launch(self, first: Tensor, back: bool) -> None:
        table, owner, unit, cols_unit, _ = self.layout
        tile = {"BH": self.block[0], "BW": self.block[1], "TN": ROWS, "TK": COLUMNS}
        device.launch(aside_kernel, (owner.numel(),), first, first, self.mask, self.values, table, owner, AT=unit, KM=cols_unit, BACK=back, **tile)


def takes(t: Tensor) -> bool:
    """Whether the kernel takes a tensor: float32 or shorter, contiguous, not empty, where Triton runs."""
    return not device.why_not(t) and t.is_contiguous() and t.numel() > 0


def width(t: Tensor) -> tuple[bool, int]:
    """What decides how wide its loads are: those of all tensors of a launch are as wide as of the narrowest."""
    return t.data_ptr() % 16 == 0, min(device.divisor(matrix_shape(t.shape)[1]), 16 // t.element_size())


def set_aside(tensors: Sequence[Tensor], masks: Sequence[Tensor], which: Sequence[int], block: tuple[int, int]) -> Aside | None:
    """Of tensors of one dtype on one device; `which` mask, bool [NB, KB], is whose. None where a CUDA graph is captured for which there is no table yet.

    Cost: 2 b bytes a masked element each way, and the masks; nothing waits for the device.
    """
    places = tuple(Place(t.data_ptr(), *matrix_shape(t.shape), i) for t, i in zip(tensors, which, strict=True))
    layout = _layout(places, tensors[0].element_size(), tuple(m.numel() for m in masks), block, tensors[0].device)
    return None if layout is None else Aside(layout, tensors, masks, block)


_recent: OrderedDict[tuple[Any, ...], Layout] = OrderedDict()
_captured: dict[tuple[Any, ...], Layout] = {}


def _layout(*key: Any) -> Layout | None:
    """The table of these places, made where there is none and no graph is captured, which could not copy it to the device."""
    capturing = device.capturing(key[-1])
    found = _captured.get(key) or _recent.get(key)
    if found is None and not capturing:
        found = _recent[key] = _made(*key)
    if found is not None and capturing:
        _captured[key] = found
    elif key in _recent:
        _recent.move_to_end(key)
    while len(_recent) > KEPT:
        _recent.popitem(last=False)
    return found


def _made(places: tuple[Place, ...], itemsize: int, masks: tuple[int, ...], block: tuple[int, int], on: torch.device) -> Layout:
    """Cost: two small copies to the device, in the order of the stream."""
    first = places[0].address
    unit = 16 // itemsize if all(p.address % 16 == 0 for p in places) else 1
    cols_unit = min(device.divisor(p.cols) for p in places)
    mask0 = [0, *accumulate(masks)]
    rows, starts, programs = [], [0], [0]
    for p in places:
        place = (p.address - first) // itemsize // unit, p.rows, p.cols // cols_unit, grid_shape((p.rows, p.cols), block)[1]
        rows.append([*place, mask0[p.mask], starts[-1] // ALIGN.value, programs[-1]])
        starts.append(starts[-1] + -(-p.rows * p.cols // ALIGN.value) * ALIGN.value)
        programs.append(programs[-1] + -(-p.rows // ROWS) * -(-p.cols // COLUMNS))
    counts = torch.tensor(programs, device="cpu").diff()
    owner = torch.repeat_interleave(torch.arange(len(places), dtype=torch.int32, device="cpu"), counts)
    table = torch.tensor(rows, dtype=torch.int64, device="cpu")
    return Layout(device.sent(table, on), device.sent(owner, on), unit, cols_unit, tuple(starts))
