"""Which plan an op of one case runs by: estimated or timed once, remembered in this process and, by `kernels.tune`, on disk."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch

from .. import tune
from . import pool
from .plans import BY_NAME, MASKED_DENSE, Case, Plan, plans, seconds

SMALL = 0.5e-3  # seconds of masked-dense, as estimated, below which it is taken unasked
NEAR = 4.0  # times masked-dense, as estimated, behind which a plan is not timed
SAMPLE = 4096  # tokens that they are timed on, at most
MARGIN = 0.97  # a plan that is not faster than masked-dense by so much may owe it to noise
decisions: dict[tuple[Any, ...], tune.Choice] = {}  # of this process; those made without a tune are others than those made with one
small: dict[tuple[Any, ...], tune.Choice] = {}  # that needed no decision, by op, shape and block
lock = threading.RLock()
Timed = Callable[[Plan, int], Callable[[], Any]]


def _after_fork() -> None:
    """A lock that another thread held would never be released."""
    global lock
    lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


@lru_cache(maxsize=4096)
def key_of(case: Case, forced: bool, threads: int, tuned: bool) -> tuple[Any, ...]:
    """Cases that share a decision: tokens by powers of the square root of 2, densities by powers of the fourth root."""
    return case.op, round(2 * math.log2(case.tokens)), case.shape, case.block, _step(case.density), case.dtype, forced, threads, tuned


def _step(density: float) -> int:
    return round(4 * math.log2(max(density, 1e-4)))


@lru_cache(maxsize=4096)
def unasked(op: str, size: tuple[int, ...], shape: tuple[int, ...], block: tuple[int, int], dtype: torch.dtype, least: float) -> tune.Choice | None:
    """Masked-dense, where it takes less than `least` seconds, as estimated, over tokens of `size` (..., features); else, or of nothing, None."""
    case = Case(op, math.prod(size[:-1]), (shape[0], shape[1]), block, 1.0, dtype)
    if not case.tokens * math.prod(shape) or seconds(MASKED_DENSE, case) >= least:
        return None
    return tune.Choice(str(MASKED_DENSE), "too small to gain", {str(p): seconds(p, case) for p in (*plans(case), MASKED_DENSE)}, case.tokens)


def decide(case: Case, key: tuple[Any, ...], forced: bool, threads: int, timed: Timed) -> tune.Choice:
    """The choice for a case. `timed(plan, tokens)` gives what runs a plan over the first tokens."""
    dense = seconds(MASKED_DENSE, case)
    estimates = {str(p): seconds(p, case) for p in (*plans(case), *(() if forced else (MASKED_DENSE,)))}
    best = [n for n in estimates if forced or estimates[n] < NEAR * dense]
    first = min(best, key=lambda n: estimates[n])
    *named, tuned = key
    if dense < SMALL or len(best) == 1 or not tuned:
        return tune.Choice(first, "estimated", estimates, case.tokens)
    name = "/".join(map(str, named))
    known = tune.load(name, estimates)
    if known is None or tune.stale(known):
        before, tokens = known or decisions.get(key), sample(case, best, threads)
        known = tune.measure({n: timed(BY_NAME[n], tokens) for n in best}, threads)
        known = known._replace(tokens=tokens, tries=before.tries + 1 if before else 0)
        dense_time = known.times.get(str(MASKED_DENSE))
        if dense_time is not None and known.times[known.name] > MARGIN * dense_time:
            known = known._replace(name=str(MASKED_DENSE))
        tune.store(name, known)
    return known


def sample(case: Case, names: Sequence[str], threads: int) -> int:
    """Tokens to time plans on: as many as the tune's time is likely to suffice for, no fewer than give each thread its range, and whole samples."""
    tokens = min(case.tokens, SAMPLE)
    likely = tune.TURNS * sum(seconds(BY_NAME[n], case._replace(tokens=tokens)) for n in names) / threads
    few = int(tokens * tune.OVER * tune.BUDGET / likely) if likely else tokens
    enough = min(tokens, max(few, pool.LEAST * threads))
    return enough + -enough % case.together if case.together <= enough else enough


def of(case: Case, forced: bool) -> tune.Choice | None:
    """The choice that this process made for a case; None where it has made none."""
    tiny = None if forced else unasked(case.op, (case.tokens, 0), case.shape, case.block, case.dtype, SMALL)
    return tiny or decisions.get(key_of(case, forced, torch.get_num_threads(), tune.enabled()))


def made(op: str, shape: tuple[int, int], block: tuple[int, int], density: float, forced: bool) -> dict[int, tune.Choice]:
    """The choices of this process for layers of a shape, block and density, by their number of tokens (in steps); 0: of small ones."""
    tiny, threads, tuned = small.get((op, shape, block)), torch.get_num_threads(), tune.enabled()
    found = {0: tiny} if tiny and not forced else {}
    for (an_op, tokens, *layer, _, is_forced, count, is_tuned), choice in [*decisions.items()]:
        if (an_op, *layer, is_forced, count, is_tuned) == (op, shape, block, _step(density), forced, threads, tuned):
            found[round(2 ** (tokens / 2))] = choice
    return dict(sorted(found.items()))


def choose(case: Case, forced: bool, timed: Timed) -> Plan:
    """The plan for a case, found once."""
    threads = torch.get_num_threads()
    key = key_of(case, forced, threads, tune.enabled())
    choice = decisions.get(key)
    if choice is None or tune.stale(choice):
        with lock:  # another thread may have decided meanwhile
            choice = decisions.get(key)
            if choice is None or tune.stale(choice):
                choice = decisions[key] = decide(case, key, forced, threads, timed)
    return BY_NAME[choice.name]
