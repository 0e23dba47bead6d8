"""Steps past a guard: another optimiser moves weights that a guard holds, in the guarded one's place or in turn with it.

A wrapper around the guarded optimiser, and one that this wraps, share its weights, too. So the step of another one is judged when it ends: it is one of its
own where the guarded optimiser neither stepped inside of it nor runs around it, and where it has moved a weight.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..kernels.errors import first_of, message, warn
from ..passes.frames import frames, makes_state
from ..passes.state import ranks
from ..passes.state.lost_guards import KEPT
from ..passes.state.tensors import capturing
from ..passes.state.weak_sets import alive
from ..passes.stepping.elementwise import STEP
from ..passes.stepping.held import has_closure, ids_of

if TYPE_CHECKING:
    from .guard_handle import GuardHandle

_guards: weakref.WeakSet[GuardHandle] = weakref.WeakSet()
_times = 0  # that a guard was made
_hooks: list[Any] = []


class Seen(NamedTuple):
    """An optimiser as it was last looked at, and the guards of other optimisers that hold weights of its."""

    parameters: tuple[int, ...]
    times: int
    guards: weakref.WeakSet[GuardHandle]


class Begun(NamedTuple):
    """A step under way: how many the guard had counted, and the weights as they were."""

    counted: tuple[int, int | None]
    weights: list[tuple[str, Tensor, Tensor]]


_seen: weakref.WeakKeyDictionary[Optimizer, Seen] = weakref.WeakKeyDictionary()
_begun: weakref.WeakKeyDictionary[Optimizer, dict[GuardHandle, Begun]] = weakref.WeakKeyDictionary()


def watch(handle: GuardHandle) -> None:
    """Look at the steps of all optimisers from now on, while the guard is in force."""
    global _times
    _times += 1
    _guards.add(handle)
    if not _hooks:
        _hooks.extend((register_optimizer_step_pre_hook(_before_step), register_optimizer_step_post_hook(_after_step)))


def unwatch(handle: GuardHandle) -> None:
    _guards.discard(handle)


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Note the weights of other optimisers' guards that a step may move. It costs copies until it is known whose step it is."""
    if torch.compiler.is_compiling() or not _guards:
        return
    ids, seen = ids_of(optimizer), _seen.get(optimizer)
    if seen is None or (seen.parameters, seen.times) != (ids, _times):
        found = [h for h in alive(_guards) if h.optimizer() is not optimizer and any(_shared(h, optimizer))]
        seen = _seen[optimizer] = Seen(ids, _times, weakref.WeakSet(found))
    if not seen.guards or is_nested(optimizer):
        return
    stepping = [*under_way()]
    closure, begun = has_closure(args, kwargs), dict[Any, Begun]()
    for handle in alive(seen.guards):
        if handle in _guards and not any(o is handle.optimizer() for o in stepping):
            may_move = [(n, w) for n, w in _shared(handle, optimizer) if (w.grad is not None or closure) and not capturing(w)]
            begun[handle] = Begun(_counted(handle), [(n, w, ranks.part(w.detach()).clone()) for n, w in may_move])
    _begun[optimizer] = begun


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Warn, once for a guard, of a step of another optimiser's own."""
    if torch.compiler.is_compiling() or optimizer not in _begun or is_nested(optimizer):
        return
    for handle, (counted, weights) in _begun.pop(optimizer).items():
        if counted != _counted(handle):
            _seen[optimizer].guards.discard(handle)  # a wrapper
        elif moved := [name for name, w, was in weights if not torch.equal(ranks.part(w.detach()), was)]:
            unwatch(handle)
            what = f"{type(optimizer).__name__} steps weights whose guard is on another optimiser: expected a guard on this one, got none."
            what += " Masked weights can move, its steps do not count."
            fix = "where it has taken over, call remove() on the handle of the old guard, then fxmask.guard(optimizer, model); of two that step in turn give"
            fix += " each weights of its own and a guard, or call remove() and fxmask.step(model) after each step: masked weights are left to them then."
            warn(message(what, first_of(moved), fix))


def _counted(handle: GuardHandle) -> tuple[int, int | None]:
    return handle.steps, handle._captures


def under_way() -> Iterator[Optimizer]:
    """The optimisers whose steps are running."""
    return (frame.f_locals.get("self") for frame in frames() if frame.f_code is STEP)  # type: ignore[misc]


def is_nested(optimizer: Optimizer) -> bool:
    """Whether another step of this optimiser is running: that of a subclass, which calls super().step()."""
    return sum(o is optimizer for o in under_way()) > 1


def is_no_step(optimizer: Optimizer) -> bool:
    """Whether another step of this optimiser is running, of which the outermost alone is a step; or one that makes its state."""
    return is_nested(optimizer) or makes_state()


def _shared(handle: GuardHandle, optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    """Weights that another optimiser holds and a guard keeps from moving, or counts the steps of."""
    held = set(ids_of(optimizer))
    for g in handle._held.guarded:
        if id(g.weight) in held and handle._held.is_ours(g.site) and (g.policy in KEPT or g.site._fxmask_given.needs_steps):
            yield g.name, g.weight
