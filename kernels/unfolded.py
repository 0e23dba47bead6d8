"""A convolution as one product: W (c_out, c_in * kh * kw) times the unfolded input, which is how it reaches a matmul for 2:4 weights (Danhofer 2024)."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from .conv import formatted
from .errors import ShapeError, UnsupportedError, message

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def conv2d(x: Tensor, m: nn.Conv2d, weight: Tensor | None = None, product: Product = F.linear) -> Tensor:
    """What the layer `m` computes, by `product(patches, matrix, bias)`: the same sums in another order, so equal to rounding.

    Args:
        x: (B, c_in, H, W) or (c_in, H, W). m: any stride, padding, dilation and padding_mode; without groups.
        weight: (c_out, c_in, kh, kw), or what `product` takes for a matrix (c_out, c_in * kh * kw), such as a semi-structured one; the layer's own if None,
            which a masked layer has to be given: W∘M.

    Returns: (B, c_out, H', W') or (c_out, H', W'), in the memory format that the layer gives it. Differentiable as `product` is. Raises: UnsupportedError for
    groups and for a masked layer without `weight`, ShapeError.
    Cost: a copy of the input of kh * kw / stride^2 times its size. Patches are rows (B, H' * W', c_in * kh * kw), as a Linear has its tokens.
    """
    if m.groups != 1:
        what = f"a convolution of {m.groups} groups has a matrix for each: expected groups=1."
        raise UnsupportedError(message(what, "fxmask.kernels.unfolded.conv2d", "call the layer itself."))
    if x.dim() not in (3, 4) or x.shape[-3] != m.in_channels:
        what = f"the input of a convolution: expected (B, {m.in_channels}, H, W) or ({m.in_channels}, H, W), got {tuple(x.shape)}."
        raise ShapeError(message(what, "fxmask.kernels.unfolded.conv2d", "give an image of that many channels."))
    if weight is None and hasattr(m, "_fxmask_base"):  # its own is dense
        what = "a masked convolution has a dense weight: expected W∘M in `weight`, got None."
        raise UnsupportedError(message(what, "fxmask.kernels.unfolded.conv2d", "make it by the layer's mask of fxmask.masks; or call the layer itself."))
    matrix = m.weight if weight is None else weight
    around = m._reversed_padding_repeated_twice  # of every padding: int, "same", "valid"
    batch = x if x.dim() == 4 else x.unsqueeze(0)
    padded = F.pad(batch, around, mode="constant" if m.padding_mode == "zeros" else m.padding_mode)
    size = [(n - d * (k - 1) - 1) // s + 1 for n, k, d, s in zip(padded.shape[2:], m.kernel_size, m.dilation, m.stride, strict=True)]
    patches = F.unfold(padded, m.kernel_size, m.dilation, 0, m.stride).transpose(1, 2)
    y = product(patches, matrix.flatten(1) if matrix.dim() == 4 else matrix, m.bias)
    y = formatted(y.transpose(1, 2).reshape(batch.shape[0], m.out_channels, *size), batch, matrix)
    return y if x.dim() == 4 else y.squeeze(0)
