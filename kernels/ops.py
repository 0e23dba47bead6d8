"""The matmul ops `torch.ops.fxmask.masked_linear*`: schemas, fakes and gradients; no Triton is imported here. Masks are made by `kernels.mask_ops`.

They are opaque to the compiler: their backward is made of `masked_linear_dx` and `masked_linear_dw`, or of both at once (`kernels.joint`), which are
differentiable themselves. The bodies run the form that `kernels.dispatch` chooses: `kernels.reference`, or the same functions on a CPU or by Triton.
Autocast, vmap and FLOP formulas are in `kernels.op_rules`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import reference
from .dispatch import form
from .errors import UnsupportedError
from .inductor import register_fake
from .lean import register_autograd
from .mask_ops import block_index as block_index
from .mask_ops import index as index
from .mask_ops import lists as lists
from .mask_ops import strip_lists as strip_lists
from .operands import check_backward, check_bias, check_features, check_gradients, check_lists, check_mask, is_transformed, refuse_forward_ad
from .strides import empty_result

# ---- masked_linear -----------------------------------------------------------------------------------------------------------------------------------


@torch.library.custom_op("fxmask::masked_linear", mutates_args=())
def masked_linear(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    mask: Tensor,
    block_rows: int,
    block_cols: int,
    backward: str,
    dense: Tensor | None = None,
    impl: str = "auto",
    lists: Tensor | None = None,
) -> Tensor:
    """y = x (W∘M)^T + bias.

    Args:
        x: (..., K); w: (N, K); bias: (N) or None; all of one floating dtype (autocast casts them). mask: bool (NB, KB), True = kept.
        backward: `masked`, `ste`, `unmasked` or `rigl`, see `kernels.reference`. dense: 0-d bool, for `rigl`: dW is dense where it is set.
        impl: see `kernels.dispatch`. lists: what `strip_lists` made of the mask; kernels that skip blocks make them anew without.

    Returns: (..., N), dtype of `x`; contiguous, but for Triton over an input whose tokens are contiguous, and then they stay so (`kernels.strides`).
    Raises: ShapeError.
    Differentiable: x, w, bias; twice, too.
    Cost: 2 M useful FLOP a kept weight element; this plain form multiplies by the masked weight and so issues all 2 M N K.
    """
    refuse_forward_ad()
    block, shape = (block_rows, block_cols), w.shape
    check_mask(mask, shape, block)
    check_features("x", x, shape[1])
    check_bias(bias, shape[0])
    check_lists(lists, mask, block)
    check_backward(backward)
    return form(impl, x).masked_linear(x, w, bias, mask, block, lists)


@register_fake(masked_linear)
def _(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    mask: Tensor,
    block_rows: int,
    block_cols: int,
    backward: str,
    dense: Tensor | None = None,
    impl: str = "auto",
    lists: Tensor | None = None,
) -> Tensor:
    refuse_forward_ad()
    check_mask(mask, w.shape, (block_rows, block_cols))
    check_features("x", x, w.shape[1])
    check_bias(bias, w.shape[0])
    check_backward(backward)
    return empty_result(x, w.shape[0], (block_rows, block_cols), impl)


def _save_linear(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, w, bias, mask, rows, cols, backward, dense, impl, lists = inputs
    needs_x, needs_w = ctx.needs_input_grad[:2]
    ctx.save_for_backward(x if needs_w else None, w if needs_x else None, mask, dense, lists)
    ctx.config, ctx.impl, ctx.flat = (rows, cols, backward), impl, x.is_contiguous()


def _linear_backward(ctx: Any, gy: Tensor) -> tuple[Tensor | None, ...]:
    x, w, mask, dense, lists = ctx.saved_tensors
    gx = gw = gb = None
    if ctx.needs_input_grad[0] and ctx.needs_input_grad[1] and joint.together(gy.device, ctx.config[2], ctx.impl):
        gx, gw = joint.masked_linear_backward(gy, x, w, mask, *ctx.config, dense, ctx.impl)
    elif ctx.needs_input_grad[0]:
        gx = masked_linear_dx(gy, w, mask, *ctx.config, dense, ctx.impl, lists)
    if ctx.needs_input_grad[1] and gw is None:
        gw = masked_linear_dw(gy, x, mask, *ctx.config, dense, ctx.impl, lists)
    if ctx.needs_input_grad[2]:
        # as the dense bias does it, to the bit: F.linear flattens a contiguous input, and adds the bias to the product of any other
        gb = reference.rows(gy).sum(0) if ctx.flat else gy.sum_to_size(gy.shape[-1])
    return gx, gw, gb, *[None] * 7


register_autograd(masked_linear, _linear_backward, _save_linear)

# ---- dX ----------------------------------------------------------------------------------------------------------------------------------------------


@torch.library.custom_op("fxmask::masked_linear_dx", mutates_args=())
def masked_linear_dx(
    gy: Tensor,
    w: Tensor,
    mask: Tensor,
    block_rows: int,
    block_cols: int,
    backward: str,
    dense: Tensor | None = None,
    impl: str = "auto",
    lists: Tensor | None = None,
) -> Tensor:
    """Gradient of `masked_linear` with respect to x: dY (W∘M), or dY W in mode `unmasked`.

    gy (..., N), w (N, K), mask bool (NB, KB) -> (..., K) contiguous. Differentiable: gy, w (there `dense` counts).
    Cost: as `masked_linear`. Raises: ShapeError.
    """
    refuse_forward_ad()
    check_mask(mask, w.shape, (block_rows, block_cols))
    check_features("gy", gy, w.shape[0])
    check_lists(lists, mask, (block_rows, block_cols))
    check_backward(backward)
    return form(impl, gy).masked_linear_dx(gy, w, mask, (block_rows, block_cols), backward, lists)


@register_fake(masked_linear_dx)
def _(
    gy: Tensor,
    w: Tensor,
    mask: Tensor,
    block_rows: int,
    block_cols: int,
    backward: str,
    dense: Tensor | None = None,
    impl: str = "auto",
    lists: Tensor | None = None,
) -> Tensor:
    refuse_forward_ad()
    if backward == "unmasked":
        return gy.new_empty((*gy.shape[:-1], w.shape[1]))
    return empty_result(gy, w.shape[1], (block_rows, block_cols), impl)


def _save_dx(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    gy, w, mask, *config, dense, impl, lists = inputs
    ctx.save_for_backward(gy, w, mask, dense, lists)
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


register_autograd(masked_linear_dx, _dx_backward, _save_dx)

# ---- dW ----------------------------------------------------------------------------------------------------------------------------------------------


@torch.library.custom_op("fxmask::masked_linear_dw", mutates_args=())
def masked_linear_dw(
    gy: Tensor,
    x: Tensor,
    mask: Tensor,
    block_rows: int,
    block_cols: int,
    backward: str,
    dense: Tensor | None = None,
    impl: str = "auto",
    lists: Tensor | None = None,
) -> Tensor:
    """Gradient of `masked_linear` with respect to w: (dY^T X)∘M; all of dY^T X in modes `ste` and `unmasked`, and in `rigl` where `dense` is set.

    gy (..., N), x (..., K), mask bool (NB, KB) -> (N, K) contiguous, zeros where nothing is wanted. Differentiable: gy, x.
    Cost: 2 M useful FLOP a wanted weight element. Raises: ShapeError.
    """
    refuse_forward_ad()
    check_gradients(gy, x, mask, (block_rows, block_cols), backward, lists)
    return form(impl, x).masked_linear_dw(gy, x, mask, dense, (block_rows, block_cols), backward, lists).contiguous()


@register_fake(masked_linear_dw)
def _(
    gy: Tensor,
    x: Tensor,
    mask: Tensor,
    block_rows: int,
    block_cols: int,
    backward: str,
    dense: Tensor | None = None,
    impl: str = "auto",
    lists: Tensor | None = None,
) -> Tensor:
    refuse_forward_ad()
    return gy.new_empty((gy.shape[-1], x.shape[-1]))


def _save_dw(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    gy, x, mask, *config, dense, impl, lists = inputs
    ctx.save_for_backward(gy, x, mask, dense, lists)
    ctx.config, ctx.impl = tuple(config), impl


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


register_autograd(masked_linear_dw, _dw_backward, _save_dw)


def linear(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    mask: Tensor,
    block: tuple[int, int],
    backward: str,
    dense: Tensor | None = None,
    impl: str = "auto",
    lists: Tensor | None = None,
) -> Tensor:
    """The masked linear as modules call it: `masked_linear`, or its aten form where PyTorch cannot differentiate a custom op.

    `torch.func.grad` over a custom op raises, and forward-mode AD silently returns a zero tangent; both get
    `reference.composite`, and so do nested tensors. Raises: UnsupportedError where `impl="triton"` meets any of these.
    """
    if x.is_nested and impl == "triton":
        raise UnsupportedError("impl='triton' got a nested tensor: expected a plain one; use impl='auto' or impl='reference'.")
    if is_transformed(impl) or x.is_nested:
        return reference.composite(x, w, bias, mask, block, backward, dense)
    return masked_linear(x, w, bias, mask, block[0], block[1], backward, dense, impl, lists)


from . import joint  # noqa: E402  (it calls these ops)
from . import op_rules as op_rules  # noqa: E402  (the rules name the ops, so they can only be registered now)
