"""What `fxmask.guard` gives: the hooks around an optimiser's steps, which leave masked weights as the policy says and move the masks."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..passes.state import lost_guards, noted, pruning_schedule, taken_steps
from ..passes.state.rebuild import Job
from ..passes.stepping import elementwise
from ..passes.stepping.bypass import warn_of_dense_readers
from ..passes.stepping.held import has_closure, state_of
from ..passes.stepping.optimiser import reset_returned
from ..sites import refuse_dense
from . import other_steps
from .guarded import Held, refuse_another_weight, weight_now
from .guarded_step import GuardedStep
from .noticed import Noticed, gone, warn_of_broken_step

_COMPILED = "fxmask.guard looks after a step as Python does: compile optimizer.step without fullgraph=True"
_none = gone  # the name by which handles of before were pickled


class GuardHandle:
    """What `guard` gives: `policies` {parameter's name: policy}, `masked_step` as it was asked for, and `remove()`.

    A context manager, too. It ends with its optimiser, and with `restore`: masks of a later `apply` want a guard of their own, and a step without it warns.
    """

    _held = Held()  # nothing, of a copy

    def __init__(self, optimizer: Optimizer, held: Held, returning: str, masked_step: bool | str, model: nn.Module) -> None:
        self._hooks: list[Any] = []
        self._held, self._noticed = held, Noticed(model)
        self._returning, self.masked_step = returning, masked_step
        self._under_way: GuardedStep | None = None
        self._captures: int | None = None  # steps in the capture of fxmask.graphed, whose replays count
        self.optimizer, self.steps = weakref.ref(optimizer), 0
        clear = "" if masked_step else elementwise.cleared_while_masked(optimizer, returning)
        self._noticed.begin(optimizer, held)  # before the hooks: a filter may make its warning an error
        # here, and no decorators: those would import the compiler with this module, which takes seconds; a first optimiser imports it by itself
        before, after = (torch.compiler.disable(hook, reason=_COMPILED) for hook in (self._before, self._after))
        before.fxmask_guard = self
        self._hooks = [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]
        # whoever looks after a step, as an average of weights may, sees them as they stay
        optimizer._optimizer_step_post_hooks.move_to_end(self._hooks[1].id, last=False)  # type: ignore[attr-defined]
        held.begin(optimizer, clear)
        other_steps.watch(self)

    @property
    def policies(self) -> dict[str, str]:
        """What happens to the masked part of each weight."""
        return {g.name: g.policy for g in self._held.guarded if self._held.is_ours(g.site)}

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        if other_steps.is_no_step(optimizer):
            return None
        self._under_way = None  # what a step that raised has left
        self._look(optimizer)
        closure = has_closure(args, kwargs)
        masked_step = self.masked_step if self._held.guarded else False  # without layers the step is the optimiser's, or that of a guard that came later
        if masked_step:
            elementwise.refuse_call(optimizer, closure, self._hooks[0].id)
        self._under_way = GuardedStep(optimizer, self._held.guarded, masked_step, self._returning, closure)
        if not closure and self._captures is None:
            self._noticed.look_at_gradients(self._held.guarded)
        return self._under_way.arguments(args, kwargs)

    def _look(self, optimizer: Optimizer) -> None:
        """Before a step: which weights are guarded by now, and what is wrong with them."""
        held = self._held
        held.let_go()
        warn_of_broken_step(held.guarded)
        held.adopt(optimizer)
        self._noticed.warn_of_new_masks(optimizer, held, (w for h in handles_of(optimizer) for _, _, w in h._held.others))
        for g in held.guarded:
            refuse_dense(g.name, g.site, "optimizer.step()")
            refuse_another_weight(g)
        warn_of_dense_readers((g.name, g.site, g.weight) for g in held.guarded)
        self._noticed.look_for_replaced(held.guarded)
        if self.steps == 0 and self._captures is None:
            self._noticed.look_at_the_start(optimizer, held)

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if other_steps.is_no_step(optimizer):
            return
        self._held.let_go()  # a closure may restore the model
        if self._under_way is not None:  # a guard may be made inside a step
            self._under_way.finish(optimizer, self._held.is_ours)
            self._under_way = None
        if self._captures is None:
            self._count_step(optimizer)
        else:
            self._captures += 1
            noted.note(self)

    def _count_step(self, optimizer: Optimizer, compute: Callable[[Sequence[Job]], None] | None = None) -> None:
        """The host's part of a step that the device has taken: counts, schedules, masks that are due. `compute`: see `rebuild.rebuild`."""
        held = self._held
        self.steps += 1
        for g in held.guarded:
            g.site.__dict__["_fxmask_forward"] = None  # what was noted is of the weight before the step, whose version a fused one leaves
            g.stateless = g.by_momenta and g.weight.grad is not None and not state_of(optimizer, g.weight)
        taken_steps.advance([(site, weight_now(site, weight)) for site, weight in held.followed if id(site) not in held.ahead], 1, compute)
        held.ahead = set()
        for _, m in held.counted():
            pruning_schedule.advance(m, 1)
        reset_returned(optimizer, held.guarded)

    def remove(self) -> None:
        """Take the guard off; masks whose configuration counts steps then want `fxmask.step`. Calling it again changes nothing."""
        if not self._hooks:
            return
        for hook in self._hooks:
            hook.remove()
        other_steps.unwatch(self)
        self._held.release()
        self._hooks = []

    def __del__(self, ends: Callable[[], bool] = sys.is_finalizing) -> None:
        """The optimiser holds the hooks, and they hold the handle: this runs when the optimiser is collected. Not at exit, when PyTorch is half gone."""
        if not ends() and self._hooks:
            left = [(g.site, g.policy) for g in self._held.guarded if self._held.is_ours(g.site)]
            self.remove()
            for site, policy in left:  # nobody has taken it off
                site._fxmask_was = policy
                lost_guards.expect_guard(site)

    def __getstate__(self) -> dict[str, Any]:
        """A copy, or what is pickled with a trainer, guards nothing: hooks follow neither, and the first step on its masks warns."""
        kept = {name: value for name, value in self.__dict__.items() if name != "_held"}
        return {**kept, "_hooks": [], "_under_way": None, "optimizer": gone}

    def __enter__(self) -> GuardHandle:
        return self

    def __exit__(self, *exc: object) -> None:
        self.remove()


def handles_of(optimizer: Optimizer) -> list[GuardHandle]:
    """The guards on an optimiser."""
    hooks = getattr(optimizer, "_optimizer_step_pre_hooks", {}).values()
    return [hook.fxmask_guard for hook in hooks if hasattr(hook, "fxmask_guard")]


def remove_ended(optimizer: Optimizer, new: GuardHandle) -> None:
    """Take off earlier guards of the same weights whose masks were restored: with each restore and apply the hooks of one more would stay."""
    ids = {id(w) for w in (*(g.weight for g in new._held.guarded), *(w for _, _, w in new._held.others))}
    for old in handles_of(optimizer):
        if old is not new and old._held.cede(ids) and old._under_way is None:
            old.remove()


def masked_step_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """The weights that an optimiser steps on kept blocks alone, because its guard says so."""
    return [g.weight for h in handles_of(optimizer) if h.masked_step for g in h._held.guarded if h._held.is_ours(g.site)]
