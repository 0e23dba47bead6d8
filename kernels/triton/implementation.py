"""The ops by Triton kernels; the functions have the arguments and results of `kernels.reference`.

Blocks of 16, 32, 64 and 128 go through the list and sampled matmuls, which skip what is masked. Any other block, and operands with an odd number of features,
whose rows cannot be copied in pieces of 4 bytes and so leave the pipeline, are masked in one pass, then multiplied densely (`masked_dense`): correct, and no
FLOP saved. Of pruned inputs `prune_launch` says which dW has a kernel; the others are expanded and multiplied densely.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import prune, reference
from ..errors import UnsupportedError
from ..lists import listed, skips
from ..select import NO_COVER, select_blocks
from ..strides import tokens_inner
from . import aside as aside
from . import dropped as dropped
from . import launch, masked_dense, prune_launch, refresh
from . import nm as nm
from .device import allows_tf32
from .device import interpreting as interpreting
from .device import require as require
from .refresh import block_keys as block_keys
from .refresh import refresh_group as refresh_group
from .saliency import saliency as saliency
from .saliency import take_in as take_in
from .saliency import takes_gradient as takes_gradient
from .saliency import takes_scores as takes_scores
from .tiles import SELECT_MAX


def scores(w: Tensor, block: tuple[int, int], criterion: str) -> bool:
    """Whether a kernel has the keys of a weight's blocks."""
    return criterion == "fro" and listed(block) and w.dtype != torch.float64 and w.numel() > 0


def builds(w: Tensor, block: tuple[int, int], criterion: str, ties: str, cover: bool = False) -> bool:
    """Whether the kernels build this mask from end to end."""
    return scores(w, block, criterion) and ties == "lowest" and not cover


def groups(w: Tensor, block: tuple[int, int], criterion: str, ties: str, cover: bool = False, scores: Tensor | None = None) -> bool:
    """Whether they may build it in a group, whose table holds addresses: rows that are not in one piece would be copied to another one each time.

    `scores`: what the mask goes by before it goes by `criterion`; selections among very many blocks have no kernel for them.
    """
    return builds(w, block, criterion, ties, cover) and w[0].is_contiguous() and (scores is None or (scores.numel() <= SELECT_MAX and scores.is_contiguous()))


def block_index(
    w: Tensor, keep: Tensor, step: Tensor, block: tuple[int, int], criterion: str, ties: str, stream: int, cover: bool = False
) -> Tensor:
    """As `kernels.reference.block_index`, bit for bit. Kernels for `fro`; the other criteria are plain PyTorch on the device.

    Raises: UnsupportedError for `cover`, which no kernel has.
    """
    if cover:
        raise UnsupportedError(NO_COVER)
    if not scores(w, block, criterion):
        return reference.block_index(w, keep, step, block, criterion, ties, stream)
    keys = refresh.block_keys(w, block)
    return refresh.select(keys, keep) if ties == "lowest" else select_blocks(keys, keep, ties)


def strip_lists(mask: Tensor, block: tuple[int, int]) -> Tensor:
    """Packed lists of a mask; the parts equal those of `kernels.lists.packed`."""
    return refresh.strip_lists(mask, block)


def _laid_out(y: Tensor, x: Tensor, block: tuple[int, int]) -> Tensor:
    """A dense result in the layout that the kernels would give it, which is what the fakes promise."""
    return y.transpose(1, 2).contiguous().transpose(1, 2) if listed(block) and tokens_inner(x) else y.contiguous()


def masked_linear(x: Tensor, w: Tensor, bias: Tensor | None, mask: Tensor, block: tuple[int, int], lists: Tensor | None) -> Tensor:
    """y = x (W∘M)^T + bias, (..., N)."""
    if not skips("forward", w.shape, block):
        return _laid_out(F.linear(x, masked_dense.masked(w, mask, block), bias), x, block)
    return launch.list_matmul(x, w, bias, mask, block, transposed=False, tf32=allows_tf32(x), lists=lists)


def masked_linear_dx(gy: Tensor, w: Tensor, mask: Tensor, block: tuple[int, int], backward: str, lists: Tensor | None) -> Tensor:
    """dX = dY (W∘M), or dY W in mode `unmasked`; (..., K)."""
    if backward == "unmasked":
        return torch.matmul(gy, w).contiguous()
    if not skips("dx", w.shape, block):
        return _laid_out(torch.matmul(gy, masked_dense.masked(w, mask, block)), gy, block)
    return launch.list_matmul(gy, w, None, mask, block, transposed=True, tf32=allows_tf32(gy), lists=lists)


def masked_linear_dw(gy: Tensor, x: Tensor, mask: Tensor, dense: Tensor | None, block: tuple[int, int], backward: str, lists: Tensor | None) -> Tensor:
    """dW = dY^T X, restricted to the blocks that the mode wants; (N, K). The lists are the mask's, and serve where just that is wanted."""
    wanted = reference.gradient_mask(mask, dense, backward)
    if wanted is not None and skips("dw", (gy.shape[-1], x.shape[-1]), block):
        return launch.sampled_matmul(gy, x, wanted, block, tf32=allows_tf32(x), lists=lists if wanted is mask else None)
    return masked_dense.masked_linear_dw(gy, x, mask, dense, block, backward)


def pruned_dw(
    gy: Tensor, values: Tensor, index: Tensor, shape: tuple[int, ...], turned: bool, mask: Tensor | None, block: tuple[int, int], lists: Tensor | None
) -> Tensor:
    """dW = dY^T X_s of a pruned input, (N, K), under a mask of W in its kept blocks alone."""
    if prune_launch.takes(gy, values, turned):
        return prune_launch.pruned_dw(gy, values, index, shape, mask, block, lists, allows_tf32(gy))
    dw = prune.dw(gy, values, index, shape, turned).contiguous()
    return dw if mask is None else masked_dense.zero_masked(dw, mask, block)
