"""The ops by Triton kernels; the functions have the arguments and results of `kernels.reference`.

Blocks of 16, 32, 64 and 128 go through the list and sampled matmuls, which skip what is masked. Any other block is masked and cast in one pass, then
multiplied densely: correct, one read of W cheaper than plain PyTorch, and no FLOP saved.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import reference
from ..lists import listed
from ..select import select_blocks
from . import launch, refresh
from .device import interpreting as interpreting
from .device import require as require
from .refresh import refresh_group as refresh_group


def _tf32(t: Tensor) -> bool:
    """Whether the user lets float32 matmuls round to TF32."""
    return t.dtype == torch.float32 and t.is_cuda and torch.backends.cuda.matmul.fp32_precision == "tf32"  # the old flags raise beside the new ones


def groups(w: Tensor, block: tuple[int, int], criterion: str, ties: str) -> bool:
    """Whether the kernels build this mask, and so may build it in a group."""
    return criterion == "fro" and ties == "lowest" and listed(block) and w.dtype != torch.float64 and w.numel() > 0


def block_index(w: Tensor, keep: Tensor, step: Tensor, block: tuple[int, int], criterion: str, ties: str, stream: int) -> Tensor:
    """As `kernels.reference.block_index`, bit for bit. Kernels for `fro`; the other criteria are plain PyTorch on the device."""
    if criterion != "fro" or not listed(block) or w.dtype == torch.float64 or not w.numel():
        return reference.block_index(w, keep, step, block, criterion, ties, stream)
    keys = refresh.block_keys(w, block)
    return refresh.select(keys, keep) if ties == "lowest" else select_blocks(keys, keep, ties)


def strip_lists(mask: Tensor, block: tuple[int, int]) -> Tensor:
    """Packed lists of a mask; the parts equal those of `kernels.lists.packed`."""
    return refresh.strip_lists(mask, block)


def masked_linear(x: Tensor, w: Tensor, bias: Tensor | None, mask: Tensor, block: tuple[int, int], lists: Tensor | None) -> Tensor:
    """y = x (W∘M)^T + bias, (..., N)."""
    if not listed(block):
        return F.linear(x, launch.mask_cast(w, mask, block, w.dtype), bias).contiguous()
    return launch.list_matmul(x, w, bias, mask, block, transposed=False, tf32=_tf32(x), lists=lists)


def masked_linear_dx(gy: Tensor, w: Tensor, mask: Tensor, block: tuple[int, int], backward: str, lists: Tensor | None) -> Tensor:
    """dX = dY (W∘M), or dY W in mode `unmasked`; (..., K)."""
    if backward == "unmasked":
        return torch.matmul(gy, w).contiguous()
    if not listed(block):
        return torch.matmul(gy, launch.mask_cast(w, mask, block, w.dtype)).contiguous()
    return launch.list_matmul(gy, w, None, mask, block, transposed=True, tf32=_tf32(gy), lists=lists)


def masked_linear_dw(gy: Tensor, x: Tensor, mask: Tensor, dense: Tensor | None, block: tuple[int, int], backward: str, lists: Tensor | None) -> Tensor:
    """dW = dY^T X, restricted to the blocks that the mode wants; (N, K). The lists are the mask's, and serve where just that is wanted."""
    wanted = reference.gradient_mask(mask, dense, backward)
    if wanted is not None and listed(block):
        return launch.sampled_matmul(gy, x, wanted, block, tf32=_tf32(x), lists=lists if wanted is mask else None)
    dw = reference.rows(gy).t() @ reference.rows(x)
    return dw if wanted is None else launch.mask_cast(dw, wanted, block, dw.dtype, out=dw)
