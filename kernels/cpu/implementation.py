"""The ops on a CPU; the functions have the arguments and results of `kernels.reference`, and a `plan` that says how: see `kernels.cpu.plans`."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from .. import reference
from ..select import select_blocks
from . import columns, pool, rows, runs, score
from .plans import Plan, compute_dtype
from .strips import Sums, packed, strips_of


def block_index(
    w: Tensor, keep: Tensor, step: Tensor, block: tuple[int, int], criterion: str, ties: str, stream: int, cover: bool = False
) -> Tensor:
    """As `kernels.reference.block_index`, bit for bit."""
    return select_blocks(score.block_keys(w, block, criterion, step, stream), keep, ties, cover)


def _shape(w: Tensor) -> tuple[int, int]:
    return w.shape[0], w.shape[1]


def _product(x: Tensor, w: Tensor, bias: Tensor | None, mask: Tensor, block: tuple[int, int], transposed: bool, plan: Plan) -> Tensor:
    t, dtype = reference.rows(x), compute_dtype(x.dtype)
    form = {"rows": rows, "runs": runs}[plan.layout].matmul
    with pool.one_thread() as threads:
        strips = strips_of(mask, _shape(w), block, transposed, plan.group)
        strips = packed(strips, w, mask, transposed, dtype, plan.group)
        y = x.new_empty((*x.shape[:-1], strips.across))
        flat = y.view(len(t), strips.across)
        pool.run([partial(form, t, strips, bias, flat, a, b, plan.chunk, dtype) for a, b in pool.ranges(len(t), threads)])
    return y


def masked_linear(x: Tensor, w: Tensor, bias: Tensor | None, mask: Tensor, block: tuple[int, int], plan: Plan) -> Tensor:
    """y = x (W∘M)^T + bias, (..., N), contiguous."""
    return _product(x, w, bias, mask, block, False, plan)


def masked_linear_dx(gy: Tensor, w: Tensor, mask: Tensor, block: tuple[int, int], plan: Plan) -> Tensor:
    """dX = dY (W∘M), (..., K), contiguous."""
    return _product(gy, w, None, mask, block, True, plan)


def backward(gy: Tensor, x: Tensor, w: Tensor | None, mask: Tensor, block: tuple[int, int], plan: Plan) -> tuple[Tensor | None, Tensor]:
    """dX = dY (W∘M), None without `w`, and dW = (dY^T X)∘M, off one pass over the tokens."""
    with pool.one_thread() as threads:
        g, t, dtype, by_rows = reference.rows(gy), reference.rows(x), compute_dtype(gy.dtype), plan.layout == "rows"
        shape = g.shape[1], t.shape[1]
        strips = strips_of(mask, shape, block, transposed=True)
        if w is not None:
            strips = packed(strips, w, mask, True, dtype)
        wanted = strips if by_rows else strips_of(mask, shape, block, transposed=False)
        dx = None if w is None else gy.new_empty((*gy.shape[:-1], shape[1]))
        flat = None if dx is None else dx.view(len(g), shape[1])
        shares = pool.ranges(len(g), threads)
        sums = [rows.sums_of(wanted, dtype) if by_rows else Sums(wanted, dtype) for _ in shares]
        job = partial(rows.backward, g, t, strips) if by_rows else partial(columns.backward, g, t, strips, wanted)
        pool.run([partial(job, flat, s, a, b, plan.chunk, dtype) for s, (a, b) in zip(sums, shares, strict=True)])
        for other in sums[1:]:  # in a fixed order
            sums[0].all.add_(other.all)
        found = (rows if by_rows else columns).pieces(sums[0], wanted)
        (nb, kb), bh, bw = mask.shape, min(block[0], shape[0]), min(block[1], shape[1])
        dw = gy.new_zeros(nb * bh, kb * bw)
        dw.view(-1, bw).index_copy_(0, wanted.places, found.to(dw.dtype))
        return dx, dw[: shape[0], : shape[1]].contiguous()
