"""Weights under N:M masks whose gradient is not that of W∘M, as ops: `torch.export` keeps their gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import operands
from .dispatch import triton_ops
from .errors import UnsupportedError, message
from .inductor import register_fake


@torch.library.custom_op("fxmask::nm_learned", mutates_args=())
def nm_learned(w: Tensor, soft: Tensor, hard: Tensor) -> Tensor:
    """W∘hard, exactly. All of one shape; soft: the mixture of patterns that `hard` (bool) was drawn from.

    Differentiable: w, as of W∘hard; soft, straight-through: as if W∘soft had been computed. Raises: UnsupportedError in forward-mode AD.
    """
    operands.refuse_forward_ad()
    return torch.where(hard, w, 0)


@register_fake(nm_learned)
def _(w: Tensor, soft: Tensor, hard: Tensor) -> Tensor:
    operands.refuse_forward_ad()
    return torch.where(hard, w, 0)


@torch.library.custom_op("fxmask::nm_sr_ste", mutates_args=())
def nm_sr_ste(w: Tensor, mask: Tensor, decay: float) -> Tensor:
    """W∘M, exactly; mask bool of w's shape.

    Differentiable: w, by g + decay * (1 - M)∘W, SR-STE (Zhou et al. 2021, equation 9). Raises: UnsupportedError in forward-mode AD.
    """
    operands.refuse_forward_ad()
    return torch.where(mask, w, 0)


@register_fake(nm_sr_ste)
def _(w: Tensor, mask: Tensor, decay: float) -> Tensor:
    operands.refuse_forward_ad()
    return torch.where(mask, w, 0)


@torch.library.custom_op("fxmask::nm_magnitude", mutates_args=())
def nm_magnitude(w: Tensor, n: int, m: int, ste: bool, decay: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(W∘M in `dtype`, M): the mask by magnitude and its product in one pass of a Triton kernel, bit-equal to `nm.magnitude_mask`.

    w: float32, float16 or bfloat16, its rows multiples of m, which is one of nm.PAIRED; both results have w's shape, contiguous; M bool.
    Differentiable: w, by g∘M, or with `ste` by g + decay * (1 - M)∘W. Raises: UnsupportedError in forward-mode AD, and where Triton cannot run on w.
    Cost: a read of w, a write of both.
    """
    operands.refuse_forward_ad()
    triton_ops().require(w)
    out, mask = triton_ops().nm.nm_mask(w.contiguous(), n, m, dtype)
    return out, mask


@register_fake(nm_magnitude)
def _(w: Tensor, n: int, m: int, ste: bool, decay: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    operands.refuse_forward_ad()
    return w.new_empty(w.shape, dtype=dtype), w.new_empty(w.shape, dtype=torch.bool)


def _save_magnitude(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    w, _, _, ste, ctx.decay, _ = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(output[1], w if ste else None)
    ctx.dtype = w.dtype


def _magnitude_backward(ctx: Any, gy: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    mask, w = ctx.saved_tensors
    gy = gy.to(ctx.dtype)
    return (torch.where(mask, gy, 0) if w is None else gy + ctx.decay * torch.where(mask, 0, w)), *[None] * 5


def _save_learned(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    w, soft, hard = inputs
    ctx.save_for_backward(w if ctx.needs_input_grad[1] else None, hard)
    ctx.dtype = soft.dtype


def _learned_backward(ctx: Any, gy: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    w, hard = ctx.saved_tensors
    by_w, by_soft = ctx.needs_input_grad[:2]
    return torch.where(hard, gy, 0) if by_w else None, (gy * w).to(ctx.dtype) if by_soft else None, None


def _save_sr_ste(ctx: Any, inputs: tuple[Tensor, Tensor, float], output: Tensor) -> None:
    w, mask, ctx.decay = inputs
    ctx.save_for_backward(w, mask)


def _sr_ste_backward(ctx: Any, gy: Tensor) -> tuple[Tensor, None, None]:
    w, mask = ctx.saved_tensors
    return gy + ctx.decay * torch.where(mask, 0, w), None, None


nm_learned.register_autograd(_learned_backward, setup_context=_save_learned)
nm_sr_ste.register_autograd(_sr_ste_backward, setup_context=_save_sr_ste)
nm_magnitude.register_autograd(_magnitude_backward, setup_context=_save_magnitude)


def learned(w: Tensor, soft: Tensor, hard: Tensor) -> Tensor:
    """`nm_learned`, or its plain form where function transforms and forward-mode AD are active, which see into that."""
    if operands.is_transformed("auto"):
        reached = torch.where(hard | torch.isfinite(w), w, 0)  # 0 * Inf would be NaN
        return torch.where(hard, w, 0) + (soft - soft.detach()).to(w.dtype) * reached
    return nm_learned(w, soft, hard)


def sr_ste(w: Tensor, mask: Tensor, decay: float) -> Tensor:
    """`nm_sr_ste`; UnsupportedError under function transforms and forward-mode AD, as its gradient is that of no function."""
    if operands.is_transformed("auto"):
        what = "mode='sr-ste' inside torch.func or forward-mode AD: its gradient is that of no function, and those differentiate functions."
        raise UnsupportedError(message(what, "torch.func, torch.autograd.forward_ad", "use mode='magnitude' there."))
    return nm_sr_ste(w, mask, decay)


def by_kernel(w: Tensor, n: int, m: int, decay: float | None) -> Tensor:
    """W∘M by `nm_magnitude`, in autocast's dtype where that is on; decay: SR-STE's, or None. UnsupportedError under function transforms and forward-mode AD."""
    operands.is_transformed("triton")
    device, dtype = w.device.type, w.dtype
    if torch.is_autocast_enabled(device) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
    return nm_magnitude(w, n, m, decay is not None, 0.0 if decay is None else decay, dtype)[0]
