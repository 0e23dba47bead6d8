"""Launches: from tensors to grids. Plain functions on 2-D tensors; `kernels.dispatch` decides when they run."""

from __future__ import annotations

import os
from collections import Counter
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

import triton

from ..errors import ShapeError, UnsupportedError
from ..grid import grid_shape
from ..lists import LISTED, Layout, layout
from ..score import KEY_INF, KEY_NAN, MANTISSA, OFFSET, sum_shift
from .elementwise import mask_cast_kernel
from .list_matmul import list_matmul_kernel
from .metadata import block_keys_kernel, order_kernel, select_kernel, strip_lists_kernel
from .sampled_matmul import sampled_matmul_kernel, sum_splits_kernel

LAUNCHES: Counter[str] = Counter()  # kernel's name -> launches of this process, for tests and for `explain`
SELECT_MAX = 16_384  # blocks that one program selects among in registers
TOKEN_GROUP = 2048  # tokens whose tiles run together, so that X is read from L2
KEY_CONSTANTS = {"MANTISSA": MANTISSA, "OFFSET": OFFSET, "KEY_NAN": KEY_NAN, "KEY_INF": KEY_INF}
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class Tile(NamedTuple):
    """Sizes of a matmul program."""

    tokens: int
    strip: int
    step: int
    warps: int
    stages: int


def tile_for(dtype: torch.dtype, tf32: bool = False) -> Tile:
    """The tile of a dtype. Every shipped one compiles without spills on sm_80, sm_90 and sm_100 (`make aot`)."""
    if dtype == torch.float32:
        return Tile(128, 128, 32 if tf32 else 16, 8, 3)
    return Tile(128, 128, 64, 8, 3)


def interpreting() -> bool:
    """Whether kernels run in Triton's interpreter, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def why_not(t: Tensor) -> str:
    """Why Triton cannot run on a tensor; empty where it can."""
    if t.dtype not in DTYPES:
        return f"dtype {t.dtype} (expected float16, bfloat16 or float32)"
    if not t.is_cuda and not interpreting():
        return f"a tensor on {t.device.type} (expected a CUDA device, or TRITON_INTERPRET=1 before Triton is imported)"
    return ""


def listed(block: tuple[int, int]) -> bool:
    """Whether the list matmul takes a block; others are masked and cast, then multiplied densely."""
    return block[0] in LISTED and block[1] in LISTED


def _launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    if not all(grid):
        return  # nothing to do, and an empty grid is no legal launch
    LAUNCHES[kernel.fn.__name__] += 1
    first = args[0]
    with torch.cuda.device(first.device) if first.is_cuda else nullcontext():  # Triton launches on the current device
        kernel[grid](*args, **constants)


def _pow2(n: int) -> int:
    return triton.next_power_of_2(n)


def rows_of(t: Tensor) -> Tensor:
    """A 2-D view with its last axis contiguous; a copy where there is none."""
    flat = t.reshape(-1, t.shape[-1])
    return flat if flat.stride(1) == 1 or flat.shape[1] == 1 else flat.contiguous()


def _divisor(stride: int) -> int:
    """The largest power of two up to 16 that divides a stride; passed as a constant, because Triton itself only looks for 16."""
    return next(d for d in (16, 8, 4, 2, 1) if stride % d == 0)


# ---- metadata --------------------------------------------------------------------------------------------------------------------------------------------


def block_keys(w: Tensor, block: tuple[int, int]) -> Tensor:
    """Keys of `fro`, int32 [NB, KB]; equal to kernels.score.block_keys. `w` (N, K), block sides powers of two."""
    (nb, kb), (bh, bw) = grid_shape(w.shape, block), block
    w = w.detach().float() if w.dtype == torch.float64 else rows_of(w.detach())
    keys = torch.empty(nb, kb, dtype=torch.int32, device=w.device)
    tn, tk = max(bh, min(16, 4096 // max(bw, 16))), max(bw, 64)
    grid = (triton.cdiv(w.shape[0], tn), triton.cdiv(w.shape[1], tk))
    constants = dict(KEY_CONSTANTS, SHIFT=sum_shift(bh * bw), BH=bh, BW=bw, TN=tn, TK=tk)
    _launch(block_keys_kernel, grid, w, keys, *w.shape, kb, w.stride(0), **constants, num_warps=8, enable_fp_fusion=False)
    return keys


def select(keys: Tensor, keep: Tensor) -> Tensor:
    """Mask of the `keep` best of at most SELECT_MAX keys, bool like `keys`."""
    n = keys.numel()
    mask = torch.empty(keys.shape, dtype=torch.bool, device=keys.device)
    size = max(32, _pow2(n))
    _launch(select_kernel, (1,), keys, keep, mask.view(torch.int8), n, CH=size, INDEX_BITS=size.bit_length() - 1, num_warps=min(16, max(1, size // 512)))
    return mask


def strip_lists(mask: Tensor, lay: Layout, transposed: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Lists of a mask; equal to kernels.lists.strip_lists."""
    m = mask.t() if transposed else mask
    entries = torch.empty(lay.strips, lay.capacity, dtype=torch.int32, device=mask.device)
    counts = torch.empty(lay.strips, dtype=torch.int32, device=mask.device)
    order = torch.empty_like(counts)
    wide, size = lay.col_block // lay.unit, _pow2(lay.capacity)
    _launch(
        strip_lists_kernel, (lay.strips,), mask.view(torch.int8), entries, counts, lay.rows, lay.units, *m.stride(), lay.capacity,
        STRIP=lay.strip, ROW_BLOCK=lay.row_block, WIDE=wide, G=lay.group, CH=size,
    )  # fmt: skip
    chunk, step = min(64, _pow2(lay.strips)), min(64, _pow2(lay.strips))
    _launch(order_kernel, (triton.cdiv(lay.strips, chunk),), counts, order, lay.strips, CH=chunk, STEP=step)
    return entries, counts, order


# ---- matmuls ---------------------------------------------------------------------------------------------------------------------------------------------


def list_matmul(
    x: Tensor, w: Tensor, bias: Tensor | None, mask: Tensor, block: tuple[int, int], transposed: bool, act: str = "none", tf32: bool = False
) -> Tensor:
    """y = act(x (W∘M)^T + bias), or x (W∘M) where `transposed` (dX): x [M, K] -> y [M, N], in x's dtype."""
    tile = tile_for(x.dtype, tf32)
    lay = layout((mask.shape[0], mask.shape[1]), block, transposed, tile.strip, tile.step)
    entries, counts, order = strip_lists(mask, lay, transposed)
    x, w = rows_of(x), rows_of(w)
    m, (n, k) = x.shape[0], w.shape[::-1] if transposed else w.shape
    y = torch.empty(m, n, dtype=x.dtype, device=x.device)
    tiles = triton.cdiv(m, tile.tokens)
    nm, km, xm, wm = (_divisor(i) for i in (n, k, x.stride(0), w.stride(0)))
    _launch(
        list_matmul_kernel, (tiles * lay.strips,), x, w, bias, y, entries, counts, order, m, n // nm, k // km, x.stride(0) // xm, w.stride(0) // wm,
        lay.capacity, lay.strips, tiles, NM=nm, KM=km, XM=xm, WM=wm, W_ROWS=not transposed, BM=tile.tokens, BN=tile.strip,
        ROW_BLOCK=min(lay.row_block, tile.strip),
        UNIT_W=lay.unit, P=lay.per_step, BITS=lay.group > 1 or lay.per_step > 1, RAGGED=lay.units * lay.unit != k, HAS_BIAS=bias is not None, ACT=act,
        GROUP=max(1, TOKEN_GROUP // tile.tokens), PRECISION="tf32" if tf32 else "ieee", num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return y


def sampled_matmul(gy: Tensor, x: Tensor, mask: Tensor, block: tuple[int, int], out: Tensor | None = None, splits: int = 0, tf32: bool = False) -> Tensor:
    """dW = gy^T x for the kept blocks: gy [M, N], x [M, K] -> [N, K]. New and zero elsewhere, or added to `out`, whose other blocks are not touched.

    `splits` shares of the tokens are added in a fixed order; 0 chooses enough of them to fill the device.
    """
    gy, x = rows_of(gy), rows_of(x)
    tile = tile_for(x.dtype, tf32)
    lay = layout((mask.shape[0], mask.shape[1]), block, False, tile.strip, 64)
    q, bt = max(1, 128 // lay.unit), 32 if x.dtype == torch.float32 else 64
    entries, counts, order = strip_lists(mask, lay, False)
    (m, n), k = gy.shape, x.shape[1]
    accumulate = out is not None
    result = torch.zeros(n, k, dtype=x.dtype, device=x.device) if out is None else out
    tiles = triton.cdiv(lay.units, q)
    splits = splits or max(1, min(-(-264 // (lay.strips * tiles)), m // 1024))
    share = triton.cdiv(triton.cdiv(m, splits), bt) * bt
    target = result if splits == 1 else torch.empty(splits, n, k, dtype=torch.float32, device=x.device)
    gm, xm = _divisor(gy.stride(0)), _divisor(x.stride(0))
    _launch(
        sampled_matmul_kernel, (lay.strips * tiles, splits), gy, x, target, entries, counts, order, m, n, k, gy.stride(0) // gm, x.stride(0) // xm,
        lay.capacity, tiles, share, n * k, GM=gm, XM=xm, BN=tile.strip, BT=bt, ROW_BLOCK=min(lay.row_block, tile.strip), UNIT_W=lay.unit, Q=q,
        ACCUMULATE=accumulate and splits == 1, PRECISION="tf32" if tf32 else "ieee", num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    if splits > 1:
        grid = (triton.cdiv(n, 16), triton.cdiv(k, 128))
        _launch(
            sum_splits_kernel, grid, target, result, mask.view(torch.int8), n, k, mask.shape[1], n * k, splits, BH=block[0], BW=block[1], TN=16, TK=128,
            ACCUMULATE=accumulate,
        )  # fmt: skip
    return result


def mask_cast(w: Tensor, mask: Tensor, block: tuple[int, int], dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """W∘M in `dtype`, in one pass over W; any block. In place where `out` is `w`."""
    w = rows_of(w)
    if out is not None and not out.is_contiguous():
        raise ShapeError(f"mask_cast writes contiguous rows: expected a contiguous `out`, got strides {out.stride()}.")
    result = torch.empty(w.shape, dtype=dtype, device=w.device) if out is None else out
    grid = (triton.cdiv(w.shape[0], 16), triton.cdiv(w.shape[1], 128))
    _launch(mask_cast_kernel, grid, w, mask.view(torch.int8), result, *w.shape, mask.shape[1], w.stride(0), BH=block[0], BW=block[1], TN=16, TK=128)
    return result


def require(t: Tensor) -> None:
    """Raise UnsupportedError unless Triton can run on `t`."""
    reason = why_not(t)
    if reason:
        raise UnsupportedError(f"impl='triton' cannot run on {reason}; use impl='auto' or impl='reference'.")
