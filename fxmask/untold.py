"""Steps that were announced and are never told: after `fxmask.step(model, 0)` an optimiser steps, and nobody calls `fxmask.step(model)`.

Masks would stay at the ratio of the first step, all blocks in place, and nothing else would say so. A layer is watched until its first step is told.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from .guards.other_steps import under_way
from .kernels.errors import first_of, message, warn
from .nm.nm_attributes import LOGITS
from .passes.finding.candidate import join
from .passes.state.site import Site
from .passes.state.weak_sets import alive
from .passes.stepping.held import ids_of

PATIENCE = 10  # optimiser steps of a weight; whoever tells several at once, as step(model, 4), is given time
FOREIGN = 1000  # steps of optimisers that hold other weights, after which it is taken for one that rests
COUNTS = ("_fxmask_step", "_fxmask_pruning_step", "_fxmask_nm_step")
GUARDS = ("_fxmask_guard", "_fxmask_pruning_guard")


@dataclass
class Promise:
    """Who holds the weight of a layer, and how many optimiser steps there were since its steps were announced: of its weight, and of others."""

    name: str
    owner: weakref.ref[nn.Module]
    steps: int = 0
    foreign: int = 0

    def parameters(self) -> list[Tensor]:
        owner = self.owner()
        return [] if owner is None else _held(owner, self.name.rpartition(".")[2])


_promised: weakref.WeakKeyDictionary[nn.Module, Promise] = weakref.WeakKeyDictionary()
_hooks: list[Any] = []


def expect_steps(model: nn.Module, layers: Sequence[tuple[str, nn.Module]]) -> None:
    """Watch the optimiser steps of layers, each by (its own or its parameter's name, what counts), but for those that have counted, as under a guard.

    A weight that a graph computes is no optimiser's, and is not watched.
    """
    for name, m in layers:
        if m not in _promised and not _told(m) and (found := _place(model, name)) is not None:
            _promised[m] = Promise(*found)
    if _promised and not _hooks:
        _hooks.append(register_optimizer_step_post_hook(_after_step))


def _held(owner: nn.Module, leaf: str) -> list[Tensor]:
    """A weight, or what a parametrisation computes it from, which is not asked to; and logits, which may move alone."""
    weight, made = owner._parameters.get(leaf), owner._modules.get("parametrizations")
    if weight is not None:
        return [p for p in (weight, owner._parameters.get(LOGITS)) if p is not None]
    return list(made[leaf].parameters()) if isinstance(made, nn.ModuleDict) and leaf in made else []


def _place(model: nn.Module, name: str) -> tuple[str, weakref.ref[nn.Module]] | None:
    """The name of a layer's weight, or of a parameter, and the module that holds it."""
    for path in (join(name, "weight"), name):
        prefix, _, leaf = path.rpartition(".")
        try:
            owner = model.get_submodule(prefix)
        except AttributeError:  # a graph's name of it
            continue
        if _held(owner, leaf):
            return path, weakref.ref(owner)
    return None


def _told(m: nn.Module) -> bool:
    """Whether a step of the layer was told, or a guard counts them, or it counts nothing any more."""
    d = m.__dict__
    counted = [d[name] for name in COUNTS if name in d]
    return not counted or any(counted) or any(d.get(name) is not None for name in GUARDS)


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Warn, once for a layer, where its steps are not told."""
    if torch.compiler.is_compiling() or not _promised or len([*under_way()]) > 1:  # an optimiser that another one wraps, or super().step()
        return
    held, late = set(ids_of(optimizer)), []
    for m in alive(_promised):
        promise = _promised.get(m)
        if promise is None:
            continue
        ours = [p for p in promise.parameters() if id(p) in held]
        promise.foreign += not ours
        promise.steps += any(p.requires_grad and p.grad is not None for p in ours)
        if _told(m) or promise.foreign > FOREIGN:
            _promised.pop(m, None)
        elif promise.steps > PATIENCE:
            _promised.pop(m, None)
            late.append((promise.name, m))
    if late:
        what = "fxmask.step(model, 0) has announced that steps will be told: expected fxmask.step(model) after every optimizer.step(), got none"
        what += f" in {PATIENCE + 1}. What counts steps stands still{_at(late[0][1])}."
        warn(message(what, first_of([name for name, _ in late]), "call it, or fxmask.guard(optimizer, model) in place of both."))


def _at(m: nn.Module) -> str:
    """Where a ramp stands."""
    if not isinstance(m, Site) or (now := m._fxmask_config.ratio_at(m._fxmask_step)) == m._fxmask_given.final_ratio:
        return ""
    return f", at ratio {round(now, 6):g} instead of {m._fxmask_given.final_ratio:g}"
