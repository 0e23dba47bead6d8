"""Steps past a guard: another optimiser moves weights that a guard holds, because training went on with a new one and the old one is still referenced."""

from __future__ import annotations

import warnings
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .kernels.errors import FxMaskWarning, message
from .passes.bypass import first_of
from .passes.copies import KEPT

if TYPE_CHECKING:
    from .guarding import GuardHandle

_guards: weakref.WeakSet[GuardHandle] = weakref.WeakSet()
_hooks: list[Any] = []


def watch(handle: GuardHandle) -> None:
    """Look at the steps of all optimisers from now on, while the guard is in force."""
    _guards.add(handle)
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_before_step))


def unwatch(handle: GuardHandle) -> None:
    _guards.discard(handle)


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling():
        return
    for handle in [h for h in _guards if h.optimizer() is not optimizer]:
        _look(handle, optimizer)


def _look(handle: GuardHandle, optimizer: Optimizer) -> None:
    """Warn at the second step in a row that the guard has not counted. One alone may be a wrapper's around the guarded optimiser, or one that it wraps."""
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    known, steps = handle.others.get(optimizer, (-1, None))
    if known == count and steps is None:  # none of the guard's weights, as before
        return
    names: list[str] = []
    if known != count or steps == handle.steps:
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        names = [g.name for g in handle._guarded if g.policy in KEPT and id(g.weight) in held and handle._is_ours(g.site)]
    handle.others[optimizer] = (count, None if known != count and not names else handle.steps)
    if names and (steps == handle.steps or handle.optimizer() is None):
        handle.others.clear()
        unwatch(handle)
        what = f"{type(optimizer).__name__} steps weights whose guard is on another optimiser, which does not step: expected a guard on this one, got none."
        fix = "call remove() on the handle of the old guard, then fxmask.guard(optimizer, model)."
        warnings.warn(message(f"{what} Masked weights can move, steps do not count.", first_of(names), fix), FxMaskWarning, stacklevel=4)
