"""The ops on a CPU as the dispatch calls them: for each case the fastest plan, found once. Arguments and results of `kernels.reference`."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from .. import reference
from ..errors import UnsupportedError
from . import deciding, implementation, masked_dense
from .deciding import Timed
from .plans import MASKED_DENSE, Case, Plan


class Form:
    """One implementation: `forced` never multiplies densely, the other one takes masked-dense where that is faster."""

    block_index = staticmethod(implementation.block_index)
    strip_lists = staticmethod(reference.strip_lists)  # for others: the strips of a CPU need none

    def __init__(self, forced: bool) -> None:
        self.forced = forced

    def _plan(self, op: str, t: Tensor, shape: tuple[int, ...], mask: Tensor, block: tuple[int, int], timed: Timed) -> Plan:
        small = None if self.forced else deciding.unasked(op, t.shape, shape, block, t.dtype, deciding.SMALL)
        if small is not None:
            deciding.small[op, shape, block] = small
            return MASKED_DENSE
        tokens = t.shape[:-1].numel()
        if not tokens * shape[0] * shape[1]:
            return MASKED_DENSE
        case = Case(op, tokens, (shape[0], shape[1]), block, float(mask.count_nonzero()) / mask.numel(), t.dtype, t.shape[1:-1].numel())
        if case.density == 1:  # nothing to skip, and a ratio of 0 is the dense layer to the bit
            return MASKED_DENSE
        return deciding.choose(case, self.forced, timed)

    def masked_linear(self, x: Tensor, w: Tensor, bias: Tensor | None, mask: Tensor, block: tuple[int, int], lists: Tensor | None = None) -> Tensor:
        """See `reference.masked_linear`."""

        def run(plan: Plan, x: Tensor) -> Tensor:
            # PyTorch refuses mixed dtypes in its own words, strips would cast
            if plan == MASKED_DENSE or x.dtype != w.dtype or (bias is not None and bias.dtype != x.dtype):
                return masked_dense.masked_linear(x, w, bias, mask, block)
            return implementation.masked_linear(x, w, bias, mask, block, plan)

        return run(self._plan("forward", x, w.shape, mask, block, lambda p, n: partial(run, p, _first(n, x))), x)

    def masked_linear_dx(self, gy: Tensor, w: Tensor, mask: Tensor, block: tuple[int, int], backward: str, lists: Tensor | None = None) -> Tensor:
        """See `reference.masked_linear_dx`."""
        if backward == "unmasked":
            return reference.masked_linear_dx(gy, w, mask, block, backward)

        def run(plan: Plan, gy: Tensor) -> Tensor:
            if plan == MASKED_DENSE or gy.dtype != w.dtype:
                return masked_dense.masked_linear_dx(gy, w, mask, block, backward)
            return implementation.masked_linear_dx(gy, w, mask, block, plan)

        return run(self._plan("dx", gy, w.shape, mask, block, lambda p, n: partial(run, p, _first(n, gy))), gy)

    def masked_linear_dw(
        self, gy: Tensor, x: Tensor, mask: Tensor, dense: Tensor | None, block: tuple[int, int], backward: str, lists: Tensor | None = None
    ) -> Tensor:
        """See `reference.masked_linear_dw`."""
        wanted = reference.gradient_mask(mask, dense, backward)
        if wanted is None:
            return reference.masked_linear_dw(gy, x, mask, dense, block, backward)

        def run(plan: Plan, gy: Tensor, x: Tensor) -> Tensor:
            if plan == MASKED_DENSE or gy.dtype != x.dtype:
                return masked_dense.masked_linear_dw(gy, x, mask, dense, block, backward)
            return implementation.backward(gy, x, None, wanted, block, plan)[1]

        plan = self._plan("dw", gy, (gy.shape[-1], x.shape[-1]), wanted, block, lambda p, n: partial(run, p, _first(n, gy), _first(n, x)))
        return run(plan, gy, x)

    def masked_linear_backward(
        self, gy: Tensor, x: Tensor, w: Tensor, mask: Tensor, dense: Tensor | None, block: tuple[int, int], backward: str
    ) -> tuple[Tensor, Tensor]:
        """dX and dW of the modes where both skip the same blocks, together while they do; see `reference.masked_linear_backward`."""
        wanted = reference.gradient_mask(mask, dense, backward)
        if wanted is not mask and (wanted is None or not torch.equal(wanted, mask)):
            return self.masked_linear_dx(gy, w, mask, block, backward), self.masked_linear_dw(gy, x, mask, dense, block, backward)

        def run(plan: Plan, gy: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            if plan == MASKED_DENSE or not gy.dtype == x.dtype == w.dtype:
                return masked_dense.masked_linear_backward(gy, x, w, mask, block)
            dx, dw = implementation.backward(gy, x, w, mask, block, plan)
            assert dx is not None  # w was given
            return dx, dw

        plan = self._plan("backward", gy, w.shape, mask, block, lambda p, n: partial(run, p, _first(n, gy), _first(n, x)))
        return run(plan, gy, x)


def _first(tokens: int, t: Tensor) -> Tensor:
    """The first tokens of (..., K), as they lie in memory: a copy of all would take longer than what is to be timed."""
    together = t.shape[1:-1].numel()
    return t[: tokens // together] if t.dim() > 2 and together <= tokens else reference.rows(t[0] if t.dim() > 2 else t)[:tokens]


AUTO, FORCED = Form(forced=False), Form(forced=True)


def require(t: Tensor) -> None:
    """Raise UnsupportedError unless the CPU implementation can run on `t`."""
    if t.device.type != "cpu":
        raise UnsupportedError(f"impl='cpu' works on CPU tensors: expected device cpu, got {t.device}; use impl='auto', or 'triton' on CUDA.")
