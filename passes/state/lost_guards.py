"""Layers that have lost their guard: an optimiser's hooks follow no copy and no pickle and end with it, and the first step of another that nobody guards warns.

Masks in traced graphs do not hold their weights, and are not seen here.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ...kernels.errors import first_of, message, warn
from ..frames import makes_state
from ..stepping.held import ids_of
from .weak_sets import alive

if TYPE_CHECKING:
    from .site import Site

KEPT = ("freeze", "decay")  # policies of `stepping.optimiser.LEFT`, whose masked weights an optimiser would move
_waiting: weakref.WeakSet[Site] = weakref.WeakSet()
_without: weakref.WeakKeyDictionary[Optimizer, tuple[int, ...]] = weakref.WeakKeyDictionary()  # that hold no such layer, and what they held then
_hooks: list[Any] = []


def expect_guard(site: Site) -> None:
    """Watch the steps on a layer that has lost its guard; of one that no optimiser holds, as a copy that averages weights, nothing is said."""
    _waiting.add(site)
    _without.clear()
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_before_step))


def _is_left(site: Site) -> bool:
    """Whether nobody has guarded the layer since, nor told its steps, which says that it is meant."""
    d = site.__dict__
    return d.get("_fxmask_was") in KEPT and d["_fxmask_guard"] is None and not d["_fxmask_announced"]


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling() or not _waiting:  # in this order: Dynamo would guard on layers that may be gone before it has
        return
    ids = ids_of(optimizer)
    if _without.get(optimizer) == ids or makes_state():
        return
    held = {id(p): p for group in optimizer.param_groups for p in group["params"]}
    found = [site for site in alive(_waiting) if id(site._parameters.get("weight")) in held]
    if not found:
        _without[optimizer] = ids
    stepped = [site for site in found if held[id(site._parameters["weight"])].grad is not None]  # without one it does not move
    _waiting.difference_update(stepped)
    left = sorted(site._fxmask_name for site in stepped if _is_left(site))
    if left:
        what = "this model had a guard, which has ended with its optimiser, or follows no copy and no pickle: expected a new one, got none."
        what += " Masked weights can move."
        fix = "call fxmask.guard(optimizer, model); without one on purpose: fxmask.step(model, 0)."
        warn(message(what, first_of(left), fix))
