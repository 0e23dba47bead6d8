"""PyTorch's block-sparse weights (BSR): made of a masked weight, and what it asks of a layer's call to multiply by one."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .kernels.errors import UnsupportedError, message


def bsr(name: str, w: Tensor, block: tuple[int, int]) -> Tensor:
    """A weight (N, K) in blocks; UnsupportedError where they are ragged, or PyTorch does not multiply by them."""
    if w.shape[0] % block[0] or w.shape[1] % block[1]:
        what = f"torch.sparse_bsr has no ragged blocks: expected a weight that {block} divides, got {tuple(w.shape)}."
        raise UnsupportedError(message(what, name, "use format='dense', or exclude this layer from the masks."))
    found = w.to_sparse_bsr(block)
    x = torch.linspace(-1, 1, 4 * w.shape[1], dtype=w.dtype, device=w.device).reshape(2, 2, w.shape[1])
    try:  # which blocks and dtypes F.linear takes depends on the device and on how PyTorch was built
        F.linear(x, found)
    except RuntimeError as e:
        what = f"PyTorch cannot multiply by a torch.sparse_bsr weight in blocks of {block}, {w.dtype} on {w.device}: {str(e).splitlines()[0]}"
        raise UnsupportedError(message(what, name, "use format='dense'.")) from None
    return found


def before_bsr(m: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """PyTorch's product with a BSR weight takes no transposed tokens, no inference_mode, and on a CPU no 16 bits."""
    if torch.is_inference_mode_enabled():
        what = f"PyTorch cannot multiply by a torch.sparse_bsr weight inside torch.inference_mode: expected torch.no_grad, in {m}."
        raise UnsupportedError(message(what, "fxmask.finalize(format='bsr')", "use torch.no_grad, or format='dense'."))
    if torch.is_autocast_enabled("cpu") and m.weight.device.type == "cpu":
        what = f"PyTorch cannot multiply by a torch.sparse_bsr weight under autocast on a CPU: expected no autocast around {m}."
        raise UnsupportedError(message(what, "fxmask.finalize(format='bsr')", "leave the autocast region, or use format='dense'."))
    return tuple(a.contiguous() for a in args), {name: a.contiguous() for name, a in kwargs.items()}
