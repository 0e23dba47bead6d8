"""The bits of a tensor read as another type of the same size, also under vmap: PyTorch 2.11's has no rule for `Tensor.view(dtype)`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _Bits(torch.autograd.Function):
    """`view(dtype)` with a rule for vmap of its own: bits do not depend on the batch."""

    @staticmethod
    def forward(x: Tensor, dtype: torch.dtype) -> Tensor:
        return x.view(dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Any]:
        return bits_as(x, dtype), in_dims[0]


def bits_as(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x.view(dtype)`, of the same size an element. Not differentiable. Cost: none."""
    x = x.detach()
    try:
        return x.view(dtype)
    except RuntimeError:  # in a transform
        seen: Tensor = _Bits.apply(x, dtype)
        return seen
