"""Masks, and schedules of pruned inputs, that begin anew under an optimiser that has stepped their weights.

In a run that is resumed their state was forgotten, and nothing else shows it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..kernels.errors import first_of, message, warn
from ..passes.state import pruning_schedule, ranks
from ..passes.state.saliency import GIVEN
from ..passes.state.site import Site
from ..passes.state.tensors import has_values
from ..passes.stepping.held import group_of, states_of
from ..passes.stepping.momenta import NO_MOMENTA
from .guarded import Held, makers_of

BEGIN_SO = (*NO_MOMENTA, "exp_inf")  # states that are not zero where no gradient was: Adamax's largest one is its eps

Stepped = tuple[str, Site, "Sequence[torch.Tensor]"]  # a mask by its name, and what an optimiser moves its weight by


def stepped_with(held: Held) -> list[Stepped]:
    """The masks that a guard counts for: of Parameters, and of weights that their layer's other parameters make."""
    guarded = {id(g.site) for g in held.guarded}
    made = [s for s, w in held.followed if id(s) not in guarded and not isinstance(w, nn.Parameter)]
    own = [(g.name, g.site, [g.weight]) for g in held.guarded if isinstance(g.weight, nn.Parameter)]
    return [*own, *((s._fxmask_name, s, [*makers_of(s)]) for s in made)]


def warn_of_lost_state(optimizer: Optimizer, new: Sequence[Stepped], pruned: Sequence[tuple[str, nn.Module]]) -> set[int]:
    """FxMaskWarning for those of these masks, and of these layers with a schedule of pruned inputs, whose state a resumed run has forgotten, as their optimiser
    tells. Returns: the ids of their modules.

    Optimisers without a count and a momentum, as plain SGD, do not tell.
    """
    masks = [(name, s) for name, s, moved in new if _begins_anew(s) and any(has_stepped(optimizer, p) for p in moved)]
    named = {id(site) for _, site in masks}
    ramps = [(name, m) for name, m in pruned if id(m) not in named and pruning_schedule.begins_anew(m)]
    lost = [*masks, *((name, m) for name, m in ramps if any(has_stepped(optimizer, p) for p in m.parameters()))]
    if lost:
        begin = "masks" if masks else "schedules of pruned inputs"
        what = f"the optimiser has stepped weights before this guard, and their {begin} begin at step 0. In a run that is resumed that loses the masks' state:"
        what += " the steps that start, schedule and refresh count, cached masks and scores."
        fix = f"fxmask.load_state_dict(model, saved) after the weights' load and before the first step; where {begin} begin now, fxmask.step(model, 0) before"
        warn(message(what, first_of([name for name, _ in lost]), fix + " fxmask.guard says that this is meant."))
    return {id(m) for _, m in lost}


def _begins_anew(site: Site) -> bool:
    """Whether a state would have brought what weights do not: a step; or the mask of refresh=0, of weights that were there before a load."""
    given, by_weights = site._fxmask_given, site._fxmask_given.criterion not in (GIVEN, "random")
    of_loaded = given.refresh == 0 and site._fxmask_loaded and by_weights
    return not site._fxmask_step and not site._fxmask_resumed and (given.needs_steps or of_loaded)


def has_stepped(optimizer: Optimizer, weight: torch.Tensor) -> bool:
    """Whether an optimiser, or one that it wraps, has made a step of a weight, as its state tells."""
    return any(_is_of_a_step(state, optimizer, weight) for state in states_of(optimizer, weight))


def _is_of_a_step(state: Mapping[str, Any], optimizer: Optimizer, weight: torch.Tensor) -> bool:
    """Whether an optimiser's state of a weight is of a step that was made. Adagrad's is there before, and torch.distributed.checkpoint makes one by a step of
    zero gradients, the first, to which a coupled decay adds. A count with no tensor beside it is believed."""
    count = state.get("step", 0)
    known = count.numel() == 1 and has_values(count) if isinstance(count, torch.Tensor) else isinstance(count, (int, float))
    steps = float(count) if known else 0
    if steps <= 0 and state.get("momentum_buffer") is None:
        return False
    readable = {k: p for k, t in state.items() if isinstance(t, torch.Tensor) and t.numel() > 1 and has_values(p := ranks.part(t))}
    if steps > 1 or not readable:
        return True
    momenta = [t for k, t in readable.items() if k not in BEGIN_SO]
    group = group_of(optimizer, weight) or {}  # looked for here alone: that takes a walk over all parameters
    coupled = group.get("weight_decay") and not group.get("decoupled_weight_decay")
    return any(bool(t.any()) for t in momenta) and not (coupled and any(_is_of_decay(t, weight) for t in momenta))


def _is_of_decay(momentum: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether a decay alone may have made a momentum: it is a multiple of the weight, or of its square, as far as its dtype tells."""
    w = ranks.part(weight.detach()).float()
    if momentum.shape != w.shape or not momentum.is_floating_point():
        return False
    m, near = _scaled(momentum.float()), 1e-4 if momentum.itemsize > 2 else 0.02
    return any(bool((m - _scaled(x)).norm() < near) for x in (w, w.square()))


def _scaled(t: torch.Tensor) -> torch.Tensor:
    """To the norm 1, however small its elements are."""
    t = t / t.abs().max()
    return t / t.norm()
