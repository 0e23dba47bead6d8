"""FLOP and bytes of a cell, from the closed forms of `kernels.cost`, with the tiles that the launchers choose."""

from __future__ import annotations

from typing import Any

from ..errors import UnsupportedError
from ..kernels import cost
from ..kernels.cost import Cost
from ..kernels.dispatch import triton_ops
from ..kernels.grid import kept_elements
from . import providers
from .inputs import Inputs

PARTS = {"step": ("forward", "dx", "dw")}
DW_STEP, DW_FEATURES, DW_FILL = 64, 128, 264  # `launch.sampled_matmul`: features of a list step and of a tile, programs that fill a device


def splits_of(strips: int, tiles: int, tokens: int) -> int:
    """Shares of the tokens that `launch.sampled_matmul` chooses; tests/unit/test_bench.py compares them with its grids."""
    return max(1, min(-(-DW_FILL // (strips * tiles)), tokens // 1024))


def _matmul(i: Inputs, op: str, tile: Any) -> Cost:
    shape, item, m, mask = (i.cell.N, i.cell.K), i.w.element_size(), i.cell.M, i.mask.cpu()
    if op != "dw":
        both = cost.lists_of(mask, shape, i.block, op == "dx", tile.strip, tile.step)
        return cost.list_matmul(both, m, item, tile_tokens=tile.tokens)
    found = cost.lists_of(mask, shape, i.block, False, tile.strip, DW_STEP)
    lay, tokens = found.layout, 32 if item == 4 else 64
    splits = splits_of(lay.strips, -(-lay.units // max(1, DW_FEATURES // lay.unit)), m)
    total = cost.sampled_matmul(found, m, item, splits=splits, tile_tokens=tokens, tile_features=DW_FEATURES) + cost.zero_fill(shape, item)
    return total if splits == 1 else total + cost.sum_splits(shape, i.block, found.kept, item, splits=splits)


def _metadata(i: Inputs) -> Cost:
    if i.cell.phase == "block_index":
        return cost.block_keys((i.cell.N, i.cell.K), i.block, i.w.element_size()) + cost.select(i.mask.numel())
    total = Cost()
    for lay, _ in providers.list_layouts(i):
        total += cost.strip_lists(lay) + cost.order(lay.strips)
    return total


def cost_of(i: Inputs) -> dict[str, int]:
    """flop_useful, flop_issued, bytes_min, bytes_req of a cell, as far as they are known for its provider.

    Of a library's dense or sparse matmul only the mathematics is known: no requested bytes, and issued FLOP for the dense ones.
    """
    c = i.cell
    if c.op == "metadata":
        total = _metadata(i)
    elif c.provider == "fxmask_triton":
        try:
            tile = triton_ops().launch.tile_for(i.w.dtype, c.dtype == "tf32")
        except (UnsupportedError, AttributeError):
            return {}
        total = Cost()
        for op in PARTS.get(c.op, (c.op,)):
            total += _matmul(i, op, tile)
    else:
        n = len(PARTS.get(c.op, (c.op,)))
        kept = c.N * c.K if c.provider == "dense" else int(kept_elements(i.mask, (c.N, c.K), i.block))
        least = n * i.w.element_size() * (c.M * c.K + c.M * c.N + kept)
        known = {"flop_useful": 2 * n * c.M * kept, "bytes_min": least}
        return known if c.provider.startswith("torch") else {**known, "flop_issued": 2 * n * c.M * c.N * c.K}
    values = {"flop_useful": total.flop_useful, "flop_issued": total.flop_issued, "bytes_min": total.bytes_min, "bytes_req": total.bytes_req}
    return values if c.provider == "fxmask_triton" else {"bytes_min": total.bytes_min}
