"""The mask of block dropout in one launch, bit-equal to `kernels.dropout.draw`: in plain PyTorch it is some fifty, each as long as a small matmul."""

from __future__ import annotations

import torch
from torch import Tensor

import triton
import triton.language as tl

from ..dropout import BITS
from ..grid import grid_shape
from . import device
from .tiles import DRAWN


@triton.jit
def _mix(h):
    """`kernels.score.mix`, in 32 bits."""
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    return h ^ (h >> 16)


@triton.jit(do_not_specialize=["n", "least"])
def draw_kernel(seed_ptr, mask_ptr, n, least, SHIFT: tl.constexpr, CH: tl.constexpr):
    """mask[i] = whether the number of (seed, i) is at least `least`. Grid: (cdiv(n, CH),). seed int64, mask [n] bool; numbers have 32 - SHIFT bits."""
    seed = tl.load(seed_ptr)
    h = _mix(_mix((seed & 0xFFFFFFFF).to(tl.uint32)) ^ (seed >> 32 & 0xFFFFFFFF).to(tl.uint32))
    i = tl.program_id(0).to(tl.int64) * CH + tl.arange(0, CH)
    number = _mix(_mix(i.to(tl.uint32)) ^ h) >> SHIFT
    tl.store(mask_ptr + i, (number.to(tl.int32) >= least).to(tl.int8), mask=i < n)


def draw(tokens: int, features: int, block: tuple[int, int], p: float, seed: Tensor) -> Tensor:
    """As `kernels.dropout.draw`."""
    mask = torch.empty(grid_shape((tokens, features), block), dtype=torch.bool, device=seed.device)
    n = mask.numel()
    device.launch(draw_kernel, (triton.cdiv(n, DRAWN),), seed, seed, mask.view(torch.int8), n, int(p * 2**BITS), SHIFT=32 - BITS, CH=DRAWN)
    return mask
