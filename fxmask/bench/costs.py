"""FLOP and bytes of a cell, from the closed forms of `kernels.cost`, with the tiles that the launchers choose."""

from __future__ import annotations

from typing import Any

from ..errors import UnsupportedError
from ..kernels import cost
from ..kernels.cost import Cost
from ..kernels.dispatch import triton_ops
from ..kernels.grid import kept_elements
from ..kernels.lists import STEP
from .inputs import Inputs

PARTS = {"step": ("forward", "dx", "dw")}


def _matmul(i: Inputs, op: str, tile: Any, splits: int) -> Cost:
    shape, item, m, launch = (i.cell.N, i.cell.K), i.w.element_size(), i.cell.M, triton_ops().launch
    tile = tile or launch.candidates(i.w.dtype, i.block, op == "dx", i.cell.dtype == "tf32")[0]
    found = cost.lists_of(i.mask.cpu(), shape, i.block, op == "dx", tile.strip)
    if op != "dw":
        return cost.list_matmul(found, m, item, tile_tokens=tile.tokens, step=tile.step, predicated=tile.tma)
    lay, features = found.layout, launch.TILE_FEATURES
    splits = splits or launch.splits_of(m, lay.strips * -(-lay.units // max(1, features // lay.unit)))
    total = cost.sampled_matmul(found, m, item, splits=splits, tile_tokens=min(STEP, tile.step), tile_features=features) + cost.zero_fill(shape, item)
    return total if splits == 1 else total + cost.sum_splits(shape, i.block, found.kept, item, splits=splits)


def _selection(blocks: int, triton: bool) -> Cost:
    refresh = triton_ops().refresh if triton else None
    if refresh is None or blocks <= refresh.SELECT_MAX:
        return cost.select(blocks)
    total = cost.write_mask(blocks, refresh.CHUNK, ties_split=False)
    for digit in range(3):
        total += cost.histogram(blocks, digit, refresh.CHUNK)
    return total


def _metadata(i: Inputs) -> Cost:
    if i.cell.phase == "block_index":
        return cost.block_keys((i.cell.N, i.cell.K), i.block, i.w.element_size()) + _selection(i.mask.numel(), i.cell.provider == "fxmask_triton")
    grid = (i.mask.shape[0], i.mask.shape[1])
    return cost.strip_lists(grid, i.block) + cost.order(grid, i.block)


def _columns(total: Cost) -> dict[str, int]:
    return {"flop_useful": total.flop_useful, "flop_issued": total.flop_issued, "bytes_min": total.bytes_min, "bytes_req": total.bytes_req}


def triton_cost(i: Inputs, tile: Any = None, splits: int = 0) -> dict[str, int]:
    """All four counts of a matmul op by our kernels, with another tile or another number of splits than the launchers choose; empty without Triton."""
    total = Cost()
    try:
        for op in PARTS.get(i.cell.op, (i.cell.op,)):
            total += _matmul(i, op, tile, splits)
    except UnsupportedError:
        return {}
    return _columns(total)


def cost_of(i: Inputs) -> dict[str, int]:
    """flop_useful, flop_issued, bytes_min, bytes_req of a cell, as far as they are known for its provider.

    Of a library's dense or sparse matmul only the mathematics is known: no requested bytes, and issued FLOP for the dense ones.
    """
    c = i.cell
    if c.op == "metadata":
        total = _metadata(i)
        return _columns(total) if c.provider == "fxmask_triton" else {"bytes_min": total.bytes_min}
    if c.provider == "fxmask_triton":
        return triton_cost(i)
    n = len(PARTS.get(c.op, (c.op,)))
    kept = c.N * c.K if c.provider == "dense" else int(kept_elements(i.mask, (c.N, c.K), i.block))
    least = n * i.w.element_size() * (c.M * c.K + c.M * c.N + kept)
    known = {"flop_useful": 2 * n * c.M * kept, "bytes_min": least}
    return known if c.provider.startswith("torch") else {**known, "flop_issued": 2 * n * c.M * c.N * c.K}
