"""Who takes turns in `bench.interleaved`: a training step of one layer in three parts, mask, forward and backward, by each contender on the same operands."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels import ops, reference
from ..kernels.grid import grid_shape, keep_count
from . import gate
from .cells import Cell
from .inputs import TORCH_DTYPES

CONTENDERS = ("dense", "masked_dense", "fxmask_auto", "fxmask_cpu")
KNOWN = (*CONTENDERS, "fxmask_reference")  # masked-dense behind the op


@dataclass
class Layer:
    """Operands of one cell, and two weights that it takes turns with."""

    cell: Cell
    x: Tensor
    gy: Tensor
    weights: tuple[Tensor, Tensor]
    w: Tensor
    keep: Tensor


def layer_of(cell: Cell) -> Layer:
    """N(0, 1) operands; of kind `rows` the block rows of the weight differ in scale, of phase `token_mixing` the tokens of x are contiguous."""
    g = torch.Generator().manual_seed(cell.seed)
    dtype, grid = TORCH_DTYPES[cell.dtype], grid_shape((cell.N, cell.K), cell.block)
    x, gy, a, b = (torch.randn(s, generator=g) for s in ((cell.M, cell.K), (cell.M, cell.N), (cell.N, cell.K), (cell.N, cell.K)))
    if cell.mask == "rows":
        scale = torch.exp(0.02 * torch.randn(grid[0], 1, generator=g)).repeat_interleave(cell.block[0], 0)[: cell.N]
        a, b = a * scale, b * scale
    if cell.phase == "token_mixing":
        x = x.t().contiguous().t()
    first, second = a.to(dtype), b.to(dtype)
    return Layer(cell, x.to(dtype), gy.to(dtype), (first, second), first.clone(), torch.tensor(keep_count(math.prod(grid), cell.ratio)))


class Contender(NamedTuple):
    """mask() -> mask; forward(mask) -> y; backward(mask) -> (dX, dW)."""

    mask: Callable[[], Tensor | None]
    forward: Callable[[Tensor | None], Tensor]
    backward: Callable[[Tensor | None], tuple[Tensor, Tensor]]


def contender(name: str, i: Layer) -> Contender:
    """One of KNOWN over the operands of a layer."""
    b, zero = i.cell.block, torch.zeros((), dtype=torch.int64)

    def mask() -> Tensor:
        return ops.block_index(i.w, i.keep, zero, *b, "fro", "lowest", 0)

    if name == "dense":
        return Contender(lambda: None, lambda _: F.linear(i.x, i.w), lambda _: (i.gy @ i.w, i.gy.t() @ i.x))
    if name == "masked_dense":
        return Contender(
            mask,
            lambda m: reference.masked_linear(i.x, i.w, None, m, b),  # type: ignore[arg-type]
            lambda m: reference.masked_linear_backward(i.gy, i.x, i.w, m, None, b, "masked"),  # type: ignore[arg-type]
        )
    impl = name.removeprefix("fxmask_")
    return Contender(
        mask,
        lambda m: torch.ops.fxmask.masked_linear(i.x, i.w, None, m, *b, "masked", None, impl),
        lambda m: torch.ops.fxmask.masked_linear_backward(i.gy, i.x, i.w, m, *b, "masked", None, impl),
    )


def error_of(i: Layer, c: Contender) -> tuple[float, bool]:
    """See `gate.of_the_dtypes_size`: of forward, dX and dW, beside masked-dense's."""
    m = contender("masked_dense", i).mask()
    assert m is not None  # of masked-dense

    def plain(x: Tensor, gy: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        return reference.masked_linear(x, w, None, m, i.cell.block), *reference.masked_linear_backward(gy, x, w, m, None, i.cell.block, "masked")

    exact = plain(i.x.double(), i.gy.double(), i.w.double())
    return gate.of_the_dtypes_size((c.forward(m), *c.backward(m)), plain(i.x, i.gy, i.w), exact)
