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
from ..passes.state.site import Site, note_weight
from ..passes.stepping import elementwise
from ..passes.stepping.bypass import warn_of_dense_readers
from ..passes.stepping.guarded_weight import Guarded
from ..passes.stepping.held import group_of, has_closure, ids_of, state_of
from ..passes.stepping.momenta import averages_of
from ..passes.stepping.optimiser import reset_returned
from ..pruning import scheduled_layers
from ..sites import refuse_dense
from . import other_steps
from .guarded import Followed, Held, Scheduled, counted_layers, guarded_weight, refuse_another_weight, weight_now
from .guarded_step import GuardedStep
from .noticed import Noticed, gone, warn_of_broken_step

_COMPILED = "fxmask.guard looks after a step as Python does: compile optimizer.step without fullgraph=True"
_none = gone  # the name by which handles of before were pickled


class GuardHandle:
    """What `guard` gives: `policies` {parameter's name: policy}, `masked_step` as it was asked for, and `remove()`.

    A context manager, too. It ends with its optimiser, and with `restore`: masks of a later `apply` want a guard of their own, and a step without it warns.
    """

    def __init__(self, optimizer: Optimizer, held: Held, choice: str, returning: str, masked_step: bool | str, model: nn.Module) -> None:
        self._hooks: list[Any] = []
        self._scheduled: list[Scheduled] = [(n, m, m.__dict__["_fxmask_pruning_given"]) for n, m in scheduled_layers(model)]
        self._pruned: list[tuple[str, nn.Module]] = []  # those of them that this guard counts for
        self.masked_step = masked_step
        self._under_way: GuardedStep | None = None
        self._guarded, self._followed, self._others = held
        self._choice, self._returning, self._token = choice, returning, object()
        self._noticed = Noticed(model)
        self._captures: int | None = None  # steps in the capture of fxmask.graphed, whose replays count
        self._clear = "" if masked_step else elementwise.cleared_while_masked(optimizer, returning)
        self.optimizer, self.steps = weakref.ref(optimizer), 0
        self._ids = ids_of(optimizer)
        self._ahead = set[int]()  # ids of sites for which another guard has counted this step already
        self._noticed.begin(optimizer, held, counted_layers(optimizer, self._scheduled))  # before the hooks: a filter may make its warning an error
        # here, and no decorators: those would import the compiler with this module, which takes seconds; a first optimiser imports it by itself
        before, after = (torch.compiler.disable(hook, reason=_COMPILED) for hook in (self._before, self._after))
        before.fxmask_guard = self
        self._hooks = [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]
        # whoever looks after a step, as an average of weights may, sees them as they stay
        optimizer._optimizer_step_post_hooks.move_to_end(self._hooks[1].id, last=False)  # type: ignore[attr-defined]
        self._take(optimizer, self._guarded, self._followed)
        other_steps.watch(self)

    def _take(self, optimizer: Optimizer, guarded: list[Guarded], followed: list[Followed]) -> None:
        """Begin with weights: their sites know that they are guarded, and by whom."""
        for g in guarded:
            g.site._fxmask_policy, g.site._fxmask_choice, g.site._fxmask_was, g.clear = g.policy, g.choice, None, self._clear
            g.averages = averages_of(optimizer)
        for site, _ in followed:
            site._fxmask_guard = self._token
        taken_steps.advance(followed, 0)
        pruned = counted_layers(optimizer, self._scheduled)
        for _, m in pruned:
            pruning_schedule.follow(m, self._token)
        self._pruned += pruned

    @property
    def policies(self) -> dict[str, str]:
        """What happens to the masked part of each weight."""
        return {g.name: g.policy for g in self._guarded if self._is_ours(g.site)}

    def _is_ours(self, site: Site) -> bool:
        return site.__dict__.get("_fxmask_guard") is self._token  # neither restored since nor masked anew

    def _counted(self) -> list[tuple[str, nn.Module]]:
        """Layers with a schedule of pruned inputs, but for those that were restored since."""
        return [(n, m) for n, m in self._pruned if m.__dict__.get("_fxmask_pruning_guard") is self._token]

    def _adopt(self, optimizer: Optimizer) -> None:
        """Guard masked weights that the optimiser has taken up since, by `add_param_group` or in exchange for others, and count for pruned inputs of theirs."""
        ids = ids_of(optimizer)
        if ids == self._ids:
            return
        new = [(n, s, w) for n, s, w in self._others if "_fxmask_guard" in s.__dict__ and group_of(optimizer, w) is not None and s._fxmask_policy is None]
        guarded = [guarded_weight(n, s, w, self._choice) for n, s, w in new]
        followed: list[Followed] = [(s, w) for _, s, w in new if s._fxmask_guard is not self._token]  # another guard may have counted for it at rest
        now = max((s._fxmask_step for s, _ in self._followed), default=0)
        self._ahead = {id(s) for s, _ in followed if s._fxmask_guard is not None and s._fxmask_step > now}
        self._guarded, self._followed = self._guarded + guarded, self._followed + followed
        self._take(optimizer, guarded, followed)
        self._ids = ids  # not where it raised: the next step does so again

    def _let_go(self) -> None:
        """Leave alone what was restored."""
        ours = [g for g in self._guarded if self._is_ours(g.site)]
        self._noticed.lost += [(g.name, g.site, g.weight) for g in self._guarded if not self._is_ours(g.site)]
        self._guarded = ours
        self._followed = [(s, w) for s, w in self._followed if self._is_ours(s)]

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        if other_steps.is_no_step(optimizer):
            return None
        self._under_way = None  # what a step that raised has left
        self._look(optimizer)
        closure = has_closure(args, kwargs)
        masked_step = self.masked_step if self._guarded else False  # without layers the step is the optimiser's, or that of a guard that came later
        if masked_step:
            elementwise.refuse_call(optimizer, closure, self._hooks[0].id)
        self._under_way = GuardedStep(optimizer, self._guarded, masked_step, self._returning, closure)
        if not closure and self._captures is None:
            self._noticed.look_at_gradients(self._guarded)
        return self._under_way.arguments(args, kwargs)

    def _look(self, optimizer: Optimizer) -> None:
        """Before a step: which weights are guarded by now, and what is wrong with them."""
        self._let_go()
        warn_of_broken_step(self._guarded)
        self._adopt(optimizer)
        self._noticed.warn_of_new_masks(optimizer, (w for h in handles_of(optimizer) for _, _, w in h._others))
        for g in self._guarded:
            refuse_dense(g.name, g.site, "optimizer.step()")
            refuse_another_weight(g)
        warn_of_dense_readers((g.name, g.site, g.weight) for g in self._guarded)
        self._noticed.look_for_replaced(self._guarded)
        if self.steps == 0 and self._captures is None:
            self._noticed.look_at_the_start(optimizer, self._guarded, self._followed, self._counted())

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if other_steps.is_no_step(optimizer):
            return
        self._let_go()  # a closure may restore the model
        if self._under_way is not None:  # a guard may be made inside a step
            self._under_way.finish(optimizer, self._is_ours)
            self._under_way = None
        if self._captures is None:
            self._count_step(optimizer)
        else:
            self._captures += 1
            noted.note(self)

    def _count_step(self, optimizer: Optimizer, compute: Callable[[Sequence[Job]], None] | None = None) -> None:
        """The host's part of a step that the device has taken: counts, schedules, masks that are due. `compute`: see `rebuild.rebuild`."""
        self.steps += 1
        for g in self._guarded:
            g.site.__dict__["_fxmask_forward"] = None  # what was noted is of the weight before the step, whose version a fused one leaves
            g.stateless = g.by_momenta and g.weight.grad is not None and not state_of(optimizer, g.weight)
        taken_steps.advance([(site, weight_now(site, weight)) for site, weight in self._followed if id(site) not in self._ahead], 1, compute)
        self._ahead = set()
        for _, m in self._counted():
            pruning_schedule.advance(m, 1)
        reset_returned(optimizer, self._guarded)

    def remove(self) -> None:
        """Take the guard off; masks whose configuration counts steps then want `fxmask.step`. Calling it again changes nothing."""
        if not self._hooks:
            return
        for hook in self._hooks:
            hook.remove()
        other_steps.unwatch(self)
        for site, weight in self._followed:
            if self._is_ours(site):
                site._fxmask_policy, site._fxmask_guard, site._fxmask_announced, site._fxmask_forward = None, None, False, ()
                note_weight(site, weight)
        for _, m in self._counted():
            pruning_schedule.follow(m, None)
        self._hooks = []

    def __del__(self, ends: Callable[[], bool] = sys.is_finalizing) -> None:
        """The optimiser holds the hooks, and they hold the handle: this runs when the optimiser is collected. Not at exit, when PyTorch is half gone."""
        if not ends() and self._hooks:
            left = [(g.site, g.policy) for g in self._guarded if self._is_ours(g.site)]
            self.remove()
            for site, policy in left:  # nobody has taken it off
                site._fxmask_was = policy
                lost_guards.expect_guard(site)

    def __getstate__(self) -> dict[str, Any]:
        """A copy, or what is pickled with a trainer, guards nothing: hooks follow neither, and the first step on its masks warns."""
        holds = ("_hooks", "_guarded", "_followed", "_others", "_scheduled", "_pruned")
        return {**self.__dict__, **{name: [] for name in holds}, "_token": object(), "_under_way": None, "optimizer": gone}

    def __enter__(self) -> GuardHandle:
        return self

    def __exit__(self, *exc: object) -> None:
        self.remove()


def handles_of(optimizer: Optimizer) -> list[GuardHandle]:
    """The guards on an optimiser."""
    hooks = getattr(optimizer, "_optimizer_step_pre_hooks", {}).values()
    return [hook.fxmask_guard for hook in hooks if hasattr(hook, "fxmask_guard")]


def masked_step_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """The weights that an optimiser steps on kept blocks alone, because its guard says so."""
    return [g.weight for h in handles_of(optimizer) if h.masked_step for g in h._guarded if h._is_ours(g.site)]
