"""Launch of the matmul over pruned inputs: from tensors to grids. `kernels.prune_ops` decides when it runs."""

from __future__ import annotations

import torch
from torch import Tensor

import triton

from .. import prune
from ..lists import LISTED, layout, listed, unpack
from . import device, launch, refresh
from .device import aligned, divisor, rows_of
from .masked_dense import zero_masked
from .pruned_matmul import pruned_matmul_kernel
from .tiles import TILE_FEATURES, other_strip, splits_of, tile_for


def takes(gy: Tensor, values: Tensor, turned: bool) -> bool:
    """Whether the kernel takes a pruned input: blocks of `kernels.lists.LISTED` along the features, even rows of dY, which copies of 4 bytes reach."""
    return values.shape[2] in LISTED and not turned and gy.shape[-1] % 2 == 0 and 0 < values.shape[0] * values.shape[1] < 2**31


def warps_of(block: int) -> int:
    """A tile of 16 or 32 features is copied in whole pieces by few threads alone."""
    return 4 if block <= 32 else 8


def pruned_dw(
    gy: Tensor, values: Tensor, index: Tensor, shape: tuple[int, ...], mask: Tensor | None = None, block: tuple[int, int] = (1, 1),
    lists: Tensor | None = None, tf32: bool = False, splits: int = 0, by_strip: tuple[Tensor, Tensor, Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """dW = dY^T X_s (N, K) of what `takes` takes: gy (..., N); values, index: the kept blocks of an input of `shape` (..., K), see `kernels.prune`.

    mask: bool [NB, KB], in blocks of `block`: zeros elsewhere. Blocks of `kernels.lists.LISTED` are never multiplied where they are masked; with others the
    product is computed whole and masked then. lists: the mask's, packed; used where these are the strips of the input.
    splits: shares of a strip's kept blocks, added in a fixed order; 0 chooses enough of them to fill the device. by_strip: of `kernels.prune.strip_rows`, made
    here where it is not given.
    """
    launch.fit_together(index, mask, lists, gy=gy, values=values)
    _, rows_of_sample, k = prune.sample_shape(shape, False)
    n, b = gy.shape[-1], values.shape[2]
    strips = triton.cdiv(k, b)
    rows, slots, begins = by_strip or prune.strip_rows(index, rows_of_sample, strips)
    gy, values = aligned(rows_of(gy)), values.contiguous()
    gathered = mask.contiguous() if mask is not None and listed(block) else None
    entries = counts = None
    capacity, unit, col_block = 0, b, b
    if gathered is not None:
        grid = (gathered.shape[0], gathered.shape[1])
        strip = other_strip(b, block, True)
        if lists is None or strip is not None:
            lists = refresh.strip_lists(gathered, block, strip)
        lay = layout(grid, block, True, b)
        entries, counts, _ = unpack(lists, grid, block, True, strip)
        capacity, unit, col_block = lay.capacity, lay.unit, min(lay.row_block, b)
    tiles = triton.cdiv(n, TILE_FEATURES)  # under a mask, too: a block is a power of two, of at most so many features
    splits = splits or splits_of(slots.numel() // strips, tiles * strips)
    result = (torch.empty if gathered is None else torch.zeros)(n, k, dtype=gy.dtype, device=gy.device)
    target = result if splits == 1 else torch.empty(splits, n, k, dtype=torch.float32, device=gy.device)
    tile = tile_for(gy.dtype, b, tf32)
    ieee = gy.dtype == torch.float32 and not tf32
    nm, gm = divisor(n), divisor(gy.stride(0))
    device.launch(
        pruned_matmul_kernel, (tiles * strips, splits), gy, gy, values, target, rows, slots, begins, entries, counts, n // nm, k, gy.stride(0) // gm, capacity,
        strips, splits, n * k, NM=nm, GM=gm, BN=TILE_FEATURES, BT=tile.step, B=b, MASKED=gathered is not None, COL_BLOCK=col_block, UNIT=unit,
        PRECISION="tf32" if tf32 else "ieee", num_warps=warps_of(b), num_stages=2 if ieee else tile.stages,  # as for sampled_matmul
        maxnreg=255,  # else ptxas aims at 128 on sm_80 and sm_100, and spills
    )  # fmt: skip
    if splits > 1:
        launch.sum_splits(target, result, gathered, (1, 1) if gathered is None else block)
    return zero_masked(result, mask, block) if mask is not None and gathered is None else result
