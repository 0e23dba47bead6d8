"""Weights that one set of launches serves: a table on the device says where each lies and which programs are its own.

A row of the table, int64, describes one weight; `owner` arrays say for every program of a launch which row is its own. Weights are found by their distance
from the first one, in units that divide all distances, so that Triton knows their alignment. The table depends on addresses and shapes alone: the `KEPT` that
were asked for last are kept, and those that a captured CUDA graph replays over for good.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

import triton.language as tl

from ..grid import grid_shape
from ..lists import packed_length, pair
from .device import capturing, divisor, sent
from .tiles import CHUNK

FIELDS = tl.constexpr(11)
WEIGHT = tl.constexpr(0)  # distance from the first weight, in units of `weight_unit` elements
ROWS = tl.constexpr(1)  # N
COLS = tl.constexpr(2)  # K, in units of `cols_unit`
STRIDE = tl.constexpr(3)  # of a row, in units of `stride_unit`
KEEP = tl.constexpr(4)  # distance of the number of kept blocks from the first one, in elements
BLOCK0 = tl.constexpr(5)  # first key, and first place of the mask
LIST0 = tl.constexpr(6)  # first place of the lists
TILE0 = tl.constexpr(7)  # first program of the keys
CHUNK0 = tl.constexpr(8)  # first program of the histograms
STRIP0 = tl.constexpr(9)  # first program of the lists
SCORE = tl.constexpr(10)  # distance of the scores from the first one's, in elements

KEPT = 256  # groups: whoever captures a step has asked for all of its groups in the step before
ALIGN = 16  # masks of a group begin at multiples of it: Triton compiles for one alignment, and loads are wide


class Group(NamedTuple):
    """A table and the sizes that its launches need."""

    table: Tensor  # [weights, FIELDS] int64
    tiles: Tensor  # owner of every program of the keys, int32
    chunks: Tensor  # of the histograms
    strips: Tensor  # of the lists
    weight_unit: int
    cols_unit: int
    stride_unit: int
    grids: tuple[tuple[int, int], ...]
    blocks: tuple[int, ...]  # BLOCK0 of each weight, and the length of the whole
    lists: tuple[int, ...]  # LIST0 of each weight, and the length of the whole


class Place(NamedTuple):
    """What the table depends on, of one weight."""

    address: int
    rows: int
    cols: int
    stride: int
    keep: int  # address of the number of kept blocks
    score: int = 0  # of the scores, where there are any


def place(w: Tensor, keep: Tensor, scores: Tensor | None = None) -> Place:
    """Where a weight [N, K] with contiguous rows, its number of kept blocks and its scores lie."""
    return Place(w.data_ptr(), w.shape[0], w.shape[1], w.stride(0), keep.data_ptr(), 0 if scores is None else scores.data_ptr())


def _up(n: int, to: int) -> int:
    return -(-n // to) * to


def _owners(counts: list[int], device: torch.device) -> Tensor:
    return sent(torch.repeat_interleave(torch.arange(len(counts), dtype=torch.int32, device="cpu"), torch.tensor(counts, device="cpu")), device)


_captured: dict[tuple[Any, ...], Group] = {}


def group_of(places: tuple[Place, ...], itemsize: int, block: tuple[int, int], tile: tuple[int, int], device: torch.device) -> Group:
    """The table of weights of one dtype in one block. What a CUDA graph has captured lies where it replays, whatever is asked for afterwards."""
    key = places, itemsize, block, tile, device
    found = _captured.get(key) or _made(*key)
    if capturing(device):
        _captured[key] = found
    return found


@lru_cache(maxsize=KEPT)
def _made(places: tuple[Place, ...], itemsize: int, block: tuple[int, int], tile: tuple[int, int], device: torch.device) -> Group:
    """The table of weights of one dtype in one block. Cost: four small copies to the device, once for these places; no host sync.

    They are in the order of the stream that asks first: as for the masks, another one has to wait for it.
    """
    first = places[0]
    distances = [(p.address - first.address) // itemsize for p in places]
    aligned = all(p.address % 16 == 0 for p in places)
    unit, cols_unit = (16 // itemsize if aligned else 1), min(divisor(p.cols) for p in places)
    stride_unit = min(divisor(p.stride) for p in places)
    grids = [grid_shape((p.rows, p.cols), block) for p in places]
    tiles = [-(-p.rows // tile[0]) * -(-p.cols // tile[1]) for p in places]
    chunks = [-(-nb * kb // CHUNK) for nb, kb in grids]
    strips = [sum(lay.strips for lay in pair(g, block)) for g in grids]
    rows, at = [], [0, 0, 0, 0, 0]
    blocks, lists = [], []
    for i, p in enumerate(places):
        blocks.append(at[0])
        lists.append(at[1])
        rows.append([distances[i] // unit, p.rows, p.cols // cols_unit, p.stride // stride_unit, (p.keep - first.keep) // 8, *at, (p.score - first.score) // 4])
        steps = (_up(grids[i][0] * grids[i][1], ALIGN), packed_length(grids[i], block), tiles[i], chunks[i], strips[i])
        at = [a + s for a, s in zip(at, steps, strict=True)]
    return Group(
        sent(torch.tensor(rows, dtype=torch.int64, device="cpu"), device), _owners(tiles, device), _owners(chunks, device), _owners(strips, device),
        unit, cols_unit, stride_unit, tuple(grids), (*blocks, at[0]), (*lists, at[1]),
    )  # fmt: skip
