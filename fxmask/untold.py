"""Steps that were announced and are never told: after `fxmask.step(model, 0)` an optimiser steps, and nobody calls `fxmask.step(model)`.

Masks would stay at the ratio of the first step, all blocks in place, and nothing else would say so. A layer is watched until its first step is told.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from .kernels.errors import first_of, message, warn
from .passes.finding.weights import peek_weight
from .passes.stepping.held import ids_of

PATIENCE = 10  # optimiser steps of a weight; whoever tells several at once, as step(model, 4), is given time
COUNTS = ("_fxmask_step", "_fxmask_pruning_step", "_fxmask_nm_step")
GUARDS = ("_fxmask_guard", "_fxmask_pruning_guard")


@dataclass
class Promise:
    """What a layer had counted when its steps were announced, and how many optimiser steps its weight has made since."""

    name: str
    weight: Callable[[], Tensor | None]
    told: tuple[Any, ...]
    steps: int = 0


_promised: weakref.WeakKeyDictionary[nn.Module, Promise] = weakref.WeakKeyDictionary()
_hooks: list[Any] = []


def expect_steps(model: nn.Module, layers: Iterable[tuple[str, nn.Module, str | None]]) -> None:
    """Watch the optimiser steps of layers, each by (name for a message, what counts, the parameter's name in the model; None: its own)."""
    root = weakref.ref(model)
    for name, m, parameter in layers:
        _promised[m] = Promise(name, _weight_of(weakref.ref(m) if parameter is None else root, parameter), _told(m))
    if _promised and not _hooks:
        _hooks.append(register_optimizer_step_post_hook(_after_step))


def _weight_of(of: weakref.ref[nn.Module], parameter: str | None) -> Callable[[], Tensor | None]:
    """A weight by its place, as another Parameter may stand there later."""

    def weight() -> Tensor | None:
        m = of()
        if m is None or parameter is None:
            return None if m is None else peek_weight(m)
        owner, _, leaf = parameter.rpartition(".")
        try:
            return getattr(m.get_submodule(owner), leaf, None)
        except AttributeError:  # the layer is gone
            return None

    return weight


def _told(m: nn.Module) -> tuple[Any, ...]:
    return tuple(m.__dict__.get(name) for name in COUNTS)


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Warn, once for a layer, where its steps are not told."""
    if torch.compiler.is_compiling() or not _promised:
        return
    held, late, steps = set(ids_of(optimizer)), [], 0
    for m, promise in [(of(), promise) for of, promise in list(_promised.data.items())]:  # type: ignore[attr-defined]  # others may add to it
        if m is None:
            continue
        if _told(m) != promise.told or any(m.__dict__.get(name) is not None for name in GUARDS):
            _promised.pop(m, None)
        elif id(promise.weight()) in held:
            promise.steps += 1
            if promise.steps > PATIENCE:
                _promised.pop(m, None)
                late.append(promise.name)
                steps = promise.steps
    if late:
        what = f"fxmask.step(model, 0) has announced that steps will be told: expected fxmask.step(model) after every optimizer.step(), got none in {steps}."
        what += " What counts steps stands still, a ramp at its beginning, where nothing is masked."
        warn(message(what, first_of(late), "call it, or fxmask.guard(optimizer, model) in place of both."))
