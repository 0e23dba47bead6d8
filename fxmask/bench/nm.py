"""Stage `nm`: a linear under a 2:4 mask by magnitude, forward, dX and dW, its mask made anew in every call; and a frozen 2:4 weight in the hardware's form.

A mask saves no FLOP in training: what is timed is what it costs beside the dense layer, by plain PyTorch and by the kernel that makes mask and W∘M in one
pass. What the hardware gives for 2:4 shows in the forward alone, by PyTorch's semi-structured tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels import nm, nm_ops
from ..nm.semi_structured import semi_structured
from .gate import over_budget
from .inputs import operands
from .part import Part, Prepared

SHAPES = ((25088, 1536, 384), (8192, 4096, 4096))  # M, N, K: ResMLP-S12 at batch 128, and one that is no matter of launches
TINY = (40, 48, 64)
CPU_SHAPE = (4096, 1536, 384)
KEPT, OF = 2, 4
Tensors = tuple[Tensor, Tensor, Tensor]  # x, W, dY
Step = tuple[Tensor | None, ...]  # y, dX, dW, and the mask; None: not computed, all kept


class NM(NamedTuple):
    """`provider`: dense, masked_dense (PyTorch's ops), fxmask_triton (the kernel), semi_structured. `op`: step (forward, dX, dW) or forward."""

    provider: str
    op: str
    M: int
    N: int
    K: int
    dtype: str


def cells(device: torch.device, quick: bool) -> list[NM]:
    """The dense layer first."""
    cuda = device.type == "cuda"
    shapes = (SHAPES[:1] if quick else SHAPES) if cuda else (TINY,)
    found = [NM(provider, "step", *shape, "bf16") for shape in shapes for provider in STEPS]
    return found + [NM(provider, "forward", *shape, "bf16") for shape in shapes if cuda for provider in ("dense", "semi_structured")]


def cpu_cells(quick: bool) -> list[NM]:
    """A CPU has no kernel of ours for 2:4: plain PyTorch's ops, in float32, are what `NMMask` takes there."""
    return [NM(provider, "step", *CPU_SHAPE, "fp32") for provider in ("dense", "masked_dense")]


def _products(tensors: Tensors, made: Tensor, mask: Tensor) -> Step:
    x, _, gy = tensors
    return F.linear(x, made), gy @ made, (gy.t() @ x).masked_fill_(~mask, 0), mask


def dense(tensors: Tensors) -> Step:
    """The linear alone."""
    x, w, gy = tensors
    return F.linear(x, w), gy @ w, gy.t() @ x, None


def masked_dense(tensors: Tensors) -> Step:
    """The mask by PyTorch's ops."""
    mask = nm.magnitude_mask(tensors[1], KEPT, OF)
    return _products(tensors, torch.where(mask, tensors[1], 0), mask)


def fxmask_triton(tensors: Tensors) -> Step:
    """Mask and W∘M in one pass, as `NMMask(impl="triton")` makes them."""
    return _products(tensors, *nm_ops.nm_magnitude(tensors[1], KEPT, OF, False, 0.0, tensors[1].dtype))


STEPS: dict[str, Callable[[Tensors], Step]] = {f.__name__: f for f in (dense, masked_dense, fxmask_triton)}


def forward(provider: str, tensors: Tensors) -> Callable[[], Step]:
    """The forward of a weight that rests; of `semi_structured` W∘M in the hardware's form, made once."""
    x, w, _ = tensors
    if provider == "dense":
        return lambda: (F.linear(x, w), None, None, None)
    mask = nm.magnitude_mask(w, KEPT, OF)
    packed = semi_structured("w", torch.where(mask, w, 0), "2:4 by magnitude")
    return lambda: (F.linear(x, packed), None, None, mask)


def differs(step: Step, tensors: Tensors) -> tuple[float, str]:
    """The largest error against float64 under the step's own mask, and why it is too much, see `bench.tolerance`, or that the mask is another."""
    mask = step[3]
    if mask is not None and not torch.equal(mask, nm.magnitude_mask(tensors[1], KEPT, OF)):
        return float("inf"), "another mask than that by magnitude"

    def plain(dtype: torch.dtype) -> list[Tensor]:
        x, w, gy = (t.to(dtype) for t in tensors)
        made = w if mask is None else torch.where(mask, w, 0)
        dw = gy.t() @ x
        return [x @ made.t(), gy @ made, dw if mask is None else torch.where(mask, dw, 0)]

    return over_budget(step[:3], plain(torch.float64), plain(tensors[0].dtype))


def prepare(cell: NM, device: torch.device) -> Prepared:
    tensors = operands((cell.M, cell.N, cell.K), cell.dtype, device)
    call = (lambda: STEPS[cell.provider](tensors)) if cell.op == "step" else forward(cell.provider, tensors)
    flop = (6 if cell.op == "step" else 2) * cell.M * cell.N * cell.K
    return Prepared(call, lambda: differs(call(), tensors), lambda ms: {"dense_tflop_per_s": flop / ms / 1e9})


NM_PART = Part("nm", NM, ("dense_tflop_per_s",), cells, prepare, on_cpu=cpu_cells, alike=("op", "M", "N", "K", "dtype"), by="provider")
