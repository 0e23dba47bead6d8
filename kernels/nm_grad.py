"""Weights under N:M masks whose gradient is not that of W∘M. Functions of tensors alone, for `torch.compile`, `torch.func` and checkpointing."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class LearnedWeight(torch.autograd.Function):
    """(w, soft, hard) -> W∘hard, exactly; straight-through: the gradient reaches `soft` as if W∘soft had been computed, and W as of W∘hard.

    All of one shape; hard is bool. soft: the mixture of patterns that `hard` was drawn from.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(w: Tensor, soft: Tensor, hard: Tensor) -> Tensor:
        return torch.where(hard, w, 0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        w, soft, hard = inputs
        ctx.save_for_backward(w, hard)
        ctx.dtype = soft.dtype

    @staticmethod
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        w, hard = ctx.saved_tensors
        gw = torch.where(hard, gy, 0) if ctx.needs_input_grad[0] else None
        return gw, (gy * w).to(ctx.dtype) if ctx.needs_input_grad[1] else None, None


class StraightThroughDecay(torch.autograd.Function):
    """(w, mask, decay) -> W∘M; the gradient of W is g + decay * (1 - M)∘W, SR-STE (Zhou et al. 2021, equation 9)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(w: Tensor, mask: Tensor, decay: float) -> Tensor:
        return torch.where(mask, w, 0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, float], output: Tensor) -> None:
        w, mask, decay = inputs
        ctx.save_for_backward(w, mask)
        ctx.decay = decay

    @staticmethod
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor, None, None]:
        w, mask = ctx.saved_tensors
        return gy + ctx.decay * torch.where(mask, 0, w), None, None
