"""The ops of activation pruning: a linear that saves its input block-sparse, and dW from that. `kernels.prune` says what is kept, and is the oracle.

y, dX and db are those of the linear, exactly; only dW sees the pruned input. The dense input is free after the forward; where the op that made it holds it
anyway (`kernels.producer`), it is saved itself, which costs nothing, and its kept blocks are taken in the backward. Imported by `kernels.ops`' users.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from . import dense_linear, operands, ops, producer, prune, reference
from .compress_ops import shared, sizes
from .cpu import prune_strips
from .dispatch import form, triton_ops
from .engine import asked_of
from .errors import ShapeError, UnsupportedError
from .inductor import register_fake
from .lean import register_autograd
from .op_rules import follow_autocast, linear_flop
from .prune_plan import plan


def _check(
    x: Tensor, w: Tensor, bias: Tensor | None, values: Tensor, index: Tensor, turned: bool, mask: Tensor | None, block: tuple[int, int], backward: str
) -> None:
    operands.refuse_forward_ad()
    operands.check_features("x", x, w.shape[1])
    if values.dim() != 3 or index.shape != values.shape[:2] or values.dtype != x.dtype:
        got = f"{values.dtype} {tuple(values.shape)} and {tuple(index.shape)}"
        raise ShapeError(f"kept blocks of x: expected {x.dtype} (samples, kept, features) and their numbers (samples, kept), got {got}.")
    samples, _ = sizes(x, values.shape[2], values.shape[1], turned)
    if samples != values.shape[0]:
        raise ShapeError(f"kept blocks of an input {tuple(x.shape)}: expected {samples} samples, got {values.shape[0]}.")
    if mask is not None:
        operands.check_mask(mask, w.shape, block)
        operands.check_bias(bias, w.shape[0])
        operands.check_backward(backward)


@torch.library.custom_op("fxmask::pruned_linear", mutates_args=())
def pruned_linear(
    x: Tensor, w: Tensor, bias: Tensor | None, values: Tensor, index: Tensor, turned: bool, mask: Tensor | None = None,
    block_rows: int = 1, block_cols: int = 1, backward: str = "masked", dense: Tensor | None = None, impl: str = "auto", lists: Tensor | None = None,
    dw_impl: str = "auto",
) -> Tensor:  # fmt: skip
    """y = x W^T + bias, or x (W∘M)^T + bias with a mask, whose backward sees x's kept blocks alone.

    Args:
        x (..., K), w (N, K), bias (N) or None: of one floating dtype. values, index, turned: of `fxmask::compress` of this x.
        mask and what follows it: as `masked_linear`. dw_impl: of `pruned_dw`.

    Returns: y (..., N), contiguous.
    Differentiable: x, w, bias, once; dW is `pruned_dw`, the rest is exact. Raises: ShapeError, ConfigError, and UnsupportedError where an explicit impl cannot
    run on x.
    Cost: the linear.
    """
    block = (block_rows, block_cols)
    _check(x, w, bias, values, index, turned, mask, block, backward)
    form(dw_impl, x)  # raises here rather than in the backward
    if mask is None:
        return dense_linear.forward(x, w, bias)
    operands.check_lists(lists, mask, block)
    return form(impl, x).masked_linear(x, w, bias, mask, block, lists).contiguous()


@register_fake(pruned_linear)
def _(
    x: Tensor, w: Tensor, bias: Tensor | None, values: Tensor, index: Tensor, turned: bool, mask: Tensor | None = None,
    block_rows: int = 1, block_cols: int = 1, backward: str = "masked", dense: Tensor | None = None, impl: str = "auto", lists: Tensor | None = None,
    dw_impl: str = "auto",
) -> Tensor:  # fmt: skip
    operands.check_devices(x, weight=w, bias=bias, values=values, index=index, mask=mask, dense=dense, lists=lists)
    _check(x, w, bias, values, index, turned, mask, (block_rows, block_cols), backward)
    return x.new_empty((*x.shape[:-1], w.shape[0]))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, w, bias, values, index, turned, mask, rows, cols, backward, dense, impl, lists, dw_impl = inputs
    needs_x, needs_w = ctx.needs_input_grad[:2]
    ctx.held = producer.holds(x)
    ctx.save_for_backward(*((x if ctx.held else values, index) if needs_w else (None, None)), w if needs_x else None, mask, dense, lists)
    ctx.block, ctx.turned, ctx.shape, ctx.config, ctx.impl, ctx.flat = values.shape[2], turned, tuple(x.shape), (rows, cols, backward), impl, x.is_contiguous()
    ctx.dw_impl, ctx.inside = dw_impl, mask is None and dense_linear.has_rows_inside(x)


def _backward(ctx: Any, gy: Tensor) -> tuple[Tensor | None, ...]:
    values, index, w, mask, dense, lists = ctx.saved_tensors
    gx = gw = gb = None
    by_x, by_w = asked_of(ctx)
    if by_x:
        gx = dense_linear.dx(gy, w, ctx.inside) if mask is None else ops.masked_linear_dx(gy, w, mask, *ctx.config, dense, ctx.impl, lists)
    if by_w:
        values = prune.values_of(values, index, ctx.block, ctx.turned) if ctx.held else values
        wanted = None if mask is None else reference.gradient_mask(mask, dense, ctx.config[2])
        gw = pruned_dw(gy, values, index, ctx.shape, ctx.turned, wanted, *ctx.config[:2], ctx.dw_impl, lists if wanted is mask else None)
    if ctx.needs_input_grad[2]:
        gb = dense_linear.db(gy, ctx.flat)
    return gx, gw, gb, *[None] * 11


register_autograd(pruned_linear, _backward, _save)


@torch.library.custom_op("fxmask::pruned_dw", mutates_args=())
def pruned_dw(
    gy: Tensor, values: Tensor, index: Tensor, shape: list[int], turned: bool, mask: Tensor | None = None, block_rows: int = 1, block_cols: int = 1,
    impl: str = "auto", lists: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """dW = dY^T X_s (N, K), X_s the pruned input of `shape`; see `kernels.prune.dw`. With a mask of W (bool, in block_rows x block_cols) zeros elsewhere.

    gy (..., N); values, index, turned: of `fxmask::compress`. lists: the mask's, packed.

    | impl | |
    | --- | --- |
    | `reference` | the pruned input expanded, a dense product with zeros in it, masked |
    | `cpu` | strips of kept blocks (`kernels.cpu.prune_strips`); a turned input is expanded, as its blocks lie across the sum |
    | `triton` | a kernel over kept blocks of both (`kernels.triton.prune_launch`); expanded: blocks not of 16, 32, 64 or 128 features, turned inputs, odd N |
    | `auto` | on a CPU the strips where they pay, else the reference |

    Differentiable: no, and a second derivative through it raises. Raises: ShapeError, UnsupportedError where an explicit `impl` cannot run on gy.
    Cost: 2 N useful FLOP a kept element; see `kernels.prune.kept_of_input`.
    """
    if gy.dim() != len(shape) or tuple(gy.shape[:-1]) != tuple(shape[:-1]):
        raise ShapeError(f"tokens of gy: expected those of an input {tuple(shape)}, got {tuple(gy.shape)}.")
    block = (block_rows, block_cols)
    if mask is not None:
        operands.check_mask(mask, (gy.shape[-1], shape[-1]), block)
        operands.check_lists(lists, mask, block)
    form(impl, gy)  # raises where it cannot
    if impl == "triton":
        return triton_ops().pruned_dw(gy, values, index, tuple(shape), turned, mask, block, lists)
    if (impl == "cpu" and not turned) or (impl == "auto" and prune_strips.pays(gy, values, shape, turned)):
        dw = prune_strips.dw(gy, values, index, shape)
    else:
        dw = prune.dw(gy, values, index, tuple(shape), turned).contiguous()
    return dw if mask is None else reference.masked(dw, mask, block)


@register_fake(pruned_dw)
def _(
    gy: Tensor, values: Tensor, index: Tensor, shape: list[int], turned: bool, mask: Tensor | None = None, block_rows: int = 1, block_cols: int = 1,
    impl: str = "auto", lists: Tensor | None = None,
) -> Tensor:  # fmt: skip
    return gy.new_empty((gy.shape[-1], shape[-1]))


def no_second(ctx: Any, *_: Any) -> Any:
    """The backward of a gradient that a pruned input was used for: UnsupportedError."""
    what = "a second derivative through the gradient of a parameter under activation pruning: the input was not saved; use it without pruning."
    raise UnsupportedError(what)


pruned_dw.register_autograd(no_second, setup_context=lambda ctx, inputs, output: None)

follow_autocast("pruned_linear", "pruned_dw")
follow_autocast("compress", casts=False)


@register_flop_formula(torch.ops.fxmask.pruned_linear, get_raw=True)
def _linear_flop(x: Tensor, w: Tensor, bias: Tensor | None, values: Tensor, index: Tensor, turned: bool, *rest: Any, **kwargs: Any) -> int:
    mask, rows, cols = rest[:3] if len(rest) > 2 else (None, 1, 1)
    return linear_flop(x, (w.shape[0], w.shape[1]), mask, (rows, cols))


@register_flop_formula(torch.ops.fxmask.pruned_dw, get_raw=True)
def _dw_flop(
    gy: Tensor, values: Tensor, index: Tensor, shape: list[int], turned: bool, mask: Tensor | None = None, rows: int = 1, cols: int = 1, *_: Any, **__: Any
) -> int:
    """Under a mask of W the kept elements of the input count as evenly spread over its features, as in `kernels.layer_cost`."""
    flop, of = 2 * int(gy.shape[-1]) * prune.kept_of_input(values.shape, shape, turned), (gy.shape[-1], shape[-1])
    return flop * linear_flop(gy, of, mask, (rows, cols)) // max(1, linear_flop(gy, of, None, (rows, cols)))


def _has_autocast(kind: str) -> bool:
    """Whether a type of device knows autocast."""
    if not torch.compiler.is_compiling():
        return torch.amp.is_autocast_available(kind)
    from . import while_tracing

    return while_tracing.has_autocast(kind)


def linear(
    x: Tensor, w: Tensor, bias: Tensor | None, block: int, ratio: float, noise: float = 0.0, mask: Tensor | None = None,
    blocks: tuple[int, int] = (1, 1), backward: str = "masked", dense: Tensor | None = None, impl: str = "auto", lists: Tensor | None = None,
    dw_impl: str = "auto",
) -> Tensor:  # fmt: skip
    """The linear as modules call it: counts the kept blocks from the shape, and draws the noise; raises as `plan` does."""
    planned = plan(x, block, ratio, noise, impl)
    if planned is None:
        return F.linear(x, w, bias) if mask is None else ops.linear(x, w, bias, mask, blocks, backward, dense, impl, lists)
    kept, turned, drawn = planned
    width = x.shape[-2 if turned else -1]
    block = min(block, width) if isinstance(width, int) else block  # a row is its only block then, saved as wide as it is; an export keeps its symbol
    kind = x.device.type
    wide = x.dtype != torch.float64 and _has_autocast(kind) and torch.is_autocast_enabled(kind)
    cast = x.to(torch.get_autocast_dtype(kind)) if wide else x  # once for both ops
    return pruned_linear(cast, w, bias, *shared(x, cast, block, kept, turned, drawn), turned, mask, *blocks, backward, dense, impl, lists, dw_impl)
