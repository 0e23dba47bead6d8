"""Masks and lists of one weight, or of all weights of a model in one set of launches.

| launches | kernel |
| --- | --- |
| 1 | keys |
| 1, or 5 above 16,384 blocks | selection: one program a weight; or zeros, three histograms, mask |
| 2 | lists of both directions, and their order |

So 4, or 8, for a group of weights of one dtype in one block, however many they are. No host sync, fixed shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

import triton

from ..grid import grid_shape
from ..lists import STEP, fixed_length, pair, strip_of
from ..score import KEY_INF, KEY_NAN, MANTISSA, OFFSET, sum_shift
from . import device
from .group import Group, group_of, place
from .keys import block_keys_kernel
from .selection import BINS, histogram_kernel, select_kernel, write_mask_kernel
from .strip_lists import order_kernel, strip_lists_kernel
from .tiles import CHUNK, SELECT_MAX, keys_tile

LIST_CHUNK = 512  # units of a list that one program takes at a time; more spill
KEY_CONSTANTS = {"MANTISSA": MANTISSA, "OFFSET": OFFSET, "KEY_NAN": KEY_NAN, "KEY_INF": KEY_INF}


def _pow2(n: int) -> int:
    return triton.next_power_of_2(n)


def _floats(w: Tensor) -> Tensor:
    return w.detach().float() if w.dtype == torch.float64 else device.rows_of(w.detach())


def block_keys(w: Tensor, block: tuple[int, int]) -> Tensor:
    """Keys of `fro`, int32 [NB, KB]; equal to kernels.score.block_keys. `w` (N, K), block sides powers of two."""
    w = _floats(w)
    (n, k), (tn, tk) = w.shape, keys_tile(block)
    keys = torch.empty(grid_shape((n, k), block), dtype=torch.int32, device=w.device)
    km, wm = device.divisor(k), device.divisor(w.stride(0))
    _launch_keys((triton.cdiv(n, tn) * triton.cdiv(k, tk),), w, keys, None, None, n, k // km, w.stride(0) // wm, block, AT=1, KM=km, WM=wm)
    return keys


def _launch_keys(grid: tuple[int], w: Tensor, keys: Tensor, table: Any, owner: Any, n: int, k: int, stride: int, block: tuple[int, int], **units: int) -> None:
    (bh, bw), (tn, tk) = block, keys_tile(block)
    device.launch(
        block_keys_kernel, grid, w, w, keys, table, owner, n, k, stride, **units, **KEY_CONSTANTS, SHIFT=sum_shift(bh * bw), BH=bh, BW=bw, TN=tn, TK=tk,
        GROUPED=table is not None, num_warps=16 if tn * tk > 8192 else 8, enable_fp_fusion=False,
    )  # fmt: skip


def select(keys: Tensor, keep: Tensor, scores: Tensor | None = None) -> Tensor:
    """Mask of the `keep` best keys, bool like `keys`; equal to kernels.select.select_blocks, with `scores` to select_ranked.

    scores: float32 like `keys`, contiguous, of up to `SELECT_MAX` blocks.
    """
    mask = torch.empty(keys.shape, dtype=torch.bool, device=keys.device)
    _select(keys, keep, mask, (keys.numel(),), None, scores=scores)
    return mask


def _select(
    keys: Tensor, keep: Tensor, mask: Tensor, sizes: Sequence[int], group: Group | None, block: tuple[int, int] = (1, 1), scores: Tensor | None = None
) -> None:
    """Selection for one weight (`group` None) or for the weights of a group, in place in `mask`; by scores before keys where there are any."""
    n, bits = sizes[0], mask.view(torch.int8)
    table, owner, km = (None, None, 1) if group is None else (group.table, group.chunks, group.cols_unit)
    shared = {"KM": km, "BH": block[0], "BW": block[1], "GROUPED": group is not None}
    if max(sizes) <= SELECT_MAX:
        size = max(32, _pow2(max(sizes)))
        warps = min(16, max(1, size // 512))
        scored = {"SCORED": scores is not None, "CH": size, "INDEX_BITS": size.bit_length() - 1}
        device.launch(select_kernel, (len(sizes),), keys, keys, scores, keep, bits, table, n, **scored, **shared, num_warps=warps)
        return
    chunks = sum(triton.cdiv(size, CHUNK) for size in sizes)
    bins = torch.zeros(len(sizes), 3, BINS.value, dtype=torch.int32, device=keys.device)
    for digit in range(3):
        device.launch(histogram_kernel, (chunks,), keys, keys, keep, bins, table, owner, n, DIGIT=digit, CH=CHUNK, **shared, num_warps=8)
    device.launch(write_mask_kernel, (chunks,), keys, keys, keep, bins, bits, table, owner, n, CH=CHUNK, **shared, num_warps=8)


def strip_lists(mask: Tensor, block: tuple[int, int], strip: int | None = None) -> Tensor:
    """Packed lists of a mask, equal to kernels.lists.packed."""
    mask = mask.contiguous()
    grid = (mask.shape[0], mask.shape[1])
    lists = torch.zeros(fixed_length(grid, block, strip), dtype=torch.int32, device=mask.device)
    n, k = grid[0] * block[0], grid[1] * block[1]
    _launch_lists(mask, lists, None, None, n, k, 1, (grid,), block, strip)
    return lists


def _launch_lists(
    mask: Tensor, lists: Tensor, table: Any, owner: Any, n: int, k: int, km: int, grids: tuple[tuple[int, int], ...], block: tuple[int, int],
    strip: int | None = None,
) -> None:  # fmt: skip
    programs, longest, most = _list_programs(grids, block, strip)
    size, order = min(LIST_CHUNK, _pow2(longest)), min(256, _pow2(most))
    widths = {"STRIP_F": strip or strip_of(block[0]), "STRIP_T": strip or strip_of(block[1])}
    shared = {"KM": km, "BH": block[0], "BW": block[1], **widths, "STEP": STEP, "GROUPED": table is not None}
    device.launch(strip_lists_kernel, (programs,), mask, mask.view(torch.int8), lists, table, owner, n, k, CH=size, **shared, num_warps=4)
    device.launch(order_kernel, (programs,), mask, lists, table, owner, n, k, CH=order, **shared, num_warps=1)


@lru_cache(maxsize=1024)  # asked in every forward that builds its mask
def _list_programs(grids: tuple[tuple[int, int], ...], block: tuple[int, int], strip: int | None) -> tuple[int, int, int]:
    """Programs of the lists of these masks, the entries of the longest list, and the most strips of a direction."""
    pairs = [lay for grid in grids for lay in pair(grid, block, strip)]
    return sum(lay.strips for lay in pairs), max(lay.capacity for lay in pairs), max(lay.strips for lay in pairs)


def refresh_group(
    weights: Sequence[Tensor], keeps: Sequence[Tensor], block: tuple[int, int], scores: Sequence[Tensor] | None = None
) -> list[tuple[Tensor, Tensor]]:
    """Masks (`fro`, ties to the lowest index) and packed lists of weights [N, K] of one dtype on one device, in one set of launches.

    keeps: 0-d int64 each; scores: float32 [NB, KB] each, contiguous, of up to `SELECT_MAX` blocks, by which masks go before they go by norms.
    Returns a (mask bool [NB, KB], lists int32) for each weight, views of two tensors.
    """
    ws = [_floats(w) for w in weights]
    first = ws[0]
    places = tuple(place(*of) for of in zip(ws, keeps, [None] * len(ws) if scores is None else scores, strict=True))
    group = group_of(places, first.element_size(), block, keys_tile(block), first.device)
    keys = torch.empty(group.blocks[-1], dtype=torch.int32, device=first.device)
    mask = torch.empty(group.blocks[-1], dtype=torch.bool, device=first.device)
    lists = torch.zeros(group.lists[-1], dtype=torch.int32, device=first.device)
    units = {"AT": group.weight_unit, "KM": group.cols_unit, "WM": group.stride_unit}
    _launch_keys((group.tiles.numel(),), first, keys, group.table, group.tiles, 0, 0, 0, block, **units)
    _select(keys, keeps[0], mask, [nb * kb for nb, kb in group.grids], group, block, None if scores is None else scores[0])
    _launch_lists(mask, lists, group.table, group.strips, 0, 0, group.cols_unit, tuple(group.grids), block)
    return [
        (mask[b : b + nb * kb].view(nb, kb), lists[at : at + fixed_length((nb, kb), block)])
        for (nb, kb), b, at in zip(group.grids, group.blocks, group.lists, strict=False)
    ]
