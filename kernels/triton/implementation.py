"""The ops by Triton kernels; the functions have the arguments and results of `kernels.reference`.

Blocks of 16, 32, 64 and 128 go through the list and sampled matmuls, which skip what is masked. Any other block is masked and cast in one pass, then
multiplied densely: correct, one read of W cheaper than plain PyTorch, and no FLOP saved.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import reference
from ..grid import grid_shape
from ..select import select_blocks
from . import launch
from .launch import interpreting as interpreting
from .launch import require as require


def _tf32(t: Tensor) -> bool:
    """Whether the user lets float32 matmuls round to TF32."""
    return t.dtype == torch.float32 and t.is_cuda and torch.backends.cuda.matmul.allow_tf32


def block_index(w: Tensor, keep: Tensor, step: Tensor, block: tuple[int, int], criterion: str, ties: str, stream: int) -> Tensor:
    """As `kernels.reference.block_index`, bit for bit. Kernels for `fro`; the other criteria are plain PyTorch on the device."""
    if criterion != "fro" or not launch.listed(block) or w.dtype == torch.float64:
        return reference.block_index(w, keep, step, block, criterion, ties, stream)
    keys = launch.block_keys(w, block)
    nb, kb = grid_shape(w.shape, block)
    return launch.select(keys, keep) if ties == "lowest" and nb * kb <= launch.SELECT_MAX else select_blocks(keys, keep, ties)


def masked_linear(x: Tensor, w: Tensor, bias: Tensor | None, mask: Tensor, block: tuple[int, int]) -> Tensor:
    """y = x (W∘M)^T + bias, (..., N)."""
    if not launch.listed(block):
        return F.linear(x, launch.mask_cast(w, mask, block, w.dtype), bias)
    return launch.list_matmul(x, w, bias, mask, block, transposed=False, tf32=_tf32(x)).reshape(*x.shape[:-1], w.shape[0])


def masked_linear_dx(gy: Tensor, w: Tensor, mask: Tensor, block: tuple[int, int], backward: str) -> Tensor:
    """dX = dY (W∘M), or dY W in mode `unmasked`; (..., K)."""
    if backward == "unmasked":
        return torch.matmul(gy, w)
    if not launch.listed(block):
        return torch.matmul(gy, launch.mask_cast(w, mask, block, w.dtype))
    return launch.list_matmul(gy, w, None, mask, block, transposed=True, tf32=_tf32(gy)).reshape(*gy.shape[:-1], w.shape[1])


def masked_linear_dw(gy: Tensor, x: Tensor, mask: Tensor, dense: Tensor | None, block: tuple[int, int], backward: str) -> Tensor:
    """dW = dY^T X, restricted to the blocks that the mode wants; (N, K)."""
    wanted = reference.gradient_mask(mask, dense, backward)
    if wanted is not None and launch.listed(block):
        return launch.sampled_matmul(gy, x, wanted, block, tf32=_tf32(x))
    dw = gy.reshape(-1, gy.shape[-1]).t() @ x.reshape(-1, x.shape[-1])
    return dw if wanted is None else launch.mask_cast(dw, wanted, block, dw.dtype, out=dw)
