"""Block dropout by the kernels of the weight masks; functions as in `kernels.dropout`. X is the sparse operand here, and so takes W's place:

| op | kernel | its x | its w, of which the lists tell | its y |
| --- | --- | --- | --- | --- |
| y = s (X∘m) W^T + b | list matmul | W | X, strips of tokens | y, stored transposed |
| dX = s (dY W)∘m | sampled matmul | dY, whose reduction axis lies inner, by W | kept blocks of dX | dX, zeros elsewhere |
| dW = s dY^T (X∘m) | list matmul, transposed lists | dY, read transposed | X, strips of features | dW |

A dropped block of X is never loaded, one of dX never computed. The lists cut m into strips and steps, each direction by itself, so that the blocks of the mask
and the tiles of forward and backward are chosen independently. Other blocks, and odd numbers of features, are masked and scaled in one pass and multiplied
densely: right, and no FLOP saved.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

import triton

from ..lists import layout, skips
from ..reference import rows
from . import launch, refresh
from .device import aligned, allows_tf32, divisor, rows_of
from .draw import draw as draw
from .masked_dense import mask_cast
from .tiles import splits_of, strip_for, tile_for


def scale_of(p: float) -> float:
    """s, which keeps the expected value."""
    return 1 / (1 - p)


def _grid(keep: Tensor) -> tuple[int, int]:
    return keep.shape[0], keep.shape[1]


def linear(x: Tensor, w: Tensor, bias: Tensor | None, keep: Tensor, block: tuple[int, int], p: float, lists: Tensor | None = None) -> Tensor:
    """y, (..., N)."""
    flat, (n, k) = rows(x), w.shape
    if not skips("forward", w.shape, block):
        return F.linear(mask_cast(flat, keep, block, x.dtype, scale=scale_of(p)), w, bias).view(*x.shape[:-1], n)
    launch.fit_together(keep, lists, x=x, w=w, bias=bias)
    flat, w, tf32 = aligned(rows_of(flat)), aligned(rows_of(w)), allows_tf32(x)
    y = torch.empty(len(flat), n, dtype=x.dtype, device=x.device)
    launch.launch_list_matmul(
        w, flat, bias if bias is None else bias.expand(n).contiguous(), y, refresh.strip_lists(keep, block) if lists is None else lists, _grid(keep), block,
        False, tile_for(x.dtype, strip_for(block, False), tf32), (1, len(flat), k), n, w.stride(0), units=(1, divisor(k)), y_inner=True, bias_m=True,
        tf32=tf32, scale=scale_of(p),
    )  # fmt: skip
    return y.view(*x.shape[:-1], n)


def dx(gy: Tensor, w: Tensor, keep: Tensor, block: tuple[int, int], p: float, lists: Tensor | None = None) -> Tensor:
    """dX, (..., K)."""
    flat, k = rows(gy), w.shape[1]
    if not skips("dx", w.shape, block):
        product = torch.matmul(flat, w)
        return mask_cast(product, keep, block, product.dtype, out=product, scale=scale_of(p)).view(*gy.shape[:-1], k)
    turned = aligned(rows_of(flat)).t()[None]  # [1, N, M]: what is summed over lies side by side
    out = launch.sampled_matmul(turned, w[None], keep, block, tf32=allows_tf32(gy), lists=lists, inner=(True, False), scale=scale_of(p))
    return out.view(*gy.shape[:-1], k)


def dw(gy: Tensor, x: Tensor, keep: Tensor, block: tuple[int, int], p: float, lists: Tensor | None = None, splits: int = 0) -> Tensor:
    """dW, (N, K). `splits` shares of the tokens are added in a fixed order; 0 chooses enough of them to fill the device."""
    g, flat = rows(gy), rows(x)
    n, k = g.shape[1], flat.shape[1]
    if not skips("dw", (n, k), block):
        return g.t() @ mask_cast(flat, keep, block, x.dtype, scale=scale_of(p))
    launch.fit_together(keep, lists, gy=gy, x=x)
    g, flat, tf32 = aligned(rows_of(g)), aligned(rows_of(flat)), allows_tf32(x)
    tile = tile_for(x.dtype, strip_for(block, True), tf32)
    splits = splits or splits_of(len(flat), triton.cdiv(n, tile.tokens) * layout(_grid(keep), block, True).strips)
    out = torch.empty(n, k, dtype=x.dtype, device=x.device)
    parts = out if splits == 1 else torch.empty(splits, n, k, dtype=torch.float32, device=x.device)
    launch.launch_list_matmul(
        g, flat, None, parts, refresh.strip_lists(keep, block) if lists is None else lists, _grid(keep), block, True, tile, (1, k, len(flat)), n, g.stride(0),
        units=(divisor(k), 1), x_inner=True, tf32=tf32, scale=scale_of(p), splits=splits,
    )  # fmt: skip
    if splits > 1:
        launch.sum_splits(parts, out, None, (1, 1))
    return out
