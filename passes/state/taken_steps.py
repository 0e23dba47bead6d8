"""Optimiser steps that masks are told of: they are counted, phases begin, and cached masks that are due are built; all of a model together, or none."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from ...kernels.errors import UnsupportedError, message
from ..settings import looks, phase_change
from . import rebuild, tensors
from .ranking import held_mask
from .site import Site

TOLD = ("_fxmask_step", "_fxmask_announced", "_fxmask_unguarded", "_fxmask_copied")  # what a step changes, whatever its mask


def advance(found: Sequence[tuple[Site, Tensor | None]], n: int, compute: Callable[[Sequence[rebuild.Job]], None] | None = None) -> None:
    """Take `n` optimiser steps; 0 only announces that steps will come. The weights are needed for cached masks only. `compute`: see `rebuild.rebuild`.

    Raises: UnsupportedError inside a CUDA graph, whose replays would not count, where the number of steps matters.
    """
    captured = [site for site, _ in found if n and site._fxmask_given.needs_steps and tensors.capturing(site._fxmask_keep)]
    if captured:
        what = "a step is counted inside a CUDA graph, whose replays would not count: expected masks that no number of steps moves (start, schedule,"
        fix = "let fxmask.graphed(step, optimizer) capture the step, with every optimiser that it steps: its replays count."
        raise UnsupportedError(message(f"{what} refresh > 1, rigl, phases, scores that last).", captured[0]._fxmask_name, fix))
    jobs, past = [], [(site, {name: getattr(site, name) for name in TOLD}, phase_change.remembered(site)) for site, _ in found]
    try:
        for site, weight in found:
            job = _taken(site, weight, n)
            jobs += [] if job is None else [job]
        tensors.sync(*(site for site, _ in found))
        rebuild.rebuild(jobs, compute)
        looks.look([(site, weight, site._fxmask_step - n) for site, weight in found])
        for site, _ in found if n else ():
            site.__dict__.update(_fxmask_restored=None, _fxmask_loaded=False)
    except BaseException:  # a step that failed may be told again
        for site, told, remembered in past:
            phase_change.take_back(site, remembered)
            site.__dict__.update(told)
        tensors.sync(*(site for site, _ in found))
        raise


def _taken(site: Site, weight: Tensor | None, n: int) -> rebuild.Job | None:
    """Take the steps of one mask; what is due of it then."""
    before, now, mask, block = site._fxmask_step, site._fxmask_step + n, held_mask(site), site._fxmask_config.block
    site.__dict__.update(_fxmask_announced=True, _fxmask_unguarded=False, _fxmask_copied=False, _fxmask_step=now)
    entered = phase_change.follow(site, taken=n > 0)
    c = site._fxmask_config
    if not n or weight is None or not c.cached or now < c.start:
        return None
    begins = before < c.start
    due = c.refresh and (now - c.start) // c.refresh > (before - c.start) // c.refresh
    if not (due or begins or entered.anew):
        return None
    other = (mask, block) if entered.first and not begins and mask is not None else None
    return rebuild.Job(site, weight, first=begins or entered.first, step=True, other=other)
