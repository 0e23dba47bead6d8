"""Time: optimiser steps, rebuilding masks now, and leaving them aside for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import nn

from .kernels.errors import ConfigError, StateError, UnsupportedError, first_of, message
from .kernels.grid import plain_int
from .nm import nm_attributes
from .nm.nm_layers import nm_layers
from .nm.nm_masking import moving_nm, refresh_nm
from .passes.state import rebuild, taken_steps, tensors
from .passes.state.pruning_schedule import advance
from .passes.state.saliency import observe, refuse_shard
from .passes.state.site import Site
from .passes.state.site_mask import check_agreed
from .passes.stepping.bypass import warn_of_adapters, warn_of_dense_readers
from .pruning import scheduled_layers
from .sites import Masked, expect_module, sites_in_force, values_of
from .untold import expect_steps

M = TypeVar("M", bound=nn.Module)


def step(model: nn.Module, n: int = 1) -> None:
    """Tell masks, temperatures of learned N:M masks and schedules of pruned inputs that `n` optimiser steps were taken; after every `optimizer.step()`.

    `step(model, 0)` announces, before training, that steps will be told; configurations that count steps (start, schedule, refresh > 1, rigl, phases, gain,
    scores that last) ask for it.
    An optimiser's step counts, a forward does not: so gradient accumulation, evaluation and recomputation change nothing. The optimiser's state is left alone:
    blocks that come back under `regrow` keep the momenta that they have, which `fxmask.guard` clears.
    Raises: StateError without masks or inside `fxmask.dense`, ConfigError for a negative `n`, UnsupportedError inside a CUDA graph. Warns where a weight has a
    gradient though its masked forward never ran, where an adapter that trains reads a frozen one (at the first step), and where steps were announced and an
    optimiser makes more than 10 of which none is told.
    Cost: the scalars that change, and where masks are due, one set of launches for all weights of one dtype and block.
    """
    taken = plain_int(n)
    if taken is None or taken < 0:
        raise ConfigError(f"fxmask.step: expected a number of optimiser steps, an int of at least 0, got {n!r}.")
    n = taken
    expect_module(model, "fxmask.step")
    first = next(model.parameters(), None)
    if n and first is not None and tensors.capturing(first):
        what = "fxmask.step inside a CUDA graph, whose replays would not count: expected it after each replay, or a guard."
        raise UnsupportedError(message(what, type(model).__name__, "call it after the replay; or let fxmask.guard count, and fxmask.graphed capture the step."))
    pruned, learned = scheduled_layers(model), moving_nm(model)
    found = sites_in_force(model, "fxmask.step", pruned or learned)
    for name, site, weight in found:
        if n and site._fxmask_guard is not None:
            what = "fxmask.step under a guard: expected one of them, or every optimiser step would count twice."
            raise StateError(message(what, name, "leave fxmask.step out; or call remove() on the handle of fxmask.guard."))
        if weight is not None:
            refuse_shard(site, weight)
        if site._fxmask_config.cached:
            values = values_of(name, weight, "fxmask.step")  # raises before anything has moved
            if not n:  # before training: a step has moved the weights, and not the mask
                check_agreed(site, values)
    if n:
        warn_of_dense_readers(found)
        if new := [site for _, site, _ in found if not site._fxmask_past_first]:  # adapters are put around masked layers before the first step
            warn_of_adapters(model)
            for site in new:
                site._fxmask_past_first = True
        _observe(found, n)
    taken_steps.advance([(site, weight) for _, site, weight in found], n)
    for _, layer in learned:
        nm_attributes.advance(layer, n)
    for _, m in pruned:
        advance(m, n)
    if not n:
        counting = [(name, site) for name, site, _ in found if site._fxmask_given.needs_steps]
        expect_steps(model, [*counting, *pruned, *learned])


def _observe(found: list[Masked], n: int) -> None:
    """Show the gradients of the step to the masks that score by them; their weights are those after it, as no hook has seen them before.

    Of several steps at once the last one's gradient is all that there may be.
    """
    asked = [(name, w) for name, site, w in found if site._fxmask_config.needs_grad and (w is None or w.requires_grad)]  # what rests has none
    blind = [name for name, w in asked if w is None or w.grad is None]
    if n == 1 and blind and len(blind) == len(asked):
        what = "criteria of gradients and regrow by gradient read .grad of the weights: expected it to be there still, got none."
        raise StateError(message(what, ", ".join(blind[:3]), "call fxmask.step(model) before optimizer.zero_grad(), or use fxmask.guard."))
    for name, site, _ in found:
        if site._fxmask_config.criterion == "momentum":
            what = "criterion='momentum' reads the optimiser's first moment: expected a guard, got fxmask.step."
            raise StateError(message(what, name, "call fxmask.guard(optimizer, model) instead, or use criterion='gradient' with average=0.9."))
    for _, site, w in found:
        observe(site, w)


def refresh(model: nn.Module) -> None:
    """Rebuild every cached mask from the weights as they are, now, permuted N:M masks included, unless frozen. Masks with `refresh=1`, and the other N:M
    masks, are built by each forward and need no call.

    Raises: StateError without masks or inside `fxmask.dense`, UnsupportedError for meta weights, and inside a CUDA graph where masks count steps, too.
    """
    expect_module(model, "fxmask.refresh")
    found = [t for t in sites_in_force(model, "fxmask.refresh", refresh_nm(model)) if t[1]._fxmask_config.cached]
    counted = [name for name, site, _ in found if site._fxmask_given.needs_steps and tensors.capturing(site._fxmask_keep)]
    if counted:
        what = "fxmask.refresh inside a CUDA graph, whose replays would not note at which step masks were rebuilt: expected it after a replay."
        raise UnsupportedError(message(what, first_of(counted), "call it between replays, or let masks be rebuilt by refresh=n alone."))
    rebuild.rebuild([rebuild.Job(site, values_of(name, weight, "fxmask.refresh")) for name, site, weight in found])


@contextmanager
def dense(model: M) -> Iterator[M]:
    """Context manager: inside, every block is kept, so that the model computes what its dense weights say (a teacher, an evaluation, a bisection).

    Nothing recompiles: only device scalars change. A nested use of the same model is an error, and so is copying or restoring it inside. A forward under
    activation checkpointing runs again in the backward, so its backward belongs inside, too. It is the model that is dense, for all threads: one that trains
    it meanwhile computes densely, too, and its guarded step is an error; give other threads a copy. Raises: StateError, of N:M masks, too.
    """
    entered: list[Site] = []
    try:
        with rebuild.switching:
            found = sites_in_force(model, "fxmask.dense")
            if nm := [name for name, _ in nm_layers(model)]:
                what = "fxmask.dense is for block masks: expected these alone, got N:M masks beside them, which would stay in force."
                raise StateError(message(what, first_of(nm), "give it the submodules that have block masks, one by one, where those alone are meant."))
            for _, site, _ in found:
                entered.append(site)
                _lay_aside(site)
        yield model
    finally:  # also where it was broken off on the way in
        with rebuild.switching:
            for site in entered:
                _bring_back(site)


def _lay_aside(site: Site) -> None:
    site._fxmask_is_dense = True
    tensors.sync(site)
    if site._fxmask_mask is not None:
        lists = site._fxmask_lists
        with torch.inference_mode(False):
            site._fxmask_saved = (site._fxmask_mask.clone(), None if lists is None else lists.clone())  # `hold` may write in place
            every = torch.ones_like(site._fxmask_mask)
            rebuild.hold(site, every, tensors.lists_of(site, every))


@torch.no_grad()
def _bring_back(site: Site) -> None:
    site._fxmask_is_dense = False
    tensors.sync(site)
    if site._fxmask_saved is not None:
        rebuild.hold(site, *site._fxmask_saved)
        site._fxmask_saved = None
