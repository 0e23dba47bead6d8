"""FLOP and bytes of a cell, from the closed forms of `kernels.layer_cost`, with the tiles that the launchers choose."""

from __future__ import annotations

from typing import Any

from ..errors import UnsupportedError
from ..kernels import layer_cost
from ..kernels.cost import Cost
from ..kernels.dispatch import triton_ops
from ..kernels.grid import kept_elements
from ..kernels.triton.tiles import TILE_FEATURES
from .cells import products
from .inputs import Inputs


def _columns(total: Cost) -> dict[str, int]:
    return {"flop_useful": total.flop_useful, "flop_issued": total.flop_issued, "bytes_min": total.bytes_min, "bytes_req": total.bytes_req}


def triton_cost(i: Inputs, tile: Any = None, splits: int = 0, features: int = TILE_FEATURES) -> dict[str, int]:
    """All four counts of a matmul op by our kernels, with other tiles (dW's with its features) or splits than the launchers choose; empty without Triton."""
    total = Cost()
    try:
        triton_ops()
        mask, shape, tf32 = i.mask.cpu(), (i.cell.N, i.cell.K), i.cell.dtype == "tf32"
        for op in products(i.cell.op):
            total += layer_cost.by_lists(op, i.cell.M, shape, mask, i.block, i.w.dtype, tf32=tf32, tile=tile, splits=splits, features=features)
    except UnsupportedError:
        return {}
    return _columns(total)


def cost_of(i: Inputs) -> dict[str, int]:
    """flop_useful, flop_issued, bytes_min, bytes_req of a cell, as far as they are known for its provider.

    Of a library's dense or sparse matmul only the mathematics is known: no requested bytes, and issued FLOP for the dense ones.
    """
    c, shape, kernels = i.cell, (i.cell.N, i.cell.K), i.cell.provider == "fxmask_triton"
    if c.op == "metadata":
        lists = c.phase == "lists"
        total = layer_cost.strip_lists(shape, i.block) if lists else layer_cost.block_index(shape, i.block, i.w.element_size(), kernels)
        return _columns(total) if kernels else {"bytes_min": total.bytes_min}
    if kernels:
        return triton_cost(i)
    n = len(products(c.op))
    kept = c.N * c.K if c.provider == "dense" else int(kept_elements(i.mask, shape, i.block))
    least = n * i.w.element_size() * (c.M * c.K + c.M * c.N + kept)
    known = {"flop_useful": 2 * n * c.M * kept, "bytes_min": least}
    return known if c.provider.startswith("torch") else {**known, "flop_issued": 2 * n * c.M * c.N * c.K}
