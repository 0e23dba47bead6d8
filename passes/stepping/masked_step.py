"""An optimiser's step on kept blocks alone: what freeze promises, without copies of what is masked.

Before the step the kept blocks of weight, gradient and momenta are gathered into small tensors, and the optimiser's own `step` is called on a stand-in of the
optimiser, an object of its class whose groups and state hold the small Parameters in the weights' places. A hook before a step may change the arguments of
that step, and `self` is the first of them: so no class is wrapped, and the optimiser itself never holds anything but its own Parameters. After the step weights
and momenta are scattered back. A step that raises leaves guarded weights, their momenta and their counts of steps as they were.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...kernels.errors import UnsupportedError, message
from ..settings.feedback import Feedback
from ..state.site import Site
from ..state.site_forward import mask_of_step
from ..state.site_mask import kept
from ..state.tensors import has_values
from . import elementwise
from .gathered import blocks_of
from .guarded_weight import Guarded
from .held import group_of
from .kept_blocks import KeptBlocks
from .momenta import STEP_SIZE, is_copy

OWN = ("param_groups", "state", "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")  # what a stand-in does not share with its optimiser


def kept_on_host(site: Site) -> int | None:
    """Kept blocks of the mask of the last forward, known without asking the device; None with ties='keep' or a feedback, of which the mask alone tells."""
    told = site._fxmask_config.ties == "lowest" and not isinstance(site._fxmask_given.schedule, Feedback)
    return kept(site) if told else None


@dataclass
class StandIn:
    """A weight's kept elements as a Parameter of their own (1, kept), for one step."""

    guarded: Guarded
    blocks: KeptBlocks
    small: nn.Parameter


@dataclass
class Step:
    """A step that is under way: the stand-in of the optimiser, and those of its weights."""

    stand_in: Optimizer
    weights: list[StandIn]


@torch.no_grad()
def begin(optimizer: Optimizer, guarded: Iterable[Guarded], vouched: bool) -> Step | None:
    """Gather the kept blocks of what is about to step. None where every block of every weight is kept: then the optimiser steps by itself.

    Sets each weight's mask, that of its gradient, as `optimiser.before_step` does. Waits for a GPU only with ties='keep', a feedback, or rows that no run of
    four elements divides (`kept_blocks`).
    """
    elementwise.refuse(optimizer, vouched)
    moving: dict[int, tuple[Guarded, Tensor, KeptBlocks]] = {}  # with the gradient; layers that share a weight share its mask
    for g in guarded:
        g.mask, grad = None, g.weight.grad
        if grad is not None and g.weight.numel() and not g.site._fxmask_softening:  # others are left to the optimiser
            elementwise.refuse_shard(g.name, g.weight)
            g.mask, g.block = mask_of_step(g.site, g.weight), g.site._fxmask_config.block
            count = kept_on_host(g.site)
            if count != g.mask.numel() and id(g.weight) not in moving:
                asked = None if g.mask.device.type == "cpu" and has_values(g.mask) else count  # a mask that is at hand is looked at
                moving[id(g.weight)] = g, grad, blocks_of(g, g.mask, asked)
    if not moving:
        return None
    weights = []
    for g, grad, blocks in moving.values():
        if grad.layout != torch.strided:
            what = f"masked_step of a gradient that is no plain tensor: expected torch.strided, got {grad.layout}."
            raise UnsupportedError(message(what, g.name, "leave masked_step out."))
        small = nn.Parameter(blocks.gather(g.weight.detach()))
        small.grad = blocks.gather(grad.detach())
        weights.append(StandIn(g, blocks, small))
    return Step(_stand_in(optimizer, weights), weights)


def _stand_in(optimizer: Optimizer, weights: list[StandIn]) -> Optimizer:
    """An object of the optimiser's class with the small Parameters in the weights' places; the rest is the optimiser's own."""
    small = {id(s.guarded.weight): s.small for s in weights}
    groups = [{**group, "params": [small.get(id(p), p) for p in group["params"]]} for group in optimizer.param_groups]
    found: defaultdict[Any, Any] = defaultdict(dict, optimizer.state)
    for s in weights:
        weight, old = s.guarded.weight, found.pop(s.guarded.weight, None)
        if old is not None:
            found[s.small] = {k: _seen(s.blocks, weight, v) for k, v in old.items()}
    it = object.__new__(type(optimizer))
    it.__dict__.update({**optimizer.__dict__, **dict(zip(OWN, (groups, found, OrderedDict(), OrderedDict()), strict=True))})
    if it.param_groups is not groups or it.state is not found:
        what = "masked_step of an optimiser whose param_groups or state are not plain attributes: expected those of torch.optim.Optimizer."
        raise UnsupportedError(message(what, type(optimizer).__name__, "leave masked_step out, or pass the optimiser that it wraps."))
    return it


def _seen(blocks: KeptBlocks, weight: Tensor, v: Any) -> Any:
    """An entry of a weight's state as its stand-in has it: a momentum's kept elements, a copy of a scalar (a step that raises has counted nothing)."""
    if not isinstance(v, Tensor):
        return v
    if v.shape == weight.shape:
        return blocks.gather(v.detach())
    return v.detach().clone() if v.numel() == 1 else v


@torch.no_grad()
def finish(optimizer: Optimizer, step: Step) -> None:
    """Scatter back what the step has made, and hand over what the optimiser has noted about itself and its groups."""
    small = {id(s.small): s for s in step.weights}
    for key, made in step.stand_in.state.items():  # in this order, so that new state lies as the optimiser would have laid it
        stands = small.get(id(key))
        if stands is None:
            optimizer.state[key] = made
        else:
            own = optimizer.state.setdefault(stands.guarded.weight, {})
            values = {k: _returned(optimizer, stands, k, v, own.get(k)) for k, v in made.items()}
            own.clear()
            own.update(values)
    for s in step.weights:
        if getattr(optimizer, "grad_scale", None) is not None and s.guarded.weight.grad is not None and s.small.grad is not None:
            s.blocks.scatter(s.guarded.weight.grad, s.small.grad)  # a fused step under GradScaler unscales gradients in place
        s.blocks.scatter(s.guarded.weight, s.small.detach())
    for own, seen in zip(optimizer.param_groups, step.stand_in.param_groups, strict=True):
        own.update({k: v for k, v in seen.items() if k != "params"})
    optimizer.__dict__.update({k: v for k, v in step.stand_in.__dict__.items() if k not in OWN})


def _returned(optimizer: Optimizer, s: StandIn, key: str, made: Any, old: Any) -> Any:
    """An entry of the state after the step: the weight's momentum, new or not, where it has an element for each kept one."""
    if not isinstance(made, Tensor) or made.shape != s.small.shape:
        return made
    weight = s.guarded.weight
    full = old if isinstance(old, Tensor) and old.shape == weight.shape else _beginning(optimizer, s, key, made)
    full = full.to(made.dtype)
    s.blocks.scatter(full, made)
    return full


def _beginning(optimizer: Optimizer, s: StandIn, key: str, made: Tensor) -> Tensor:
    """A new momentum of a whole weight: zero where nothing has stepped yet. Not so Rprop's step size (the lr) and copies of the weight, as ASGD's average."""
    weight = s.guarded.weight.detach().to(made)
    if key == STEP_SIZE:
        return torch.zeros_like(weight).add_((group_of(optimizer, s.guarded.weight) or {}).get("lr", 0.0))
    return torch.where(is_copy(key, made, s.small.detach().to(made), s.guarded.averages), weight, 0)
