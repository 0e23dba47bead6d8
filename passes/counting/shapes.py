"""Results on fake tensors of ops whose own shape rule refuses what their kernels take."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

GROUPED_MM = torch.ops.aten._grouped_mm.default


def run(func: Any, args: Any, kwargs: Any) -> Any:
    """An op on fake tensors. PyTorch's rule of grouped_mm (mixtures of experts) wants bfloat16, where the kernels of CPUs take float32, too."""
    if func is GROUPED_MM and args[0].dtype != torch.bfloat16:
        return grouped_mm(*args, **kwargs)
    return func(*args, **kwargs)


def grouped_mm(a: Tensor, b: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: torch.dtype | None = None) -> Tensor:
    """Rows of `a` times the matrix of their group, (M, K) (G, K, N) -> (M, N); groups along K, (M, K) (K, N) -> (G, M, N); along N; or a plain bmm."""
    shape: tuple[int, ...] = (a.shape[-2], b.shape[-1])
    if a.dim() == b.dim() == 2:
        assert offs is not None  # its kernel asks for it
        shape = (offs.shape[0], *shape)
    elif a.dim() == b.dim() == 3:
        shape = (a.shape[0], *shape)
    return a.new_empty(shape, dtype=out_dtype or a.dtype)
