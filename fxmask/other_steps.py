"""Steps past a guard: another optimiser moves weights that a guard holds, because training went on with a new one and the old one is still referenced."""

from __future__ import annotations

import warnings
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .kernels.errors import FxMaskWarning, first_of, message
from .passes.lost_guards import KEPT

if TYPE_CHECKING:
    from .guard_handle import GuardHandle

_guards: weakref.WeakSet[GuardHandle] = weakref.WeakSet()
_times = 0  # that a guard was made
_hooks: list[Any] = []


class Seen(NamedTuple):
    """What an optimiser was when it was looked at, and whose weights it has: by guard, how many steps that had counted at its last one."""

    parameters: int
    times: int
    guards: weakref.WeakKeyDictionary[GuardHandle, int | None]


_seen: weakref.WeakKeyDictionary[Optimizer, Seen] = weakref.WeakKeyDictionary()


def watch(handle: GuardHandle) -> None:
    """Look at the steps of all optimisers from now on, while the guard is in force."""
    global _times
    _times += 1
    _guards.add(handle)
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_before_step))


def unwatch(handle: GuardHandle) -> None:
    _guards.discard(handle)


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Warn at the second step in a row that the guard has not counted. One alone may be a wrapper's around the guarded optimiser, or one that it wraps."""
    if torch.compiler.is_compiling():
        return
    count, seen = sum(len(group["params"]) for group in optimizer.param_groups), _seen.get(optimizer)
    if seen is None or seen[:2] != (count, _times):
        found = [handle for handle in _guards if handle.optimizer() is not optimizer and _shared(handle, optimizer)]
        seen = _seen[optimizer] = Seen(count, _times, weakref.WeakKeyDictionary(dict.fromkeys(found)))
    for handle, steps in list(seen.guards.items()):
        if steps != handle.steps and handle.optimizer() is not None:
            seen.guards[handle] = handle.steps
        elif names := _shared(handle, optimizer) if handle in _guards else []:
            unwatch(handle)
            what = f"{type(optimizer).__name__} steps weights whose guard is on another optimiser, which does not step: expected a guard on this one, got none."
            fix = "call remove() on the handle of the old guard, then fxmask.guard(optimizer, model)."
            warnings.warn(message(f"{what} Masked weights can move, steps do not count.", first_of(names), fix), FxMaskWarning, stacklevel=3)


def _shared(handle: GuardHandle, optimizer: Optimizer) -> list[str]:
    """Names of the weights that a guard keeps from moving and another optimiser holds."""
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return [g.name for g in handle._guarded if id(g.weight) in held and handle._is_ours(g.site) and g.policy in KEPT]
