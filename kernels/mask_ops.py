"""The ops that make masks: `fxmask::block_index` from a weight, `fxmask::strip_lists` from a mask; each with its fake, and as modules ask for it.

They stand apart from the matmuls, so that a graph shows both, and a mask can outlive a step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import gpu_choice, reference
from .dispatch import form
from .errors import ConfigError, ShapeError
from .grid import grid_shape
from .inductor import register_fake
from .lean import without_gradient
from .lists import LISTED, listed, packed_length
from .operands import check_devices, is_transformed
from .select import TIES

# ---- block_index -------------------------------------------------------------------------------------------------------------------------------------


@torch.library.custom_op("fxmask::block_index", mutates_args=())
def block_index(
    w: Tensor, keep: Tensor, step: Tensor, block_rows: int, block_cols: int, criterion: str, ties: str, stream: int, impl: str = "auto", cover: bool = False
) -> Tensor:
    """Mask of the `keep` best blocks of `w`.

    Args:
        w: weight (N, K), floating. keep, step: 0-d int64 on the device of `w`; `step` and `stream` drive `criterion="random"` alone.
        criterion: see `kernels.score.CRITERIA`. ties: `lowest` (exactly `keep` blocks) or `keep` (all that tie with the last one).
        impl: see `kernels.dispatch`. cover: no block row or column without a block, see `kernels.select.covering`; not with impl="triton".

    Returns: bool (ceil(N / block_rows), ceil(K / block_cols)), True = kept.
    Differentiable: no. Cost: one read of `w`, one sort of its blocks; no host sync.
    """
    grid_shape(w.shape, (block_rows, block_cols))  # raises for what is no matrix
    if ties not in TIES:
        raise ConfigError(f"unknown ties: expected one of {', '.join(TIES)}, got {ties!r}.")
    if impl == "auto" and gpu_choice.builds(w, (block_rows, block_cols), criterion, ties, cover):
        impl = "triton"
    return form(impl, w).block_index(w, keep, step, (block_rows, block_cols), criterion, ties, stream, cover)


@register_fake(block_index)
def _(w: Tensor, keep: Tensor, step: Tensor, block_rows: int, block_cols: int, *rest: Any) -> Tensor:
    if (keep.is_meta or step.is_meta) and not w.is_meta:  # not the reverse: an exported model's numbers stay where they were
        check_devices(w, keep=keep, step=step)
    return w.new_empty(grid_shape(w.shape, (block_rows, block_cols)), dtype=torch.bool)


without_gradient(block_index)

# ---- strip_lists -------------------------------------------------------------------------------------------------------------------------------------


@torch.library.custom_op("fxmask::strip_lists", mutates_args=())
def strip_lists(mask: Tensor, block_rows: int, block_cols: int, impl: str = "auto") -> Tensor:
    """Lists of the kept blocks, both directions, for kernels that skip the others: int32 [kernels.lists.packed_length].

    mask: bool (NB, KB), True = kept; block sides of `kernels.lists.LISTED`. Differentiable: no. Cost: one read of the mask; no host sync.
    Raises: ShapeError, UnsupportedError (a weight of more units than an entry can name, see `kernels.lists`).
    """
    if mask.dim() != 2 or mask.dtype != torch.bool or not listed((block_rows, block_cols)):
        got = f"{mask.dtype} {tuple(mask.shape)}, blocks {(block_rows, block_cols)}"
        raise ShapeError(f"fxmask::strip_lists: expected a mask bool (NB, KB) in blocks of {', '.join(map(str, LISTED))}, got {got}.")
    of_mask = form(impl, mask.new_empty(0, dtype=torch.float32))  # a mask has no floating dtype to object to
    return of_mask.strip_lists(mask, (block_rows, block_cols))


@register_fake(strip_lists)
def _(mask: Tensor, block_rows: int, block_cols: int, impl: str = "auto") -> Tensor:
    length = packed_length((mask.shape[0], mask.shape[1]), (block_rows, block_cols))
    return mask.new_empty(length, dtype=torch.int32)


without_gradient(strip_lists)


def index(
    w: Tensor, keep: Tensor, step: Tensor, block: tuple[int, int], criterion: str, ties: str, stream: int, impl: str = "auto", cover: bool = False
) -> Tensor:
    """The mask as modules ask for it: `block_index`, or its aten form under function transforms."""
    if is_transformed(impl):
        return reference.block_index(w, keep, step, block, criterion, ties, stream, cover)
    return block_index(w, keep, step, block[0], block[1], criterion, ties, stream, impl, cover)


def lists(mask: Tensor, block: tuple[int, int], impl: str) -> Tensor | None:
    """The lists that the matmuls of `impl` read, made once for forward and backward; None where they read none."""
    if impl != "triton" or not listed(block) or is_transformed(impl):
        return None
    return strip_lists(mask, block[0], block[1], impl)
