"""Whether the graphs that the backend masked are the ones that train, asked at optimiser steps: Dynamo falls back to eager code without an error, and eager
code is dense.
"""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from ..kernels.errors import UnsupportedError, first_of, message, warn
from ..passes.frames import makes_state
from .backend_missed import APPLY, CONTAINER, SKIPPED, missed
from .backend_watch import Use, use_of
from .shards import local, look


@dataclasses.dataclass
class State:
    """Of a process that took the backend: whether a graph has reached it, and whether it was told that none has."""

    reached: bool = False
    told: bool = False


state = State()
_steps: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()  # with gradients of weights that no graph has met
_told = WeakTensorKeyDictionary()  # such weights, by their own memory, of which that was said
_installed: list[Any] = []


def asked() -> None:
    """Somebody took the backend: from now on optimiser steps are looked at."""
    if not _installed:
        _installed.append(register_optimizer_step_pre_hook(_before_step))


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling() or makes_state():
        return
    around: list[tuple[Use, Tensor]] = []
    unmet = []
    params = [p for group in optimizer.param_groups for p in group["params"] if isinstance(p, Tensor) and p.grad is not None]
    look(params)
    for p in params:
        use = use_of(p)
        if use is None and p.dim() == 2 and local(p) not in _told:
            unmet.append(p)
        if use is None or not use.masks:
            continue
        grad = local(cast(Tensor, p.grad))
        same = use.gradient is not None and use.gradient() is grad and use.version == grad._version
        if use.calls == use.seen and not same:
            around.append((use, grad))
        else:
            _note(use, grad)
    for text in _of_unmet(optimizer, unmet):
        warn(text)
    if around:
        _of_eager_gradients([use for use, _ in around])
    for use, grad in around:
        _note(use, grad)


def _note(use: Use, grad: Tensor) -> None:
    use.seen, use.gradient, use.version = use.calls, weakref.ref(grad), grad._version


def _of_eager_gradients(around: list[Use]) -> None:
    """Of weights whose gradients no masked graph has made. Raises: UnsupportedError where `require` says that they are masked; the step is then not made."""
    names = [u.name for u in sorted(around, key=lambda u: not u.required)]
    what = f"an optimiser step has gradients of {first_of(names, 3)} though no masked graph ran since the last one with gradients on"
    why = "Dynamo fell back to eager code (force_eager, the recompile limit, a graph break in a loop), or the model was called past its compiled form"
    fix = f"{why}: that is dense; fxmask.apply(model, ...) is masked in eager code, too."
    if any(u.required for u in around):
        raise UnsupportedError(message(f"{what}, and `require` wants them masked.", "", fix))
    warn(message(f"{what}.", "", fix))


def _of_unmet(optimizer: torch.optim.Optimizer, unmet: list[Tensor]) -> list[str]:
    """What is to be said of weights that no graph has met. Raises: UnsupportedError where `require` says that they are masked.

    Looked into at the 1st, 2nd, 4th, 8th, ... such step: it takes tenths of a second, and an embedding is such a weight for good.
    """
    n = 0
    if unmet:
        n = _steps[optimizer] = _steps.get(optimizer, 0) + 1
    found = missed(unmet) if n.bit_count() == 1 else []
    for m in found:
        if m.required:
            raise UnsupportedError(m.text)
    texts = [m.text for m in found]
    for w in (w for m in found for w in m.weights):
        _told[local(w)] = True
    if not state.reached and not state.told:
        state.told = True
        what = "an optimiser step in a process that asked for torch.compile(backend='fxmask'), and no graph has reached it: everything is dense so far."
        texts = texts or [message(what, "", f"{SKIPPED}; {CONTAINER}: compile what torch.compile(fullgraph=True) takes, {APPLY}")]
    return texts
