"""Steps past a guard: another optimiser moves weights that a guard holds, in the guarded one's place or in turn with it.

A wrapper around the guarded optimiser, and one that this wraps, share its weights, too. So the step of another one is judged when it ends: it is one of its
own where the guarded optimiser neither stepped inside of it nor runs around it, and where it has moved a weight. A wrapper that moves masked weights beside
the step that it wraps, as Lookahead does every few steps, wants the guard itself: its first steps are looked at.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..kernels.errors import FxMaskWarning, first_of, message
from ..kernels.grid import expand_mask
from ..passes.state import ranks
from ..passes.state.lost_guards import KEPT
from ..passes.state.site import capturing
from ..passes.state.site_mask import mask_outside
from ..passes.state.weak_sets import alive
from ..passes.stepping.elementwise import STEP
from ..passes.stepping.held import ids_of, moves_by_grad

if TYPE_CHECKING:
    from ..passes.stepping.optimiser import Guarded
    from .guard_handle import GuardHandle

_guards: weakref.WeakSet[GuardHandle] = weakref.WeakSet()
_times = 0  # that a guard was made
_hooks: list[Any] = []


class Seen(NamedTuple):
    """An optimiser as it was last looked at, and the guards of other optimisers that hold weights of its."""

    parameters: tuple[int, ...]
    times: int
    guards: weakref.WeakSet[GuardHandle]


class Was(NamedTuple):
    """A weight that a step may move, as it was, and which of its elements were at rest, if any are to be."""

    of: Guarded
    values: Tensor
    at_rest: Tensor | None

    def has_moved(self) -> bool:
        return not torch.equal(ranks.part(self.of.weight.detach()), self.values)

    def has_moved_at_rest(self) -> bool:
        """By more than rounding: a wrapper may add something and take it away again."""
        if self.at_rest is None:
            return False
        moved = torch.where(self.at_rest, ranks.part(self.of.weight.detach()) - self.values, 0)
        return bool(moved.norm() > 1e-4 * torch.where(self.at_rest, self.values, 0).norm())


class Begun(NamedTuple):
    """A step under way: how many the guard had counted, and the weights as they were."""

    counted: tuple[int, int | None]
    weights: list[Was]


_seen: weakref.WeakKeyDictionary[Optimizer, Seen] = weakref.WeakKeyDictionary()
_begun: weakref.WeakKeyDictionary[Optimizer, dict[GuardHandle, Begun]] = weakref.WeakKeyDictionary()
_wrapped: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()  # steps of wrappers that have been looked at
LOOKED_AT = 20  # of them


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
    if seen is None or seen[:2] != (ids, _times):
        found = [h for h in alive(_guards) if h.optimizer() is not optimizer and any(_shared(h, optimizer))]
        seen = _seen[optimizer] = Seen(ids, _times, weakref.WeakSet(found))
    if not seen.guards:
        return
    under_way = [*_under_way()]
    if sum(o is optimizer for o in under_way) > 1:  # of a subclass that calls super().step()
        return
    closure, begun = any(map(callable, (*args[1:], *kwargs.values()))), dict[Any, Begun]()
    for handle in alive(seen.guards):
        if handle in _guards and not any(o is handle.optimizer() for o in under_way):
            whole = closure or not moves_by_grad(optimizer)
            may_move = [g for g in _shared(handle, optimizer) if (g.weight.grad is not None or whole) and not capturing(g.weight)]
            begun[handle] = Begun(_counted(handle), [Was(g, ranks.part(g.weight.detach()).clone(), _at_rest(g)) for g in may_move])
    _begun[optimizer] = begun


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Warn, once for a guard, of a step of another optimiser's own, or of one around the guarded step that moves masked weights beside it."""
    if torch.compiler.is_compiling() or optimizer not in _begun or sum(o is optimizer for o in _under_way()) > 1:
        return
    for handle, (counted, weights) in _begun.pop(optimizer).items():
        if counted != _counted(handle):  # a wrapper
            _wrapped[optimizer] = _wrapped.get(optimizer, 0) + 1
            if moved := [was.of.name for was in weights if was.has_moved_at_rest()]:
                what = f"{type(optimizer).__name__} wraps the optimiser that is guarded, and moves masked weights itself: expected the guard on the outer one."
                fix = "call remove() on the handle of the guard, then fxmask.guard(optimizer, model) with the outer optimiser."
                warnings.warn(message(what, first_of(moved), fix), FxMaskWarning, stacklevel=3)
            if moved or _wrapped[optimizer] >= LOOKED_AT:
                _seen[optimizer].guards.discard(handle)
        elif moved := [was.of.name for was in weights if was.has_moved()]:
            unwatch(handle)
            what = f"{type(optimizer).__name__} steps weights whose guard is on another optimiser: expected a guard on this one, got none."
            what += " Masked weights can move, its steps do not count."
            fix = "where it has taken over, call remove() on the handle of the old guard, then fxmask.guard(optimizer, model); of two that step in turn give"
            fix += " each weights of its own and a guard, or call remove() and fxmask.step(model) after each step: masked weights are left to them then."
            warnings.warn(message(what, first_of(moved), fix), FxMaskWarning, stacklevel=3)


def _counted(handle: GuardHandle) -> tuple[int, int | None]:
    return handle.steps, handle._captures


def _under_way() -> Iterator[Optimizer]:
    """The optimisers whose steps are running."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code is STEP:
            yield frame.f_locals.get("self")  # type: ignore[misc]
        frame = frame.f_back  # type: ignore[assignment]


@torch.no_grad()
def _at_rest(g: Guarded) -> Tensor | None:
    """The elements that a step is to leave as they are; None where there are none, or where blocks that come back are written to."""
    if g.policy != "freeze" or g.site._fxmask_softening or g.site._fxmask_config.regrow is not None:
        return None
    return ranks.part_like(~expand_mask(mask_outside(g.site, g.weight.detach()), g.weight.shape, g.site._fxmask_config.block), g.weight)


def _shared(handle: GuardHandle, optimizer: Optimizer) -> Iterator[Guarded]:
    """Weights that another optimiser holds and a guard keeps from moving, or counts the steps of."""
    held = set(ids_of(optimizer))
    for g in handle._guarded:
        if id(g.weight) in held and handle._is_ours(g.site) and (g.policy in KEPT or g.site._fxmask_given.needs_steps):
            yield g
