"""Stage `dropout`: a linear behind block dropout, forward, dX and dW, against p; figures 3a and 3b of SparseDrop on the device.

A call draws its mask anew, and by the kernels makes its lists, as a training step does: whatever that takes is in the time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels import draw_ops, dropout, dropout_ops, ops
from ..kernels.grid import expand_mask
from .gate import over_budget
from .inputs import operands
from .part import Part, Prepared

CPU_SHAPE = (1024, 1024, 1024)
RATES = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
FEW = (0.0, 0.05, 0.2, 0.5, 0.9)
SHAPES = (((1024, 1024, 1024), RATES), ((8192, 4096, 4096), FEW))  # M, N, K: the paper's, and one that is no matter of launches
TINY = (200, 96, 128)
DENSE = "dense"
Step = tuple[Tensor, Tensor, Tensor, Tensor | None]  # y, dX, dW, and what of X was kept: blocks or elements; None: all, unscaled


class Dropping(NamedTuple):
    """`provider`: dense, dropout_linear (elements), masked_dense (blocks as zeros), fxmask_triton, or on a CPU fxmask. p of `dense` is 0, and its block."""

    provider: str
    M: int
    N: int
    K: int
    dtype: str
    block: int
    p: float


def cells(device: torch.device, quick: bool) -> list[Dropping]:
    """Baselines first; the dense layer once a shape."""
    cuda = device.type == "cuda"
    shapes = (SHAPES[:1] if quick else SHAPES) if cuda else ((TINY, (0.0, 0.5)),)
    return [c for shape, rates in shapes for c in _of(shape, FEW if quick and cuda else rates, "fp16", 128 if cuda else 32, "fxmask_triton")]


def cpu_cells(quick: bool) -> list[Dropping]:
    """The paper's shape in float32."""
    return _of(CPU_SHAPE, FEW if quick else RATES, "fp32", 128, "fxmask")


def _of(shape: tuple[int, int, int], rates: tuple[float, ...], dtype: str, block: int, own: str) -> list[Dropping]:
    contenders = ("dropout_linear", "masked_dense", own)
    return [Dropping(DENSE, *shape, dtype, 0, 0.0), *(Dropping(c, *shape, dtype, block, p) for p in rates for c in contenders)]


def dense(x: Tensor, w: Tensor, gy: Tensor, block: tuple[int, int], p: float) -> Step:
    """The linear alone."""
    return F.linear(x, w), gy @ w, gy.t() @ x, None


def dropout_linear(x: Tensor, w: Tensor, gy: Tensor, block: tuple[int, int], p: float) -> Step:
    """PyTorch's dropout, then the linear."""
    dropped, kept = torch.native_dropout(x, p, True)
    return F.linear(dropped, w), torch.ops.aten.native_dropout_backward(gy @ w, kept, 1 / (1 - p)), gy.t() @ dropped, kept


def masked_dense(x: Tensor, w: Tensor, gy: Tensor, block: tuple[int, int], p: float) -> Step:
    """Dropped blocks as zeros in dense products."""
    keep = draw_ops.mask(x, block, p)
    dropped = dropout.drop(x, keep, block, p)
    return F.linear(dropped, w), dropout.drop(gy @ w, keep, block, p), gy.t() @ dropped, keep


def ours(x: Tensor, w: Tensor, gy: Tensor, block: tuple[int, int], p: float, impl: str) -> Step:
    """As `BlockDropout(impl=impl)` calls the ops."""
    keep = draw_ops.mask(x, block, p, impl)
    args = (keep, *block, p, impl, ops.lists(keep, block, impl))
    return dropout_ops.dropped_linear(x, w, None, *args), dropout_ops.dropped_dx(gy, w, *args), dropout_ops.dropped_dw(gy, x, *args), keep


STEPS: dict[str, Callable[..., Step]] = {f.__name__: f for f in (dense, dropout_linear, masked_dense)}
STEPS |= {"fxmask_triton": partial(ours, impl="triton"), "fxmask": partial(ours, impl="auto")}  # the kernels; what is taken on a CPU


def differs(step: Step, tensors: tuple[Tensor, Tensor, Tensor], block: tuple[int, int], p: float) -> tuple[float, str]:
    """The largest error of y, dX and dW against float64 under the step's own mask, and why it is too much, see `bench.tolerance`."""
    kept, scale, shape = step[3], 1 / (1 - p), tensors[0].shape
    if kept is not None and kept.shape != shape:
        kept = expand_mask(kept, shape, block)

    def plain(dtype: torch.dtype) -> list[Tensor]:
        x, w, gy = (t.to(dtype) for t in tensors)
        if kept is None:
            return [x @ w.t(), gy @ w, gy.t() @ x]
        dropped = torch.where(kept, x * scale, 0)
        return [dropped @ w.t(), torch.where(kept, (gy @ w) * scale, 0), gy.t() @ dropped]

    return over_budget(step[:3], plain(torch.float64), plain(tensors[0].dtype))


def prepare(cell: Dropping, device: torch.device) -> Prepared:
    tensors, block = operands((cell.M, cell.N, cell.K), cell.dtype, device), (cell.block, cell.block)
    flop = 6 * cell.M * cell.N * cell.K

    def call() -> Step:
        return STEPS[cell.provider](*tensors, block, cell.p)

    return Prepared(call, lambda: differs(call(), tensors, block, cell.p), lambda ms: {"dense_tflop_per_s": flop / ms / 1e9})


DROPOUT = Part("dropout", Dropping, ("dense_tflop_per_s",), cells, prepare, on_cpu=cpu_cells, alike=("M", "N", "K", "dtype"), by="provider")
