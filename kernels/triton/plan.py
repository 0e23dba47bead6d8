"""Programs, numbers and constants of the matmuls' launches: of sizes and strides alone, so that layers that are alike work them out once."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import triton

from ..lists import STRIP, layout
from .device import divisor
from .tiles import TOKEN_GROUP, Tile, splits_of

REMEMBERED = 4096  # of each; a number of tokens that changes makes others


@lru_cache(maxsize=REMEMBERED)
def list_matmul_plan(
    grid: tuple[int, int], block: tuple[int, int], transposed: bool, tile: Tile, sizes: tuple[int, int, int], tokens: int, stride: int, stride_w: int,
    batch: int, units: tuple[int, int], single: bool, *, x_inner: bool, y_inner: bool, act: str, tf32: bool, bias: bool, bias_m: bool, tma: bool,
) -> tuple[int, tuple[int, ...], dict[str, Any]]:  # fmt: skip
    """(programs, numbers, constants) of a `list_matmul_kernel`; arguments as in `launch.launch_list_matmul`, `single`: in float32."""
    (m, n, k), (nm, km), lay = sizes, units, layout(grid, block, transposed, tile.strip)
    tiles, step, strip = triton.cdiv(m * tokens, tile.tokens), tile.step, tile.strip
    xm, wm, im = (divisor(i) for i in (stride, stride_w, tokens))
    im = min(im, divisor(batch)) if x_inner or y_inner else 1
    numbers = (m, n // nm, k // km, stride // xm, stride_w // wm, tokens // im, batch // im, lay.capacity, lay.strips, tiles)
    return tiles * lay.strips, numbers, dict(
        NM=nm, KM=km, XM=xm, WM=wm, IM=im, X_INNER=x_inner, Y_INNER=y_inner, TMA=tma, W_ROWS=not transposed, BM=tile.tokens, BN=strip, STEP=step,
        ROW_BLOCK=min(lay.row_block, strip), UNIT_W=lay.unit, BITS=lay.group > 1 or lay.unit < step, RAGGED=lay.units * lay.unit != k,
        HAS_BIAS=bias, BIAS_M=bias_m, ACT=act, GROUP=max(1, TOKEN_GROUP // tile.tokens), PRECISION="tf32" if tf32 else "ieee",
        num_warps=tile.warps, num_stages=tile.stages,
        maxnreg=255 if x_inner or (strip < STRIP and single) else None,  # else ptxas aims at 128 or 64 on sm_80 and sm_100, and spills
    )  # fmt: skip


@lru_cache(maxsize=REMEMBERED)
def sampled_matmul_plan(
    grid: tuple[int, int], block: tuple[int, int], tile: Tile, features: int, sizes: tuple[int, int, int], tokens: int, strides: tuple[int, int, int, int],
    splits: int, *, single: bool, tf32: bool, g_inner: bool, x_inner: bool, told: bool, accumulate: bool,
) -> tuple[int, int, tuple[int | None, ...], dict[str, Any]]:  # fmt: skip
    """(programs, splits, numbers, constants) of a `sampled_matmul_kernel`; arguments as in `launch.sampled_matmul`.

    strides: of gy's batch, gy, x's batch, x. single: in float32. told: the caller says what is inner. accumulate: onto what is there.
    """
    (m, n, k), (batch_g, stride_g, batch_x, stride_x), lay = sizes, strides, layout(grid, block, False, tile.strip)
    q, bt = features // lay.unit, tile.step
    ieee, narrow = single and not tf32, tile.strip < STRIP and tile.stages < 4
    tiles = triton.cdiv(lay.units, q)
    splits = splits or splits_of(m, lay.strips * tiles)
    share = triton.cdiv(triton.cdiv(m, splits), bt) * bt
    nm, km, gm, xm = (divisor(i) for i in (1 if told else n, k, stride_g, stride_x))
    im = min(divisor(i) for i in (tokens, batch_g, batch_x)) if g_inner or x_inner else 1
    numbers = (
        m // im, n // nm, k // km, stride_g // gm, stride_x // xm, tokens // im, None if told else batch_g // im, batch_x // im,
        lay.capacity, tiles, share, n * k,
    )  # fmt: skip
    return lay.strips * tiles, splits, numbers, dict(
        NM=nm, KM=km, GM=gm, XM=xm, IM=im, G_INNER=g_inner, X_INNER=x_inner, BN=tile.strip, BT=bt, ROW_BLOCK=min(lay.row_block, tile.strip), UNIT_W=lay.unit,
        Q=q, ACCUMULATE=accumulate and splits == 1, PRECISION="tf32" if tf32 else "ieee", num_warps=tile.warps,
        num_stages=2 if ieee else tile.stages,  # more buffers spill, and plain float32 arithmetic hides one load
        # else ptxas aims at 128 on sm_100 and sm_80, at 80 for float32, and spills; with offsets of 64 bits it spills where it is told anything
        maxnreg=255 if tf32 or (narrow and not ieee) else 128 if narrow and n * k < 2**31 else None,
    )  # fmt: skip
