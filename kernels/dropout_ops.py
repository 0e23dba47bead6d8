"""The matmuls of block dropout: forward, dX and dW that leave dropped blocks out; `kernels.draw_ops` draws the masks. `kernels.dropout` is the oracle; a CPU
runs `kernels.cpu.dropout_runs` where it pays, and `impl="triton"` the kernels of the weight masks (`kernels.triton.dropped`). Each one's derivative is made of
the others, so they differentiate as often as one likes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from . import dropout, operands, reference
from .cpu import chosen, dropout_runs
from .dispatch import check_name, triton_ops
from .engine import asked_of
from .errors import ShapeError
from .grid import grid_shape, kept_elements
from .inductor import register_fake
from .lean import register_autograd
from .op_rules import follow_autocast


def _check(tokens: int, features: int, keep: Tensor, block: tuple[int, int], p: float, lists: Tensor | None = None) -> None:
    operands.refuse_forward_ad()
    dropout.check_probability(p)
    if keep.dtype != torch.bool or tuple(keep.shape) != grid_shape((tokens, features), block):
        want = grid_shape((tokens, features), block)
        raise ShapeError(f"mask of an input ({tokens}, {features}) in blocks {block}: expected bool {want}, got {keep.dtype} {tuple(keep.shape)}.")
    operands.check_lists(lists, keep, block)


def _form(impl: str, block: tuple[int, int], p: float, t: Tensor, *others: Tensor | None) -> Any:
    """What runs an op on `t` and its other operands: functions with the arguments and results of `kernels.dropout`, chosen as `kernels.dispatch` says."""
    check_name(impl)
    if impl == "triton":
        triton_ops().require(t)
        return triton_ops().dropped
    if impl == "cpu":
        chosen.require(t)
        dropout_runs.require(t)
    # PyTorch refuses mixed dtypes in its own words, runs would cast a bias, and see no other operand where nothing is kept
    runs = impl == "cpu" or (impl == "auto" and dropout_runs.pays(t, block, p))
    return dropout_runs if runs and all(o is None or o.dtype == t.dtype for o in others) else dropout


@torch.library.custom_op("fxmask::dropped_linear", mutates_args=())
def dropped_linear(
    x: Tensor, w: Tensor, bias: Tensor | None, keep: Tensor, block_rows: int, block_cols: int, p: float, impl: str = "auto", lists: Tensor | None = None
) -> Tensor:
    """y = (X∘m) W^T / (1 - p) + bias.

    x (..., K), w (N, K), bias (N) or None, of one floating dtype; keep: bool, see `kernels.dropout.draw`; block (tokens, features). -> (..., N) contiguous.
    impl: see `kernels.dispatch`. lists: what `fxmask::strip_lists` made of `keep`; kernels that skip blocks make them anew without.
    Differentiable: x, w, bias; twice, too. Cost: 2 N useful FLOP a kept element of x. Raises: ShapeError, UnsupportedError, ConfigError.
    """
    block = (block_rows, block_cols)
    operands.check_features("x", x, w.shape[1])
    _check(reference.tokens(x), x.shape[-1], keep, block, p, lists)
    operands.check_bias(bias, w.shape[0])
    return _form(impl, block, p, x, w, bias).linear(x, w, bias, keep, block, p, lists).contiguous()


@register_fake(dropped_linear)
def _(
    x: Tensor, w: Tensor, bias: Tensor | None, keep: Tensor, block_rows: int, block_cols: int, p: float, impl: str = "auto", lists: Tensor | None = None
) -> Tensor:
    operands.check_devices(x, weight=w, bias=bias, mask=keep, lists=lists)
    return x.new_empty((*x.shape[:-1], w.shape[0]))


@torch.library.custom_op("fxmask::dropped_dx", mutates_args=())
def dropped_dx(gy: Tensor, w: Tensor, keep: Tensor, block_rows: int, block_cols: int, p: float, impl: str = "auto", lists: Tensor | None = None) -> Tensor:
    """dX = (dY W)∘m / (1 - p), zeros where dropped. gy (..., N), w (N, K) -> (..., K). Differentiable: gy, w. Cost: 2 N useful FLOP a kept element."""
    block = (block_rows, block_cols)
    operands.check_features("gy", gy, w.shape[0])
    _check(reference.tokens(gy), w.shape[1], keep, block, p, lists)
    return _form(impl, block, p, gy, w).dx(gy, w, keep, block, p, lists).contiguous()


@register_fake(dropped_dx)
def _(gy: Tensor, w: Tensor, keep: Tensor, block_rows: int, block_cols: int, p: float, impl: str = "auto", lists: Tensor | None = None) -> Tensor:
    return gy.new_empty((*gy.shape[:-1], w.shape[1]))


@torch.library.custom_op("fxmask::dropped_dw", mutates_args=())
def dropped_dw(gy: Tensor, x: Tensor, keep: Tensor, block_rows: int, block_cols: int, p: float, impl: str = "auto", lists: Tensor | None = None) -> Tensor:
    """dW = dY^T (X∘m) / (1 - p). gy (..., N), x (..., K) -> (N, K). Differentiable: gy, x. Cost: 2 N useful FLOP a kept element of x."""
    block = (block_rows, block_cols)
    _check(reference.tokens(x), x.shape[-1], keep, block, p, lists)
    operands.check_tokens(gy, x)
    return _form(impl, block, p, gy, x).dw(gy, x, keep, block, p, lists).contiguous()


@register_fake(dropped_dw)
def _(gy: Tensor, x: Tensor, keep: Tensor, block_rows: int, block_cols: int, p: float, impl: str = "auto", lists: Tensor | None = None) -> Tensor:
    return gy.new_empty((gy.shape[-1], x.shape[-1]))


def _save_linear(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, w, _, keep, *config, lists = inputs
    needs_x, needs_w = ctx.needs_input_grad[:2]
    ctx.save_for_backward(x if needs_w else None, w if needs_x else None, keep, lists)
    ctx.config = tuple(config)


def _linear_backward(ctx: Any, gy: Tensor) -> tuple[Tensor | None, ...]:
    x, w, keep, lists = ctx.saved_tensors
    by_x, by_w = asked_of(ctx)
    return (
        dropped_dx(gy, w, keep, *ctx.config, lists) if by_x else None,
        dropped_dw(gy, x, keep, *ctx.config, lists) if by_w else None,
        reference.rows(gy).sum(0) if ctx.needs_input_grad[2] else None,
        *[None] * 6,
    )


def _save_two(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, b, keep, *config, lists = inputs
    ctx.save_for_backward(a, b, keep, lists)
    ctx.config = tuple(config)


def _dx_backward(ctx: Any, ggx: Tensor) -> tuple[Tensor | None, ...]:
    gy, w, keep, lists = ctx.saved_tensors
    by_gy, by_w = ctx.needs_input_grad[:2]
    return (
        dropped_linear(ggx, w, None, keep, *ctx.config, lists) if by_gy else None,
        dropped_dw(gy, ggx, keep, *ctx.config, lists) if by_w else None,
        *[None] * 6,
    )


def _dw_backward(ctx: Any, ggw: Tensor) -> tuple[Tensor | None, ...]:
    gy, x, keep, lists = ctx.saved_tensors
    by_gy, by_x = ctx.needs_input_grad[:2]
    return (
        dropped_linear(x, ggw, None, keep, *ctx.config, lists) if by_gy else None,
        dropped_dx(gy, ggw, keep, *ctx.config, lists) if by_x else None,
        *[None] * 6,
    )


register_autograd(dropped_linear, _linear_backward, _save_linear)
register_autograd(dropped_dx, _dx_backward, _save_two)
register_autograd(dropped_dw, _dw_backward, _save_two)

follow_autocast("dropped_linear", "dropped_dx", "dropped_dw")


def _flop(features: int, shape: tuple[int, int], keep: Tensor, block: tuple[int, int]) -> int:
    """2 FLOP a kept element and feature; a fake mask has no values, and then the count is dense: an upper bound."""
    known = keep.device.type != "meta" and type(keep) is Tensor
    return 2 * features * (int(kept_elements(keep, shape, block)) if known else shape[0] * shape[1])


@register_flop_formula(torch.ops.fxmask.dropped_linear, get_raw=True)
def _linear_flop(x: Tensor, w: Tensor, bias: Tensor | None, keep: Tensor, rows: int, cols: int, *_: Any, **__: Any) -> int:
    return _flop(w.shape[0], (reference.tokens(x), x.shape[-1]), keep, (rows, cols))


@register_flop_formula(torch.ops.fxmask.dropped_dx, get_raw=True)
def _dx_flop(gy: Tensor, w: Tensor, keep: Tensor, rows: int, cols: int, *_: Any, **__: Any) -> int:
    return _flop(w.shape[0], (reference.tokens(gy), w.shape[1]), keep, (rows, cols))


@register_flop_formula(torch.ops.fxmask.dropped_dw, get_raw=True)
def _dw_flop(gy: Tensor, x: Tensor, keep: Tensor, rows: int, cols: int, *_: Any, **__: Any) -> int:
    return _flop(gy.shape[-1], (reference.tokens(x), x.shape[-1]), keep, (rows, cols))
