"""Gradients of the matmul ops: of `masked_linear` by `masked_linear_dx` and `masked_linear_dw`, or by both at once, which are differentiable themselves."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import dense_linear, reference
from .engine import asked_of
from .joint import masked_linear_backward, together
from .lean import register_autograd
from .matmul_ops import masked_linear, masked_linear_dw, masked_linear_dx


def _save_linear(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, w, bias, mask, rows, cols, backward, dense, impl, lists = inputs
    needs_x, needs_w = ctx.needs_input_grad[:2]
    ctx.save_for_backward(x if needs_w else None, w if needs_x else None, mask, dense, lists)
    ctx.config, ctx.impl, ctx.flat = (rows, cols, backward), impl, x.is_contiguous()


def _linear_backward(ctx: Any, gy: Tensor) -> tuple[Tensor | None, ...]:
    x, w, mask, dense, lists = ctx.saved_tensors
    gx = gw = gb = None
    by_x, by_w = asked_of(ctx)
    if by_x and by_w and together(gy.device, ctx.config[2], ctx.impl):
        gx, gw = masked_linear_backward(gy, x, w, mask, *ctx.config, dense, ctx.impl)
    elif by_x:
        gx = masked_linear_dx(gy, w, mask, *ctx.config, dense, ctx.impl, lists)
    if by_w and gw is None:
        gw = masked_linear_dw(gy, x, mask, *ctx.config, dense, ctx.impl, lists)
    if ctx.needs_input_grad[2]:
        gb = dense_linear.db(gy, ctx.flat)
    return gx, gw, gb, *[None] * 7


register_autograd(masked_linear, _linear_backward, _save_linear)


def _save_two(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Of dX: gy and w. Of dW: gy and x."""
    a, b, mask, *config, dense, impl, lists = inputs
    ctx.save_for_backward(a, b, mask, dense, lists)
    ctx.config, ctx.impl = tuple(config), impl


def _dx_backward(ctx: Any, ggx: Tensor) -> tuple[Tensor | None, ...]:
    gy, w, mask, dense, lists = ctx.saved_tensors
    return *derivative_of_dx(ggx, gy, w, mask, ctx.config, dense, ctx.impl, lists, *ctx.needs_input_grad[:2]), *[None] * 7


def derivative_of_dx(
    ggx: Tensor, gy: Tensor, w: Tensor, mask: Tensor, config: Any, dense: Tensor | None, impl: str, lists: Tensor | None, by_gy: bool, by_w: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of `masked_linear_dx` with respect to gy and w, where they are asked for."""
    ggy = gw = None
    if by_gy:
        ggy = F.linear(ggx, w) if config[2] == "unmasked" else masked_linear(ggx, w, None, mask, *config, dense, impl, lists)
    if by_w:
        gw = masked_linear_dw(gy, ggx, mask, *config, dense, impl, lists)
    return ggy, gw


register_autograd(masked_linear_dx, _dx_backward, _save_two)


def _dw_backward(ctx: Any, ggw: Tensor) -> tuple[Tensor | None, ...]:
    gy, x, mask, dense, lists = ctx.saved_tensors
    return *derivative_of_dw(ggw, gy, x, mask, ctx.config, dense, ctx.impl, lists, *ctx.needs_input_grad[:2]), *[None] * 7


def derivative_of_dw(
    ggw: Tensor, gy: Tensor, x: Tensor, mask: Tensor, config: Any, dense: Tensor | None, impl: str, lists: Tensor | None, by_gy: bool, by_x: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of `masked_linear_dw` with respect to gy and x, where they are asked for."""
    rows, cols, backward = config
    wanted = reference.gradient_mask(mask, dense, backward)
    lists = lists if wanted is mask else None
    ggy = gx = None
    if by_gy:
        ggy = F.linear(x, ggw) if wanted is None else masked_linear(x, ggw, None, wanted, rows, cols, "masked", None, impl, lists)
    if by_x:
        gx = torch.matmul(gy, ggw) if wanted is None else masked_linear_dx(gy, ggw, wanted, rows, cols, "masked", None, impl, lists)
    return ggy, gx


register_autograd(masked_linear_dw, _dw_backward, _save_two)


def _save_both(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    gy, x, w, mask, rows, cols, backward, dense, impl = inputs
    ctx.save_for_backward(gy, x, w, mask, dense)
    ctx.config, ctx.impl = (rows, cols, backward), impl


def _both_backward(ctx: Any, ggx: Tensor, ggw: Tensor) -> tuple[Tensor | None, ...]:
    gy, x, w, mask, dense = ctx.saved_tensors
    by_gy, by_x, by_w = ctx.needs_input_grad[:3]
    a_gy, gw = derivative_of_dx(ggx, gy, w, mask, ctx.config, dense, ctx.impl, None, by_gy, by_w)
    b_gy, gx = derivative_of_dw(ggw, gy, x, mask, ctx.config, dense, ctx.impl, None, by_gy, by_x)
    return (a_gy + b_gy if a_gy is not None and b_gy is not None else None), gx, gw, *[None] * 6


register_autograd(masked_linear_backward, _both_backward, _save_both)
