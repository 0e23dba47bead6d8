"""Every op in plain PyTorch: the oracle, what runs where nothing faster does, and the documentation of what the kernels compute.

Shapes: x (..., K), w (N, K), bias (N), gy (..., N); mask (NB, KB) bool, True = kept; tokens M = product of the leading axes. W∘M is `masked(w, mask, block)`.

| backward | dX        | dW            |
| -------- | --------- | ------------- |
| masked   | dY (W∘M)  | (dY^T X)∘M    |  Bespalov 2025, listing 5.10
| ste      | dY (W∘M)  | dY^T X        |  straight-through estimator, Bengio et al. 2013
| unmasked | dY W      | dY^T X        |  Bespalov 2025, listing 5.11
| rigl     | dY (W∘M)  | as masked; dense where the flag `dense` is set (every T-th step)  |  after Evci et al. 2020
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from .grid import expand_mask
from .lists import packed
from .score import block_keys
from .select import select_blocks

MODES = ("masked", "ste", "unmasked", "rigl")
FEW = 32  # tokens side by side, of fewer than which products batch by batch take up to 60 times as long as one of all tokens


def block_index(
    w: Tensor, keep: Tensor, step: Tensor, block: tuple[int, int], criterion: str, ties: str, stream: int, cover: bool = False
) -> Tensor:
    """Mask of a weight: scores, then exact selection. See `kernels.score.block_keys` and `kernels.select.select_blocks`."""
    return select_blocks(block_keys(w, block, criterion, step, stream), keep, ties, cover)


def strip_lists(mask: Tensor, block: tuple[int, int]) -> Tensor:
    """Packed lists of a mask, see `kernels.lists`."""
    return packed(mask, block)


def tokens(t: Tensor) -> int:
    """M of (..., K)."""
    return math.prod(t.shape[:-1])  # numel() would fix a number of tokens that a compiler does not know


def rows(t: Tensor) -> Tensor:
    """(..., K) -> (tokens, K); -1 would say nothing where K is 0."""
    return t.reshape(tokens(t), t.shape[-1])


def product(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + bias, (..., N), contiguous, of any strides of x.

    Below autograd, where nothing needs a gradient, PyTorch multiplies batches of strided rows one by one; of one row each even where they lie contiguous.
    """
    if x.dim() > 2 and x.is_contiguous():
        return F.linear(rows(x), w, bias).view(*x.shape[:-1], w.shape[0])
    if in_small_batches(x):
        return product_of_rows(x, w, bias)
    return F.linear(x, w, bias).contiguous()


def in_small_batches(t: Tensor) -> bool:
    """Whether products of it are of all of its rows, which are copied where they do not lie so."""
    return t.dim() > 2 and t.shape[-2] < FEW


def copied_once(t: Tensor) -> Tensor:
    """The same, copied where two products would copy it each: not of a part of wider rows."""
    return rows(t).view(t.shape) if in_small_batches(t) else t


def product_of_rows(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    """The same by one product of all rows, with the bits that F.linear has above autograd."""
    y = torch.mm(rows(x), w.t())
    return (y if bias is None else y.add_(bias)).view(*x.shape[:-1], w.shape[0])


Masking = Callable[[Tensor, Tensor, tuple[int, int]], Tensor]  # W∘M of a weight, its mask and the block; below it may be another form's


def masked(w: Tensor, mask: Tensor, block: tuple[int, int]) -> Tensor:
    """W∘M. A masked element is zero whatever it was (0 * Inf is not computed), and the dtype stays."""
    return torch.where(expand_mask(mask, w.shape, block), w, 0)


def gradient_mask(mask: Tensor, dense: Tensor | None, backward: str) -> Tensor | None:
    """Which blocks of dW are wanted: (NB, KB) bool, or None for all of them."""
    if backward in ("ste", "unmasked"):
        return None
    return mask if dense is None or backward != "rigl" else mask | dense


def masked_linear(
    x: Tensor, w: Tensor, bias: Tensor | None, mask: Tensor, block: tuple[int, int], lists: Tensor | None = None, by: Masking = masked
) -> Tensor:
    """y = x (W∘M)^T + bias, (..., N), contiguous. `lists`, here and below, serve kernels that skip blocks."""
    return product(x, by(w, mask, block), bias)


def masked_linear_dx(
    gy: Tensor, w: Tensor, mask: Tensor, block: tuple[int, int], backward: str, lists: Tensor | None = None, by: Masking = masked
) -> Tensor:
    """dX = dY (W∘M), or dY W in mode `unmasked`; (..., K)."""
    return product(gy, (w if backward == "unmasked" else by(w, mask, block)).t())


def masked_linear_dw(
    gy: Tensor, x: Tensor, mask: Tensor, dense: Tensor | None, block: tuple[int, int], backward: str, lists: Tensor | None = None, by: Masking = masked
) -> Tensor:
    """dW = dY^T X, restricted to the blocks that the mode wants; (N, K). Flattened first: a batched product would be B weights large."""
    dw = rows(gy).t() @ rows(x)
    wanted = gradient_mask(mask, dense, backward)
    return dw if wanted is None else by(dw, wanted, block)


def masked_linear_backward(
    gy: Tensor, x: Tensor, w: Tensor, mask: Tensor, dense: Tensor | None, block: tuple[int, int], backward: str
) -> tuple[Tensor, Tensor]:
    """dX and dW."""
    gy = copied_once(gy)
    return masked_linear_dx(gy, w, mask, block, backward), masked_linear_dw(gy, x, mask, dense, block, backward)


def composite(x: Tensor, w: Tensor, bias: Tensor | None, mask: Tensor, block: tuple[int, int], backward: str, dense: Tensor | None = None) -> Tensor:
    """The masked linear out of aten ops alone, with the mode's gradient: for function transforms and forward-mode AD, which cannot see into a custom op.

    Costs one dense matmul more in mode `unmasked`, whose gradients are those of finite masked elements. Same values as `masked_linear`.
    """
    if backward == "unmasked":  # the gradients of the dense layer, with the value of the masked one
        full = F.linear(x, torch.where(expand_mask(mask, w.shape, block) | torch.isfinite(w), w, 0))
        return F.linear(x.detach(), masked(w, mask, block).detach(), bias) + zero_of(full)
    return F.linear(x, straight_through(w, mask, block, gradient_mask(mask, dense, backward)), bias)


def zero_of(t: Tensor) -> Tensor:
    """An exact zero with the gradient of t, but of what is not finite in it, which has none: Inf - Inf would be NaN."""
    finite = torch.where(torch.isfinite(t), t, 0)
    return finite - finite.detach()


def softened(w: Tensor, mask: Tensor, block: tuple[int, int], scale: Tensor) -> Tensor:
    """W with its masked blocks times `scale` (0-d), in the dtype of W, with the true gradient."""
    return torch.where(expand_mask(mask, w.shape, block), w, w * scale.to(w.dtype))


def straight_through(w: Tensor, mask: Tensor, block: tuple[int, int], wanted: Tensor | None) -> Tensor:
    """W∘M whose gradient reaches the blocks in `wanted` (all where it is None), masked or not; of finite masked elements, exactly."""
    if wanted is mask:
        return masked(w, mask, block)
    kept = expand_mask(mask, w.shape, block)
    reached = w if wanted is None else masked(w, wanted, block)
    return torch.where(kept, reached, zero_of(torch.where(kept, 0, reached)))
