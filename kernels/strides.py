"""Inputs whose tokens, not features, are contiguous: a transpose, as ResMLP's token mixing makes one. The list matmul reads them as they are."""

from __future__ import annotations

import torch
from torch import Tensor

from .lists import listed

HALF = (torch.float16, torch.bfloat16)  # tensor cores read a transposed operand in 16 bits only


def tokens_inner(t: Tensor) -> bool:
    """Whether `t` is [B, C, K] with C contiguous, in 16-byte pieces, and 16 bits an element."""
    return not t.is_contiguous() and are_tokens_inner(t.shape, t.stride(), t.dtype)


def are_tokens_inner(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> bool:
    """`tokens_inner` of a tensor that only sizes are known of."""
    if len(shape) != 3 or dtype not in HALF:
        return False
    (_, c, k), (batch, token, feature) = shape, strides
    return c > 1 and k > 1 and token == 1 and feature >= c and c % 8 == 0 and feature % 8 == 0 and batch % 8 == 0


def empty_result(x: Tensor, features: int, block: tuple[int, int], impl: str) -> Tensor:
    """An uninitialised result (..., features) of the matmul of `x` (..., K): contiguous, or with the tokens contiguous where a Triton kernel keeps them so."""
    if impl == "triton" and listed(block) and tokens_inner(x):
        return x.new_empty((x.shape[0], features, x.shape[1])).transpose(1, 2)
    return x.new_empty((*x.shape[:-1], features))
