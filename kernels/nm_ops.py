"""Weights under N:M masks whose gradient is not that of W∘M, as ops: `torch.export` keeps their gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import ops
from .errors import UnsupportedError, message


@torch.library.custom_op("fxmask::nm_learned", mutates_args=())
def nm_learned(w: Tensor, soft: Tensor, hard: Tensor) -> Tensor:
    """W∘hard, exactly. All of one shape; soft: the mixture of patterns that `hard` (bool) was drawn from.

    Differentiable: w, as of W∘hard; soft, straight-through: as if W∘soft had been computed. Raises: UnsupportedError in forward-mode AD.
    """
    ops.refuse_forward_ad()
    return torch.where(hard, w, 0)


@nm_learned.register_fake
def _(w: Tensor, soft: Tensor, hard: Tensor) -> Tensor:
    ops.refuse_forward_ad()
    return torch.where(hard, w, 0)


@torch.library.custom_op("fxmask::nm_sr_ste", mutates_args=())
def nm_sr_ste(w: Tensor, mask: Tensor, decay: float) -> Tensor:
    """W∘M, exactly; mask bool of w's shape.

    Differentiable: w, by g + decay * (1 - M)∘W, SR-STE (Zhou et al. 2021, equation 9). Raises: UnsupportedError in forward-mode AD.
    """
    ops.refuse_forward_ad()
    return torch.where(mask, w, 0)


@nm_sr_ste.register_fake
def _(w: Tensor, mask: Tensor, decay: float) -> Tensor:
    ops.refuse_forward_ad()
    return torch.where(mask, w, 0)


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


def learned(w: Tensor, soft: Tensor, hard: Tensor) -> Tensor:
    """`nm_learned`, or its plain form where function transforms and forward-mode AD are active, which see into that."""
    if ops.is_transformed("auto"):
        return torch.where(hard, w, 0) + (soft - soft.detach()).to(w.dtype) * w.detach()
    return nm_learned(w, soft, hard)


def sr_ste(w: Tensor, mask: Tensor, decay: float) -> Tensor:
    """`nm_sr_ste`; UnsupportedError under function transforms and forward-mode AD, as its gradient is that of no function."""
    if ops.is_transformed("auto"):
        what = "mode='sr-ste' inside torch.func or forward-mode AD: its gradient is that of no function, and those differentiate functions."
        raise UnsupportedError(message(what, "torch.func, torch.autograd.forward_ad", "use mode='magnitude' there."))
    return nm_sr_ste(w, mask, decay)
