"""The implementations that are compared. A provider prepares what is not timed and returns the call that is.

Outputs are a tuple of dense tensors, or of what `gate.dense_of` can make dense: (y,), (dx,), (dw,), (y, dx, dw), (mask,), or lists. `step` is what autograd
runs in a training step of the layer: forward, dX and dW, in that order.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import UnsupportedError
from ..kernels import lists, ops
from ..kernels.dispatch import triton_ops
from ..kernels.lists import Layout
from . import torch_sparse
from .inputs import Inputs

Call = Callable[[], tuple[Any, ...]]
Provider = Callable[[Inputs], Call]


def dense(i: Inputs) -> Call:
    """The dense layer, which computes another function: what masking has to beat."""
    return {
        "forward": lambda: (F.linear(i.x, i.w),),
        "dx": lambda: (i.gy @ i.w,),
        "dw": lambda: (i.gy.t() @ i.x,),
        "step": lambda: (F.linear(i.x, i.w), i.gy @ i.w, i.gy.t() @ i.x),
    }[i.cell.op]


def masked_dense(i: Inputs) -> Call:
    """W∘M by torch.where, then a dense matmul; the element mask is given. A step masks W once."""
    kept, zero = i.element_mask, torch.zeros((), dtype=i.w.dtype, device=i.device)

    def weight() -> Tensor:
        return torch.where(kept, i.w, zero)

    def dw() -> Tensor:
        return torch.where(kept, i.gy.t() @ i.x, zero)

    def step() -> tuple[Tensor, ...]:
        w = weight()
        return F.linear(i.x, w), i.gy @ w, dw()

    return {"forward": lambda: (F.linear(i.x, weight()),), "dx": lambda: (i.gy @ weight(),), "dw": lambda: (dw(),), "step": step}[i.cell.op]


def _launchers() -> ModuleType:
    return triton_ops().launch


def list_layouts(i: Inputs) -> list[tuple[Layout, bool]]:
    """(layout, transposed) of both directions, with the tile that the provider uses."""
    grid = (i.mask.shape[0], i.mask.shape[1])
    if i.cell.provider != "fxmask_triton":
        return [(lists.layout(grid, i.block, t), t) for t in (False, True)]
    tile = _launchers().tile_for(i.w.dtype, i.cell.dtype == "tf32")
    return [(lists.layout(grid, i.block, t, tile.strip, tile.step), t) for t in (False, True)]


def _lists(i: Inputs, impl: str) -> Call:
    """The strip lists of both directions, as one refresh needs them."""
    form: Any = _launchers() if impl == "triton" else lists
    both = list_layouts(i)
    return lambda: tuple(t for lay, transposed in both for t in form.strip_lists(i.mask, lay, transposed))


def fxmask(impl: str) -> Provider:
    """The library's own ops, by one implementation."""

    def prepare(i: Inputs) -> Call:
        b, c = i.block, i.cell

        def forward() -> Tensor:
            return ops.masked_linear(i.x, i.w, None, i.mask, *b, "masked", None, impl)

        def dx() -> Tensor:
            return ops.masked_linear_dx(i.gy, i.w, i.mask, *b, "masked", None, impl)

        def dw() -> Tensor:
            return ops.masked_linear_dw(i.gy, i.x, i.mask, *b, "masked", None, impl)

        if c.op == "metadata":
            if c.phase == "lists":
                return _lists(i, impl)
            return lambda: (ops.block_index(i.w, i.keep, i.step, *b, "fro", "lowest", 0, impl),)
        return {"forward": lambda: (forward(),), "dx": lambda: (dx(),), "dw": lambda: (dw(),), "step": lambda: (forward(), dx(), dw())}[c.op]

    return prepare


REGISTRY: dict[str, Provider] = {
    "dense": dense,
    "masked_dense": masked_dense,
    "fxmask_triton": fxmask("triton"),
    "fxmask_reference": fxmask("reference"),
    "fxmask_auto": fxmask("auto"),
    "torch_bsr": torch_sparse.bsr(None),
    "torch_bsr_s4": torch_sparse.bsr(4),
    "torch_sampled": torch_sparse.sampled,
}


def builds_lists(call: Call) -> int:
    """How many list kernels one call launches: where it is not 0, a call's time holds the lists, and a refresh adds only the mask."""
    try:
        counter = _launchers().LAUNCHES
    except (UnsupportedError, AttributeError):
        return 0
    before = counter["strip_lists_kernel"]
    call()
    return int(counter["strip_lists_kernel"] - before)
