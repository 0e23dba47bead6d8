"""Launches of the matmuls: from tensors to grids. `kernels.dispatch` decides when they run; masks and lists are launched in `kernels.triton.refresh`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import triton

from ..errors import ShapeError, UnsupportedError
from ..lists import unpack
from ..strides import tokens_inner
from . import device, refresh
from .device import aligned, divisor, rows_of
from .list_matmul import list_matmul_kernel
from .plan import list_matmul_plan, sampled_matmul_plan
from .sampled_matmul import sampled_matmul_kernel, sum_splits_kernel
from .tiles import SUM_TILE, TILE_FEATURES, Tile, best_dw_tile, best_tile, other_strip, takes_tma


def _descriptor(t: Tensor, box: list[int]) -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor.from_tensor(t, box)


def fit_together(*others: Tensor | None, **operands: Tensor | None) -> None:
    """Raise UnsupportedError for operands of several dtypes, ShapeError where these or `others`, which have dtypes of their own, lie on several devices.

    A pointer into another GPU's memory would pass: there it is an address like any other.
    """
    found = {name: t.dtype for name, t in operands.items() if t is not None}
    places = {t.device for t in (*operands.values(), *others) if t is not None}
    if len(places) > 1:
        named = {name: str(t.device) for name, t in operands.items() if t is not None}
        named |= {"mask and lists": ", ".join(sorted({str(t.device) for t in others if t is not None}))} if any(t is not None for t in others) else {}
        raise ShapeError(f"impl='triton' reads operands on one device: expected that, got {named}; move the input, or the model, with .to(device).")
    if len(set(found.values())) > 1:
        raise UnsupportedError(f"impl='triton' multiplies operands of one dtype: expected that, got {found}; cast them.")
    if device.interpreting() and torch.bfloat16 in found.values():
        raise UnsupportedError("Triton's interpreter multiplies bfloat16 wrongly: expected float16 or float32 there; use impl='reference'.")


def list_matmul(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    mask: Tensor,
    block: tuple[int, int],
    transposed: bool,
    act: str = "none",
    tf32: bool = False,
    lists: Tensor | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """y = act(x (W∘M)^T + bias), or x (W∘M) where `transposed` (dX): x (..., K) -> y (..., N), in x's dtype.

    `lists`: those of the mask, packed, in strips as wide as the tile's; made here where there are none. y is contiguous, or has its tokens contiguous where
    x has (`kernels.strides`).
    """
    fit_together(mask, lists, x=x, w=w, bias=bias)
    grid = (mask.shape[0], mask.shape[1])
    inner, shape, w = tokens_inner(x), x.shape[:-1], aligned(rows_of(w))
    n, k = w.shape[::-1] if transposed else w.shape
    if inner:
        m, tokens, batch, stride = x.shape[0], x.shape[1], x.stride(0), x.stride(2)
        y = torch.empty(m, n, tokens, dtype=x.dtype, device=x.device).transpose(1, 2)
    else:
        x = aligned(rows_of(x))
        m, tokens, batch, stride = x.shape[0], 1, 0, x.stride(0)
        y = torch.empty((*shape, n), dtype=x.dtype, device=x.device)
    if tile is None:
        described = all(t.stride(0) >= t.shape[1] and t.stride(0) * t.element_size() % 16 == 0 for t in (x, w))
        tile = best_tile(x.dtype, block, transposed, (m * tokens, n, k), tf32=tf32, inner=inner, tma=described, act=act != "none", major=device.major(x))
    if lists is None:
        lists = refresh.strip_lists(mask, block, other_strip(tile.strip, block, transposed))
    tma = tile.tma and m * tokens > 0
    if tma and (inner or not takes_tma(block, transposed, tile.strip)):
        raise ShapeError(f"a TMA tile takes blocks of one strip and one step, and contiguous features: got block {block}, strides {x.stride()}.")
    launch_list_matmul(
        x, w, bias if bias is None else bias.expand(n).contiguous(), y, lists, grid, block, transposed, tile, (m, n, k), tokens, stride, batch,
        units=(divisor(n), divisor(k)), x_inner=inner, y_inner=inner, tma=tma, act=act, tf32=tf32,
    )  # fmt: skip
    return y


def launch_list_matmul(
    x: Tensor, w: Tensor, bias: Tensor | None, y: Tensor, lists: Tensor, grid: tuple[int, int], block: tuple[int, int], transposed: bool, tile: Tile,
    sizes: tuple[int, int, int], tokens: int, stride: int, batch: int = 0, *, units: tuple[int, int], x_inner: bool = False, y_inner: bool = False,
    bias_m: bool = False, tma: bool = False, act: str = "none", tf32: bool = False, scale: float | None = None, splits: int = 1,
) -> None:  # fmt: skip
    """The launch itself, from operands that lie as the kernel wants them; its docstring explains what is not explained here.

    sizes: the kernel's M, N and K. tokens, stride, batch: `inner * IM`, 1 without either INNER, and x's strides. units: NM and KM, powers of two that divide
    N and K; 1 compiles less often, and slows nothing where that axis is contiguous in no operand.
    """
    parts = unpack(lists, grid, block, transposed, other_strip(tile.strip, block, transposed))
    operands = (_descriptor(x, [tile.tokens, tile.step]), _descriptor(w, [tile.step, tile.strip] if transposed else [tile.strip, tile.step])) if tma else (x, w)
    form = {"x_inner": x_inner, "y_inner": y_inner, "act": act, "tf32": tf32, "bias": bias is not None, "bias_m": bias_m, "tma": tma}
    programs, numbers, constants = list_matmul_plan(
        grid, block, transposed, tile, sizes, tokens, stride, w.stride(0), batch, units, x.dtype == torch.float32, **form
    )
    split_stride = sizes[1] * sizes[0] * tokens if splits > 1 else None
    device.launch(list_matmul_kernel, (programs, splits), x, *operands, bias, y, *parts, *numbers, scale, split_stride, **constants)


def sampled_matmul(
    gy: Tensor,
    x: Tensor,
    mask: Tensor,
    block: tuple[int, int],
    out: Tensor | None = None,
    splits: int = 0,
    tf32: bool = False,
    lists: Tensor | None = None,
    tile: Tile | None = None,
    inner: tuple[bool, bool] | None = None,
    scale: float | None = None,
    features: int = TILE_FEATURES,
) -> Tensor:
    """dW = scale gy^T x for the kept blocks: gy (..., N), x (..., K) -> [N, K]. New and zero elsewhere, or added to `out`, whose other blocks are not touched.

    `splits` shares of the tokens are added in a fixed order; 0 chooses enough of them to fill the device. `features`: of a given `tile`. `inner`: which of gy
    and x are read with their tokens side by side, and then both are 3-D, of one batch, and lie so; None: as `kernels.strides` says.
    """
    fit_together(mask, lists, gy=gy, x=x)
    if out is not None and (out.shape != (gy.shape[-1], x.shape[-1]) or not out.is_contiguous() or out.device != x.device):
        expected = f"contiguous ({gy.shape[-1]}, {x.shape[-1]}) on {x.device}"
        raise ShapeError(f"sampled_matmul adds to `out`: expected it {expected}, got {tuple(out.shape)} with strides {out.stride()} on {out.device}.")
    mask = mask.contiguous()
    grid, (g_inner, x_inner) = (mask.shape[0], mask.shape[1]), inner or (tokens_inner(gy), tokens_inner(x))
    if tile is None:
        tile, features = best_dw_tile(x.dtype, block, x.shape[-1], tf32=tf32, inner=g_inner or x_inner, major=device.major(x))
    strip = other_strip(tile.strip, block, False)
    if lists is None:
        lists = refresh.strip_lists(mask, block, strip)
    tokens = x.shape[1] if g_inner or x_inner else 1
    (gy, batch_g, stride_g), (x, batch_x, stride_x) = (_operand(t, i) for t, i in ((gy, g_inner), (x, x_inner)))
    n, k, m = gy.shape[-1], x.shape[-1], x.shape[:-1].numel()
    result = torch.zeros(n, k, dtype=x.dtype, device=x.device) if out is None else out
    strides = batch_g, stride_g, batch_x, stride_x
    form = {"single": x.dtype == torch.float32, "tf32": tf32, "g_inner": g_inner, "x_inner": x_inner, "told": bool(inner), "accumulate": out is not None}
    programs, splits, numbers, constants = sampled_matmul_plan(grid, block, tile, features, (m, n, k), tokens, strides, splits, **form)
    target = result if splits == 1 else torch.empty(splits, n, k, dtype=torch.float32, device=x.device)
    device.launch(sampled_matmul_kernel, (programs, splits), x, gy, x, target, *unpack(lists, grid, block, False, strip), *numbers, scale, **constants)
    if splits > 1:
        sum_splits(target, result, mask, block, out is not None)
    return result


def sum_splits(parts: Tensor, out: Tensor, mask: Tensor | None, block: tuple[int, int], accumulate: bool = False) -> None:
    """out = sum of parts [splits, N, K] in order, for the kept blocks, or for all without a mask; added to what is there where `accumulate`."""
    splits, n, k = parts.shape
    bits, kb = (None, 1) if mask is None else (mask.view(torch.int8), mask.shape[1])
    device.launch(
        sum_splits_kernel, (triton.cdiv(n, SUM_TILE[0]), triton.cdiv(k, SUM_TILE[1])), out, parts, out, bits, n, k, kb, n * k, splits,
        BH=block[0], BW=block[1], TN=SUM_TILE[0], TK=SUM_TILE[1], ACCUMULATE=accumulate,
    )  # fmt: skip


def _operand(t: Tensor, inner: bool) -> tuple[Tensor, int, int]:
    """An operand of dW, its batch stride and the stride of its other axis."""
    if inner:
        return t, t.stride(0), t.stride(2)
    t = aligned(rows_of(t))
    return t, 0, t.stride(0)
