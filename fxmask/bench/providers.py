"""The implementations that are compared. A provider prepares what is not timed and returns the call that is.

Outputs are a tuple of dense tensors, or of what `gate.dense_of` can make dense: (y,), (dx,), (dw,), (y, dx, dw), (mask,) or (lists,). `step` is what autograd
runs in a training step of the layer: forward, dX and dW, in that order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels import gpu_choice, ops
from ..kernels.cpu import deciding
from ..kernels.cpu.plans import Case
from ..kernels.dispatch import MASKED_DENSE
from ..kernels.grid import keep_count
from . import torch_sparse
from .cells import products
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


def pays(i: Inputs) -> bool:
    """Whether `auto` takes the kernels in a layer of this cell: what `passes.state.gpu_site` asks, with the cell's ratio."""
    c, (nb, kb) = i.cell, i.mask.shape
    density = keep_count(nb * kb, c.ratio) / (nb * kb)
    return gpu_choice.choice(i.device, i.w.dtype, c.M, (c.N, c.K), c.block, density) == "triton"


def fxmask(impl: str) -> Provider:
    """The library's own ops, by one implementation. Lists are made once a mask, outside of the time: the refresh columns add them."""

    def prepare(i: Inputs) -> Call:
        b, c = i.block, i.cell
        if c.op == "metadata" and c.phase == "lists":
            return lambda: (ops.strip_lists(i.mask, *b, impl),)
        if c.op == "metadata":
            return lambda: (ops.block_index(i.w, i.keep, i.step, *b, "fro", "lowest", 0, impl),)
        run = "triton" if impl == "auto" and pays(i) else impl
        lists = ops.lists(i.mask, b, run)

        def forward() -> Tensor:
            return ops.masked_linear(i.x, i.w, None, i.mask, *b, "masked", None, run, lists)

        def dx() -> Tensor:
            return ops.masked_linear_dx(i.gy, i.w, i.mask, *b, "masked", None, run, lists)

        def dw() -> Tensor:
            return ops.masked_linear_dw(i.gy, i.x, i.mask, *b, "masked", None, run, lists)

        return {"forward": lambda: (forward(),), "dx": lambda: (dx(),), "dw": lambda: (dw(),), "step": lambda: (forward(), dx(), dw())}[c.op]

    return prepare


def ran(i: Inputs) -> str:
    """What `auto` runs of a cell, each of its ops, once the call has run; empty for other providers and for masks."""
    c = i.cell
    if c.provider != "fxmask_auto" or c.op == "metadata":
        return ""
    found = {}
    for op in products(c.op):
        cpu = i.device.type == "cpu"
        choice = deciding.of(Case(op, c.M, (c.N, c.K), c.block, float(i.mask.count_nonzero()) / i.mask.numel(), i.w.dtype), False) if cpu else None
        found[op] = choice.name if choice else "triton" if pays(i) else MASKED_DENSE
    return ", ".join(f"{op} {name}" for op, name in found.items())


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
