"""Masked Conv2ds, by class swap: PyTorch's convolution of W∘M, or the masked linear of its patches where windows do not overlap."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from .kernels import conv
from .passes.finding.weights import raw_weight
from .passes.state.site_forward import forward_lists, forward_mask, refuse_tracing
from .swap import MaskedLayer, softened
from .swapped import look_at_asked, of_now


class MaskedConv2d(MaskedLayer):
    """Forward of a masked Conv2d: (B, c_in, H, W) or (c_in, H, W) -> (B, c_out, rows, cols), or that without B.

    Mode `unmasked`, whose forward and backward are of two weights, costs a dense convolution more, but where the masked linear computes it.
    """

    bias: Tensor | None

    def forward(self, input: Tensor) -> Any:
        if not isinstance(self, MaskedConv2d):
            return of_now(self, input)
        c, weight = self._fxmask_config, raw_weight(self)
        if isinstance(input, Proxy):  # `forward_mask` asks whether a tracer runs; none does where a graph is built by hand and calls this with a Proxy
            refuse_tracing(self)
        look_at_asked(self)
        mask = forward_mask(self, weight)
        if self._fxmask_softening:
            return conv_forward(self, input, conv.in_format_of(softened(self, weight, mask), weight))
        flag = self._fxmask_dense
        if c.impl in LISTS and not why_dense(self, weight) and conv.fits(input, weight):
            lists = forward_lists(self, mask, c.impl)
            return conv.patchwise(input, weight, self.bias, mask, c.block, c.backward, flag, c.impl, lists, conv.pair(self.stride))
        made = conv.masked_weight(weight, mask, c.block, c.backward, flag)
        if c.backward != "unmasked" or not torch.is_grad_enabled():
            return conv_forward(self, input, made)
        with torch.no_grad():
            value = conv_forward(self, input, made)
        return conv.graft(value, conv_forward(self, input, weight))


LISTS = ("cpu", "triton")  # implementations that skip blocks; auto is PyTorch's convolution: no run of a whole layer shows a gain


def conv_forward(m: Any, input: Tensor, weight: Tensor) -> Tensor:
    """A Conv2d's own convolution, padding included, with another weight."""
    return m._conv_forward(input, weight, m.bias)


def why_dense(m: Any, weight: Tensor) -> str:
    """Why no matmul of patches computes a Conv2d; empty where one can."""
    if type(m)._conv_forward is not nn.Conv2d._conv_forward:
        return f"{m._fxmask_base.__name__} convolves in its own way"
    kernel = (weight.shape[2], weight.shape[3])
    padded = m.padding == "same" and kernel != (1, 1) if isinstance(m.padding, str) else any(conv.pair(m.padding))
    if m.padding_mode != "zeros":  # PyTorch then copies the image, by nothing too, and may forget its memory format
        return f"padding_mode={m.padding_mode!r}"
    if padded or not conv.is_patchwise(kernel, conv.pair(m.stride), conv.pair(m.dilation)):
        return "windows overlap, have gaps, or reach into padding"
    return ""
