"""The matmul ops `fxmask::masked_linear`, its dX and its dW: schemas and fakes; no Triton is imported here. Their gradients are in `kernels.gradients`.

They are opaque to the compiler. The bodies run the form that `kernels.dispatch` chooses: `kernels.reference`, or the same functions on a CPU or by Triton.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import reference
from .dispatch import form
from .errors import UnsupportedError
from .inductor import register_fake
from .operands import check_backward, check_bias, check_devices, check_features, check_gradients, check_lists, check_mask, is_transformed, refuse_forward_ad
from .strides import empty_result


@torch.library.custom_op("fxmask::masked_linear", mutates_args=())
def masked_linear(
    x: Tensor, w: Tensor, bias: Tensor | None, mask: Tensor, block_rows: int, block_cols: int, backward: str,
    dense: Tensor | None = None, impl: str = "auto", lists: Tensor | None = None,
) -> Tensor:  # fmt: skip
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
    x: Tensor, w: Tensor, bias: Tensor | None, mask: Tensor, block_rows: int, block_cols: int, backward: str,
    dense: Tensor | None = None, impl: str = "auto", lists: Tensor | None = None,
) -> Tensor:  # fmt: skip
    refuse_forward_ad()
    check_devices(x, weight=w, bias=bias, mask=mask, dense=dense, lists=lists)
    check_mask(mask, w.shape, (block_rows, block_cols))
    check_features("x", x, w.shape[1])
    check_bias(bias, w.shape[0])
    check_backward(backward)
    return empty_result(x, w.shape[0], (block_rows, block_cols), impl)


@torch.library.custom_op("fxmask::masked_linear_dx", mutates_args=())
def masked_linear_dx(
    gy: Tensor, w: Tensor, mask: Tensor, block_rows: int, block_cols: int, backward: str,
    dense: Tensor | None = None, impl: str = "auto", lists: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Gradient of `masked_linear` with respect to x: dY (W∘M), or dY W in mode `unmasked`.

    gy (..., N), w (N, K), mask bool (NB, KB) -> (..., K), laid out as `masked_linear` does. Differentiable: gy, w (there `dense` counts).
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
    gy: Tensor, w: Tensor, mask: Tensor, block_rows: int, block_cols: int, backward: str,
    dense: Tensor | None = None, impl: str = "auto", lists: Tensor | None = None,
) -> Tensor:  # fmt: skip
    refuse_forward_ad()
    if backward == "unmasked":
        return gy.new_empty((*gy.shape[:-1], w.shape[1]))
    return empty_result(gy, w.shape[1], (block_rows, block_cols), impl)


@torch.library.custom_op("fxmask::masked_linear_dw", mutates_args=())
def masked_linear_dw(
    gy: Tensor, x: Tensor, mask: Tensor, block_rows: int, block_cols: int, backward: str,
    dense: Tensor | None = None, impl: str = "auto", lists: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Gradient of `masked_linear` with respect to w: (dY^T X)∘M; all of dY^T X in modes `ste` and `unmasked`, and in `rigl` where `dense` is set.

    gy (..., N), x (..., K), mask bool (NB, KB) -> (N, K) contiguous, zeros where nothing is wanted. Differentiable: gy, x.
    Cost: 2 M useful FLOP a wanted weight element. Raises: ShapeError.
    """
    refuse_forward_ad()
    check_gradients(gy, x, mask, (block_rows, block_cols), backward, lists)
    return form(impl, x).masked_linear_dw(gy, x, mask, dense, (block_rows, block_cols), backward, lists).contiguous()


@register_fake(masked_linear_dw)
def _(gy: Tensor, x: Tensor, *rest: Any) -> Tensor:
    refuse_forward_ad()
    return gy.new_empty((gy.shape[-1], x.shape[-1]))


def linear(
    x: Tensor, w: Tensor, bias: Tensor | None, mask: Tensor, block: tuple[int, int], backward: str,
    dense: Tensor | None = None, impl: str = "auto", lists: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The masked linear as modules call it: `masked_linear`, or its aten form where PyTorch cannot differentiate a custom op.

    `torch.func.grad` over a custom op raises, and forward-mode AD silently returns a zero tangent; both get
    `reference.composite`, and so do nested and sparse tensors. Raises: UnsupportedError where `impl="triton"` meets any of these.
    """
    plain = x.layout is torch.strided and not x.is_nested
    if not plain and impl == "triton":
        kind = "nested" if x.is_nested else str(x.layout).removeprefix("torch.")
        raise UnsupportedError(f"impl='triton' got a {kind} tensor: expected a plain one; use impl='auto' or impl='reference'.")
    if is_transformed(impl) or not plain:
        return reference.composite(x, w, bias, mask, block, backward, dense)
    return masked_linear(x, w, bias, mask, block[0], block[1], backward, dense, impl, lists)
