"""Masked convolutions: the weight (c_out, c_in, kh, kw) is a matrix (c_out, c_in * kh * kw), and blocks are cut from that.

Any convolution is PyTorch's own with W∘M in the weight's place, whatever its stride, dilation and padding. One whose windows do not overlap is a matmul of its
patches, (B, pixels, c_in * kh * kw) -> (B, pixels, c_out), which the masked linear computes, and skips blocks there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import operands, ops, reference
from .grid import as_matrix
from .inductor import register_fake
from .lean import register_autograd

Pair = tuple[int, int]


def pair(value: Any) -> Pair:
    """Two ints for the two axes of an image, as PyTorch reads an option of a convolution."""
    rows, cols = value if isinstance(value, (tuple, list)) and len(value) == 2 else (value[0] if isinstance(value, (tuple, list)) else value,) * 2
    return int(rows), int(cols)


def is_patchwise(kernel: Pair, stride: Pair, dilation: Pair) -> bool:
    """Whether no two windows share a pixel, and none has gaps: 1x1 of any stride, and patches (stride = kernel, or more)."""
    return all(k <= s and (k == 1 or d == 1) for k, s, d in zip(kernel, stride, dilation, strict=True))


def fits(x: Tensor, w: Tensor) -> bool:
    """Whether an input is an image, (B, C, H, W) or (C, H, W), that a kernel w (c_out, C, kh, kw) fits into."""
    return x.dim() in (3, 4) and x.shape[-3] == w.shape[1] and x.shape[-2] >= w.shape[2] and x.shape[-1] >= w.shape[3]


def is_channels_last(t: Tensor) -> bool:
    """Whether the strides of an image or a kernel say that its channels lie inside, as PyTorch reads them: a convolution's result then has its there, too."""
    if t.dim() != 4 or 0 in t.shape or t.stride(1) == 0:  # a grey image that is expanded to three channels has none inside
        return False
    least = 0
    for axis in (1, 3, 2, 0):
        if t.stride(axis) < least or (axis == 0 and least == t.stride(1)):  # of (N, 1, 1, 1) nothing says it
            return False
        least = t.stride(axis) * t.shape[axis]
    return True


def formatted(y: Tensor, x: Tensor, w: Tensor) -> Tensor:
    """A result (B, c_out, rows, cols) in the memory format that PyTorch's convolution of x and w has. Under function transforms contiguous.

    An axis of length 1 has its stride there, too: views and the next layer go by it, and `contiguous` leaves it as it is.
    """
    last = (is_channels_last(x) or is_channels_last(w)) and not operands.is_transformed("auto")
    wanted = torch.channels_last if last else torch.contiguous_format
    return y.contiguous(memory_format=wanted) if is_channels_last(y) == last else y.clone(memory_format=wanted)


def in_format_of(made: Tensor, weight: Tensor) -> Tensor:
    """W∘M with the strides of its weight, by which PyTorch chooses those of the result. Under function transforms as it is."""
    if made.stride() == weight.stride() or operands.is_transformed("auto"):
        return made
    if is_channels_last(weight):
        return made.clone(memory_format=torch.channels_last)  # a copy into a tensor would have no derivative in an export that was decomposed
    return torch.empty_like(weight).copy_(made)


def masked_weight(w: Tensor, mask: Tensor, block: Pair, backward: str, dense: Tensor | None) -> Tensor:
    """W∘M of any number of axes, in the memory format of W, with the gradient of the mode. Mode `unmasked` has another weight in the backward: see `graft`."""
    wanted = reference.gradient_mask(mask, dense, backward)
    if wanted is mask or backward == "unmasked" or not torch.is_grad_enabled():
        made = reference.masked(w, mask, block)
    elif operands.is_transformed("auto"):
        made = reference.straight_through(w, mask, block, wanted)
    else:
        made = graft(reference.masked(w, mask, block), w if wanted is None else reference.masked(w, wanted, block))
    return in_format_of(made, w)


def patches(x: Tensor, kernel: Pair, stride: Pair) -> tuple[Tensor, Pair]:
    """Every window of an image (B, C, H, W) as a token: (B, pixels, C * kh * kw), in the order of the weight's columns, and (rows, cols) of the result.

    A view for 1x1 of stride 1: of channels_last images contiguous, of others with the pixels inside, as token mixing has them. A copy otherwise.
    """
    windows = _windows(_windows(x, 2, kernel[0], stride[0]), 4, kernel[1], stride[1])  # [B, C, rows, kh, cols, kw]
    batch, channels, rows, _, cols, _ = windows.shape
    return windows.permute(0, 2, 4, 1, 3, 5).reshape(batch, rows * cols, channels * kernel[0] * kernel[1]), (rows, cols)


def _windows(x: Tensor, axis: int, size: int, stride: int) -> Tensor:
    """The windows along an axis of a tensor, a new axis behind it: by views that autograd differentiates without adding anything up, where there are such."""
    if size == 1:
        every = x if stride == 1 else x[(slice(None),) * axis + (slice(None, None, stride),)]
        return every.unsqueeze(axis + 1)
    if size == stride:
        whole = x.shape[axis] // size
        return (x if whole * size == x.shape[axis] else x.narrow(axis, 0, whole * size)).unflatten(axis, (whole, size))
    return x.unfold(axis, size, stride).movedim(-1, axis + 1)


def patchwise(
    x: Tensor, w: Tensor, bias: Tensor | None, mask: Tensor, block: Pair, backward: str, dense: Tensor | None, impl: str, lists: Tensor | None, stride: Pair
) -> Tensor:
    """A masked convolution of windows that do not overlap, without padding, as `ops.linear` of its patches.

    x: (B, C, H, W) or (C, H, W) that `fits`; w: (c_out, C, kh, kw); the rest as for `ops.linear`. Returns: (B, c_out, rows, cols), or that without B, in the
    memory format that PyTorch's convolution would give. Differentiable: x, w, bias. Cost: as the masked linear, and copies of image and result where their
    channels are not inside.
    """
    images = x if x.dim() == 4 else x[None]
    tokens, (rows, cols) = patches(images, (w.shape[2], w.shape[3]), stride)
    y = ops.linear(tokens, as_matrix(w), bias, mask, block, backward, dense, impl, lists)
    y = y.reshape(images.shape[0], rows, cols, w.shape[0]).permute(0, 3, 1, 2)  # one image, too, has the stride by which PyTorch tells its memory format
    y = formatted(y, images, w)
    return y if x.dim() == 4 else y[0]


# ---- graft -------------------------------------------------------------------------------------------------------------------------------------------


@torch.library.custom_op("fxmask::graft", mutates_args=())
def _graft(value: Tensor, other: Tensor) -> Tensor:
    """A copy of `value`, with the gradient of `other`, of the same shape. Raises: UnsupportedError in forward-mode AD."""
    operands.refuse_forward_ad()
    return value.clone()


@register_fake(_graft)
def _(value: Tensor, other: Tensor) -> Tensor:
    operands.refuse_forward_ad()
    return value.clone()


register_autograd(_graft, lambda ctx, gy: (None, gy), lambda ctx, inputs, output: None)


def graft(value: Tensor, other: Tensor) -> Tensor:
    """`value`, with the gradient of `other`, which may be infinite where `value` is not. Under function transforms its plain form, where `other` is finite."""
    return value.detach() + reference.zero_of(other) if operands.is_transformed("auto") else _graft(value.detach(), other)
