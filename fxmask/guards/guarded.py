"""Which masked weights a guard holds: those of its optimiser, others whose steps it counts, and those that the optimiser may be given later."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from ..kernels.errors import StateError, UnsupportedError, first_of, message, warn
from ..passes.finding.weights import peek_weight
from ..passes.settings import phases
from ..passes.state import ranks
from ..passes.state.lost_guards import KEPT
from ..passes.state.saliency import refuse_shard
from ..passes.state.site import Site
from ..passes.state.site_mask import check_agreed
from ..passes.stepping import elementwise
from ..passes.stepping.guarded_weight import Guarded, may_freeze
from ..passes.stepping.held import group_of
from ..sites import values_of
from ..swap import MaskedLayer

Followed = tuple[Site, "torch.Tensor | None"]
Named = tuple[str, Site, torch.Tensor]
Scheduled = tuple[str, nn.Module, object]  # a layer by its name, and the schedule of its pruned inputs as it was asked for


class Held(NamedTuple):
    """The masked weights of a model, as a guard sees them."""

    guarded: list[Guarded]  # the optimiser steps them
    followed: list[Followed]  # whose steps are counted: the guarded ones, and weights that no optimiser moves
    others: list[Named]


def shared_out(optimizer: Optimizer, found: Iterable[tuple[str, Site, torch.Tensor | None]], masked_weights: str, masked_step: bool) -> Held:
    """What a guard on an optimiser holds of these weights. Raises: StateError, UnsupportedError, see `fxmask.guard`."""
    held = Held([], [], [])
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


def counted_layers(optimizer: Optimizer, scheduled: list[Scheduled]) -> list[tuple[str, nn.Module]]:
    """Of the layers that had a schedule of pruned inputs when the guard was made, and have that one still: those that the optimiser moves, and no guard counts
    for yet."""
    same = [(n, m) for n, m, given in scheduled if m.__dict__.get("_fxmask_pruning_given") is given and m.__dict__["_fxmask_pruning_guard"] is None]
    return [(n, m) for n, m in same if any(group_of(optimizer, p) is not None for p in m.parameters())]


def makers_of(layer: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters that a layer's weight is computed from, by a parametrisation or a pruning: all but those of its bias."""
    return (p for name, p in layer.named_parameters() if name != "bias" and not name.startswith(("bias_", "parametrizations.bias.")))


def warn_of_ranks(found: Iterable[tuple[str, Site, torch.Tensor | None]]) -> None:
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
        raise StateError(message(what, name, "call remove() on the first handle."))
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
