"""Which masked weights a guard holds: those of its optimiser, others whose steps it counts, and those that the optimiser may be given later."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..kernels.errors import StateError, UnsupportedError, first_of, message, warn
from ..passes.finding.weights import peek_weight
from ..passes.settings import phases
from ..passes.state import pruning_schedule, ranks, taken_steps
from ..passes.state.lost_guards import KEPT
from ..passes.state.saliency import refuse_shard
from ..passes.state.site import Site, note_weight
from ..passes.state.site_mask import check_agreed
from ..passes.stepping import elementwise
from ..passes.stepping.guarded_weight import Guarded, may_freeze
from ..passes.stepping.held import group_of, ids_of
from ..passes.stepping.momenta import averages_of
from ..sites import Masked, values_of
from ..swap import MaskedLayer

Followed = tuple[Site, "torch.Tensor | None"]
Named = tuple[str, Site, torch.Tensor]
Layer = tuple[str, nn.Module]  # with a schedule of pruned inputs, by its name


class Held:
    """What a guard holds of a model: masked weights, and layers with a schedule of pruned inputs, `scheduled` when it was made. It knows its own by a token
    on them, which `fxmask.restore` takes off, as a later `fxmask.apply` does. `choice`: what it was asked for."""

    def __init__(self, choice: str = "auto", scheduled: Iterable[Layer] = ()) -> None:
        self.guarded: list[Guarded] = []  # the optimiser steps them
        self.followed: list[Followed] = []  # whose steps are counted: the guarded ones, and weights that no optimiser moves
        self.others: list[Named] = []  # of other Parameters, which the optimiser may be given
        self.lost: list[Named] = []  # guarded once and restored since, till somebody masks them anew
        self.pruned: list[Layer] = []  # whose steps are counted
        self.ahead = set[int]()  # ids of sites for which another guard has counted this step already
        self._choice, self._token, self._clear = choice, object(), ""
        self._ids: tuple[int, ...] = ()  # of the optimiser's parameters, when they were last looked at
        self._scheduled = [(n, m, m.__dict__["_fxmask_pruning_given"]) for n, m in scheduled]

    def is_ours(self, site: Site) -> bool:
        """Whether it was neither restored since nor masked anew."""
        return site.__dict__.get("_fxmask_guard") is self._token

    def counted(self) -> list[Layer]:
        """Layers with a schedule of pruned inputs, but for those that were restored since."""
        return [(n, m) for n, m in self.pruned if m.__dict__.get("_fxmask_pruning_guard") is self._token]

    def countable(self, optimizer: Optimizer) -> list[Layer]:
        """Those with the schedule that they had when the guard was made, which the optimiser moves, and for which no guard counts yet."""
        same = [(n, m) for n, m, given in self._scheduled if m.__dict__.get("_fxmask_pruning_given") is given and m.__dict__["_fxmask_pruning_guard"] is None]
        return [(n, m) for n, m in same if any(group_of(optimizer, p) is not None for p in m.parameters())]

    def begin(self, optimizer: Optimizer, clear: str) -> None:
        """From now on the guard is in force. `clear`: see `Guarded`."""
        self._ids, self._clear = ids_of(optimizer), clear
        self._take(optimizer, self.guarded, self.followed)

    def _take(self, optimizer: Optimizer, guarded: list[Guarded], followed: list[Followed]) -> None:
        """Begin with weights: their sites know that they are guarded, and by whom."""
        for g in guarded:
            g.site._fxmask_policy, g.site._fxmask_choice, g.site._fxmask_was, g.clear = g.policy, g.choice, None, self._clear
            g.averages = averages_of(optimizer)
        for site, _ in followed:
            site._fxmask_guard = self._token
        taken_steps.advance(followed, 0)
        pruned = self.countable(optimizer)
        for _, m in pruned:
            pruning_schedule.follow(m, self._token)
        self.pruned += pruned

    def adopt(self, optimizer: Optimizer) -> None:
        """Guard masked weights that the optimiser has taken up since, by `add_param_group` or in exchange for others, and count for pruned inputs of theirs."""
        ids = ids_of(optimizer)
        if ids == self._ids:
            return
        new = [(n, s, w) for n, s, w in self.others if "_fxmask_guard" in s.__dict__ and group_of(optimizer, w) is not None and s._fxmask_policy is None]
        guarded = [guarded_weight(n, s, w, self._choice) for n, s, w in new]
        followed: list[Followed] = [(s, w) for _, s, w in new if s._fxmask_guard is not self._token]  # another guard may have counted for it at rest
        now = max((s._fxmask_step for s, _ in self.followed), default=0)
        self.ahead = {id(s) for s, _ in followed if s._fxmask_guard is not None and s._fxmask_step > now}
        self.guarded, self.followed = self.guarded + guarded, self.followed + followed
        self._take(optimizer, guarded, followed)
        self._ids = ids  # not where it raised: the next step does so again

    def let_go(self) -> None:
        """Leave alone what was restored."""
        ours = [g for g in self.guarded if self.is_ours(g.site)]
        self.lost += [(g.name, g.site, g.weight) for g in self.guarded if not self.is_ours(g.site)]
        self.guarded = ours
        self.followed = [(s, w) for s, w in self.followed if self.is_ours(s)]

    def cede(self, ids: set[int]) -> bool:
        """Leave to a new guard of weights with these ids what it would take up yet; whether nothing is left, as all of its masks were restored."""
        self.let_go()
        if self.followed or self.counted():
            return False
        self.others = [named for named in self.others if id(named[2]) not in ids]
        return not self.others and all(id(weight) in ids for _, _, weight in self.lost)

    def release(self) -> None:
        """Nobody guards these any more, nor counts for them."""
        for site, weight in self.followed:
            if self.is_ours(site):
                site._fxmask_policy, site._fxmask_guard, site._fxmask_announced, site._fxmask_forward = None, None, False, ()
                note_weight(site, weight)
        for _, m in self.counted():
            pruning_schedule.follow(m, None)


def shared_out(optimizer: Optimizer, found: Iterable[Masked], scheduled: Iterable[Layer], masked_weights: str, masked_step: bool) -> Held:
    """What a guard on an optimiser is to hold of these weights and layers. Raises: StateError, UnsupportedError, see `fxmask.guard`."""
    held = Held(masked_weights, scheduled)
    for name, site, weight in found:
        steps = weight is not None and group_of(optimizer, weight) is not None
        if steps and weight is not None:
            held.guarded.append(guarded_weight(name, site, weight, masked_weights, masked_step))
            if masked_step:
                elementwise.refuse_shard(name, weight)
        elif isinstance(weight, nn.Parameter):
            held.others.append((name, site, weight))
        elif masked_weights in KEPT:
            what = f"masked_weights={masked_weights!r} of a weight that other parameters make: expected a Parameter of the layer."
            raise UnsupportedError(message(what, name, "use masked_weights='free', or exclude the layer from fxmask.apply."))
        rests = not isinstance(weight, nn.Parameter) or not weight.requires_grad
        if steps or (rests and site._fxmask_guard is None):
            if site._fxmask_config.cached and weight is not None:
                check_agreed(site, values_of(name, weight, "fxmask.guard"))
            held.followed.append((site, weight))
    return held


def makers_of(layer: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters that a layer's weight is computed from, by a parametrisation or a pruning: all but those of its bias."""
    return (p for name, p in layer.named_parameters() if name != "bias" and not name.startswith(("bias_", "parametrizations.bias.")))


def warn_of_ranks(found: Iterable[Masked]) -> None:
    """FxMaskWarning where ranks were given different masks or scores for a layer, as by a random tensor that each of them draws. All ranks call it together.

    No error: stages of a pipeline may give other layers the same name.
    """
    given = [(name, site._fxmask_own) for name, site, _ in found if site._fxmask_own is not None and not site._fxmask_own.is_meta]
    own = {name: hashlib.sha256(t.cpu().numpy().tobytes()).hexdigest() for name, t in given}  # torch.load may have put it on a device
    all_ranks: list[Any] = ranks.gathered(own) if own else []
    differ = [name for name, digest in own.items() if any(other.get(name, digest) != digest for other in all_ranks)]
    if differ:
        what = "ranks were given other masks or scores for the same layers: expected the same on all, where they train one model."
        fix = "make them under one seed on all ranks, or on rank 0, and torch.distributed.broadcast them."
        warn(message(what, first_of(differ), fix))


def guarded_weight(name: str, site: Site, weight: torch.Tensor, masked_weights: str, masked_step: bool = False) -> Guarded:
    """A masked weight as a guard holds it. StateError where it is guarded already, UnsupportedError where it cannot rest."""
    moving = [c.backward for c in phases.in_turn(site._fxmask_given) if not may_freeze(c)]  # in any phase
    refuse_shard(site, weight)
    if site._fxmask_policy is not None:
        what = f"this weight is guarded already (policy {site._fxmask_policy!r}): expected one guard for a masked weight."
        fix = "call remove() on the first handle; two optimisers that step in turn (actor, critic) want weights of their own: leave shared ones to one of them."
        raise StateError(message(what, name, fix))
    if masked_weights == "freeze" and moving:
        asked, fix = ("masked_step=True", "leave masked_step out.") if masked_step else ("masked_weights='freeze'", "use masked_weights='auto' or 'free'.")
        what = f"{asked} with backward={moving[0]!r} would cancel it, because its masked weights must move: expected backward='masked' with it."
        raise UnsupportedError(message(what, name, fix))
    return Guarded(name, site, weight, masked_weights, by_momenta="momentum" in phases.values(site._fxmask_given, "criterion"))


def refuse_another_weight(g: Guarded) -> None:
    """StateError where what a layer multiplies by is no longer the Parameter that is guarded."""
    held = g.site.__dict__.get("_parameters", {})
    if isinstance(g.weight, nn.Parameter) and held.get("weight", g.weight) is not g.weight:
        what = "this weight's Parameter has been replaced since fxmask.guard: expected the one that is guarded, got another."
        fix = "call remove() on the guard's handle, make the optimiser of the new Parameters, then call fxmask.guard again,"
        raise StateError(message(what, g.name, f"{fix} and fxmask.refresh(model) where masks are cached."))
    if isinstance(g.site, MaskedLayer) and "weight" not in held:
        what = "this weight is made from other parameters since fxmask.guard (by a parametrisation or a pruning): expected the Parameter that is guarded."
        fix = "finalize the model before that (fxmask.finalize), or remove() the guard and call fxmask.guard again: it says what it cannot hold."
        raise StateError(message(what, g.name, fix))


def weight_now(site: Site, weight: torch.Tensor | None) -> torch.Tensor | None:
    """The weight as it is after a step: a parametrised one is another tensor each time. Asked for where a mask is cached."""
    if weight is not None and site._parameters.get("weight") is weight:  # nearly always
        return weight
    if not (site._fxmask_given.wants_weight and isinstance(site, MaskedLayer)) or (ranks.is_shard(weight) and isinstance(weight, nn.Parameter)):
        return weight
    with torch.no_grad():
        return peek_weight(site)
