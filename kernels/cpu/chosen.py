"""The ops on a CPU as the dispatch calls them: for each case the fastest plan, found once. Arguments and results of `kernels.reference`."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from .. import reference, tune
from ..errors import UnsupportedError
from . import implementation, masked_dense
from .plans import BY_NAME, MASKED_DENSE, Case, Plan, plans, seconds

SMALL = 0.5e-3  # seconds of masked-dense, as estimated, below which it is taken unasked
NEAR = 2.0  # times masked-dense, as estimated, behind which a plan is not timed
SAMPLE = 4096  # tokens that they are timed on
MARGIN = 0.97  # a plan that is not faster than masked-dense by so much may owe it to noise
decisions: dict[tuple[Any, ...], tune.Choice] = {}  # of this process
_latest: dict[tuple[Any, ...], tune.Choice] = {}  # by op, shape, block and whether forced
_deciding = threading.RLock()


def _after_fork() -> None:
    """A lock that another thread held would never be released."""
    global _deciding
    _deciding = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


@lru_cache(maxsize=4096)
def key_of(case: Case, forced: bool, threads: int) -> tuple[Any, ...]:
    """Cases that share a decision: tokens by powers of the square root of 2, densities by powers of the fourth root."""
    density = round(4 * math.log2(max(case.density, 1e-4)))
    return case.op, round(2 * math.log2(case.tokens)), case.shape, case.block, density, case.dtype, forced, threads


@lru_cache(maxsize=4096)
def unasked(op: str, size: tuple[int, ...], shape: tuple[int, ...], block: tuple[int, int], dtype: torch.dtype, least: float) -> tune.Choice | None:
    """Masked-dense, where it takes less than `least` seconds, as estimated, over tokens of `size` (..., features); else, or of nothing, None."""
    case = Case(op, math.prod(size[:-1]), (shape[0], shape[1]), block, 1.0, dtype)
    if not case.tokens * math.prod(shape) or seconds(MASKED_DENSE, case) >= least:
        return None
    return tune.Choice(str(MASKED_DENSE), "too small to gain", {str(p): seconds(p, case) for p in (*plans(case), MASKED_DENSE)})


def decide(case: Case, key: tuple[Any, ...], forced: bool, threads: int, timed: Callable[[Plan], Callable[[], Any]]) -> tune.Choice:
    """The choice for a case. `timed(plan)` gives what runs a plan on a sample."""
    estimates = {str(p): seconds(p, case) for p in plans(case)}
    candidates = {*estimates} if forced else {*estimates, str(MASKED_DENSE)}
    best = sorted(estimates, key=lambda n: estimates[n])
    dense = seconds(MASKED_DENSE, case)
    if not forced:
        best = [n for n in best if estimates[n] < NEAR * dense]
        estimates[str(MASKED_DENSE)] = dense
        best.append(str(MASKED_DENSE))
    first = min(best, key=lambda n: estimates[n])
    if dense < SMALL or len(best) == 1 or not tune.enabled():
        return tune.Choice(first, "estimated", estimates)
    name = "/".join(map(str, key))
    known = tune.load(name, candidates)
    if known is None or stale(known):
        known = tune.measure({n: timed(BY_NAME[n]) for n in best}, threads)
        dense_time = known.times.get(str(MASKED_DENSE))
        if dense_time is not None and known.times[known.name] > MARGIN * dense_time:
            known = known._replace(name=str(MASKED_DENSE))
        tune.store(name, known)
    return known


def stale(choice: tune.Choice) -> bool:
    """Whether a choice was timed on a busy machine, long enough ago to try again."""
    return choice.busy and time.time() - choice.at > tune.AGAIN


def last(op: str, shape: tuple[int, int], block: tuple[int, int], forced: bool) -> tune.Choice | None:
    """The latest choice of this process for layers of a shape and block; None where none has run."""
    return _latest.get((op, shape, block, forced))


class Form:
    """One implementation: `forced` never multiplies densely, the other one takes masked-dense where that is faster."""

    def __init__(self, forced: bool) -> None:
        self.forced = forced

    def _plan(self, op: str, t: Tensor, shape: tuple[int, ...], mask: Tensor, block: tuple[int, int], timed: Callable[[Plan], Callable[[], Any]]) -> Plan:
        small = None if self.forced else unasked(op, t.shape, shape, block, t.dtype, SMALL)
        if small is not None:
            _latest[op, shape, block, False] = small
            return MASKED_DENSE
        tokens, threads = t.shape[:-1].numel(), torch.get_num_threads()
        if not tokens * shape[0] * shape[1]:
            return MASKED_DENSE
        case = Case(op, tokens, (shape[0], shape[1]), block, float(mask.count_nonzero()) / mask.numel(), t.dtype)
        if case.density == 1:  # nothing to skip, and a ratio of 0 is the dense layer to the bit
            return MASKED_DENSE
        key = key_of(case, self.forced, threads)
        choice = decisions.get(key)
        if choice is None or stale(choice):
            with _deciding:  # another thread may have decided meanwhile
                choice = decisions.get(key)
                if choice is None or stale(choice):
                    choice = decisions[key] = decide(case, key, self.forced, threads, timed)
        _latest[op, shape, block, self.forced] = choice
        return BY_NAME[choice.name]

    def block_index(
        self, w: Tensor, keep: Tensor, step: Tensor, block: tuple[int, int], criterion: str, ties: str, stream: int, cover: bool = False
    ) -> Tensor:
        """See `reference.block_index`."""
        return implementation.block_index(w, keep, step, block, criterion, ties, stream, cover)

    def masked_linear(self, x: Tensor, w: Tensor, bias: Tensor | None, mask: Tensor, block: tuple[int, int], lists: Tensor | None = None) -> Tensor:
        """See `reference.masked_linear`."""

        def run(plan: Plan, x: Tensor) -> Tensor:
            # PyTorch refuses mixed dtypes in its own words, strips would cast
            if plan == MASKED_DENSE or x.dtype != w.dtype or (bias is not None and bias.dtype != x.dtype):
                return masked_dense.masked_linear(x, w, bias, mask, block)
            return implementation.masked_linear(x, w, bias, mask, block, plan)

        return run(self._plan("forward", x, w.shape, mask, block, lambda p: lambda: run(p, reference.rows(x)[:SAMPLE])), x)

    def masked_linear_dx(self, gy: Tensor, w: Tensor, mask: Tensor, block: tuple[int, int], backward: str, lists: Tensor | None = None) -> Tensor:
        """See `reference.masked_linear_dx`."""
        if backward == "unmasked":
            return reference.masked_linear_dx(gy, w, mask, block, backward)

        def run(plan: Plan, gy: Tensor) -> Tensor:
            if plan == MASKED_DENSE or gy.dtype != w.dtype:
                return masked_dense.masked_linear_dx(gy, w, mask, block)
            return implementation.masked_linear_dx(gy, w, mask, block, plan)

        return run(self._plan("dx", gy, w.shape, mask, block, lambda p: lambda: run(p, reference.rows(gy)[:SAMPLE])), gy)

    def masked_linear_dw(
        self, gy: Tensor, x: Tensor, mask: Tensor, dense: Tensor | None, block: tuple[int, int], backward: str, lists: Tensor | None = None
    ) -> Tensor:
        """See `reference.masked_linear_dw`."""
        wanted = reference.gradient_mask(mask, dense, backward)
        if wanted is None:
            return reference.masked_linear_dw(gy, x, mask, dense, block, backward)

        def run(plan: Plan, gy: Tensor, x: Tensor) -> Tensor:
            if plan == MASKED_DENSE or gy.dtype != x.dtype:
                return masked_dense.masked_linear_dw(gy, x, wanted, block)
            return implementation.backward(gy, x, None, wanted, block, plan)[1]

        plan = self._plan("dw", gy, (gy.shape[-1], x.shape[-1]), wanted, block, lambda p: lambda: run(p, *_sample(gy, x)))
        return run(plan, gy, x)

    def masked_linear_backward(
        self, gy: Tensor, x: Tensor, w: Tensor, mask: Tensor, dense: Tensor | None, block: tuple[int, int], backward: str
    ) -> tuple[Tensor, Tensor]:
        """dX and dW together, of the modes where both skip the same blocks; see `reference.masked_linear_backward`."""
        wanted = reference.gradient_mask(mask, dense, backward)
        if backward not in ("masked", "rigl") or wanted is None or (wanted is not mask and not torch.equal(wanted, mask)):
            return self.masked_linear_dx(gy, w, mask, block, backward), self.masked_linear_dw(gy, x, mask, dense, block, backward)

        def run(plan: Plan, gy: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            if plan == MASKED_DENSE or not gy.dtype == x.dtype == w.dtype:
                return masked_dense.masked_linear_backward(gy, x, w, mask, block)
            dx, dw = implementation.backward(gy, x, w, mask, block, plan)
            assert dx is not None  # w was given
            return dx, dw

        plan = self._plan("backward", gy, w.shape, mask, block, lambda p: lambda: run(p, *_sample(gy, x)))
        return run(plan, gy, x)

    def strip_lists(self, mask: Tensor, block: tuple[int, int]) -> Tensor:
        """See `reference.strip_lists`; the strips of a CPU need none."""
        return reference.strip_lists(mask, block)


def _sample(gy: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    return reference.rows(gy)[:SAMPLE], reference.rows(x)[:SAMPLE]


AUTO, FORCED = Form(forced=False), Form(forced=True)


def require(t: Tensor) -> None:
    """Raise UnsupportedError unless the CPU implementation can run on `t`."""
    if t.device.type != "cpu":
        raise UnsupportedError(f"impl='cpu' works on CPU tensors: expected device cpu, got {t.device}; use impl='auto', or 'triton' on CUDA.")
