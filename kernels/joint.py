"""The op `masked_linear_backward`: dX and dW in one call, on a CPU, where both read the same gathered blocks of dY."""

from __future__ import annotations

import torch
from torch import Tensor

from . import operands
from .dispatch import form
from .inductor import register_fake


def together(device: torch.device, backward: str, impl: str) -> bool:
    """Whether a layer's dX and dW are asked for by one op: on a CPU, in the modes where both skip the same blocks."""
    return device.type == "cpu" and impl in ("auto", "cpu") and backward in ("masked", "rigl")


@torch.library.custom_op("fxmask::masked_linear_backward", mutates_args=())
def masked_linear_backward(
    gy: Tensor, x: Tensor, w: Tensor, mask: Tensor, block_rows: int, block_cols: int, backward: str, dense: Tensor | None = None, impl: str = "auto"
) -> tuple[Tensor, Tensor]:
    """`masked_linear_dx(gy, w)` and `masked_linear_dw(gy, x)` at once.

    gy (..., N), x (..., K), w (N, K), mask bool (NB, KB) -> (..., K), (N, K), both contiguous. Differentiable: gy, x, w.
    Cost: 4 M useful FLOP a kept weight element; the kept blocks of dY are gathered once. Raises: ShapeError, UnsupportedError.
    """
    operands.refuse_forward_ad()
    block = (block_rows, block_cols)
    operands.check_features("gy", gy, w.shape[0])
    operands.check_features("x", x, w.shape[1])
    operands.check_gradients(gy, x, mask, block, backward, None)
    of = form(impl, gy)
    if together(gy.device, backward, impl):
        dx, dw = of.masked_linear_backward(gy, x, w, mask, dense, block, backward)
    else:  # other forms have the two alone: of a step that was traced on a CPU, and runs elsewhere
        dx, dw = of.masked_linear_dx(gy, w, mask, block, backward, None), of.masked_linear_dw(gy, x, mask, dense, block, backward, None)
    return dx.contiguous(), dw.contiguous()


@register_fake(masked_linear_backward)
def _(
    gy: Tensor, x: Tensor, w: Tensor, mask: Tensor, block_rows: int, block_cols: int, backward: str, dense: Tensor | None = None, impl: str = "auto"
) -> tuple[Tensor, Tensor]:
    operands.refuse_forward_ad()
    return gy.new_empty((*gy.shape[:-1], w.shape[1])), gy.new_empty((gy.shape[-1], x.shape[-1]))
