"""The ops on a CPU; the functions have the arguments and results of `kernels.reference`, and a `plan` that says how: see `kernels.cpu.plans`."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from .. import reference
from ..select import select_blocks
from . import columns, pool, rows, runs, score
from .plans import Plan, compute_dtype
from .strips import Strips, packed, strips_of


def block_index(w: Tensor, keep: Tensor, step: Tensor, block: tuple[int, int], criterion: str, ties: str, stream: int) -> Tensor:
    """As `kernels.reference.block_index`, bit for bit."""
    return select_blocks(score.block_keys(w, block, criterion, step, stream), keep, ties)


def _shape(w: Tensor) -> tuple[int, int]:
    return w.shape[0], w.shape[1]


def _product(x: Tensor, strips: Strips, bias: Tensor | None, plan: Plan) -> Tensor:
    t = reference.rows(x)
    y = x.new_empty((*x.shape[:-1], strips.across))
    form = {"rows": rows, "runs": runs, "columns": columns}[plan.layout].matmul
    flat = y.view(len(t), strips.across)
    pool.run([partial(form, t, strips, bias, flat, a, b, plan.chunk, compute_dtype(x.dtype)) for a, b in pool.ranges(len(t))])
    return y


def masked_linear(x: Tensor, w: Tensor, bias: Tensor | None, mask: Tensor, block: tuple[int, int], plan: Plan) -> Tensor:
    """y = x (W∘M)^T + bias, (..., N), contiguous."""
    strips = packed(strips_of(mask, _shape(w), block, False, plan.group), w, mask, False, compute_dtype(x.dtype), plan.group)
    return _product(x, strips, bias, plan)


def masked_linear_dx(gy: Tensor, w: Tensor, mask: Tensor, block: tuple[int, int], plan: Plan) -> Tensor:
    """dX = dY (W∘M), (..., K), contiguous."""
    strips = packed(strips_of(mask, _shape(w), block, True, plan.group), w, mask, True, compute_dtype(gy.dtype), plan.group)
    return _product(gy, strips, None, plan)


def backward(gy: Tensor, x: Tensor, w: Tensor | None, mask: Tensor, block: tuple[int, int], plan: Plan) -> tuple[Tensor | None, Tensor]:
    """dX = dY (W∘M), None without `w`, and dW = (dY^T X)∘M, off one pass over the tokens."""
    shape, dtype = (gy.shape[-1], x.shape[-1]), compute_dtype(gy.dtype)
    strips = strips_of(mask, shape, block, transposed=True)
    if w is not None:
        strips = packed(strips, w, mask, True, dtype)
    g, t = reference.rows(gy), reference.rows(x)
    dx = None if w is None else gy.new_empty((*gy.shape[:-1], shape[1]))
    flat = None if dx is None else dx.view(len(g), shape[1])
    shares = pool.ranges(len(g))
    if plan.layout == "rows":
        wanted = strips
        sums = [rows.sums_of(strips, dtype) for _ in shares]
        pool.run([partial(rows.backward, g, t, strips, flat, s, a, b, plan.chunk, dtype) for s, (a, b) in zip(sums, shares, strict=True)])
    else:
        wanted = strips_of(mask, shape, block, transposed=False)
        sums = [rows.sums_of(wanted, dtype) for _ in shares]
        pool.run([partial(columns.backward, g, t, strips, wanted, flat, s, a, b, plan.chunk, dtype) for s, (a, b) in zip(sums, shares, strict=True)])
    for other in sums[1:]:  # in a fixed order
        torch._foreach_add_(sums[0], other)
    (nb, kb), bh, bw = mask.shape, min(block[0], shape[0]), min(block[1], shape[1])
    dw = gy.new_zeros(nb, bh, kb, bw)
    (rows.scatter if plan.layout == "rows" else columns.scatter)(sums[0], wanted, dw)
    return dx, dw.view(nb * bh, kb * bw)[: shape[0], : shape[1]].contiguous()
