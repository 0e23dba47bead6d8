"""Permuted masks that a load of weights has built anew under an optimiser that had stepped these: a resumed run has forgotten its own."""

from __future__ import annotations

import hashlib
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..guards.lost_state import has_stepped
from ..kernels.errors import first_of, message, warn
from ..passes.frames import makes_state
from ..passes.state.tensors import has_values
from ..passes.state.weak_sets import alive
from ..passes.stepping.held import ids_of

if TYPE_CHECKING:
    from .nm_layers import NMLayer

_watched: weakref.WeakKeyDictionary[NMLayer, bytes] = weakref.WeakKeyDictionary()  # digests of their masks before, till their weight's optimiser steps
_hooks: list[Any] = []


def expect_state(m: NMLayer, old: Tensor | None) -> None:
    """After a load: look at the weight's next step whether its mask is another than before all loads, and neither a state nor `refresh` has come since."""
    if old is None or m.nm_mask is old or not has_values(old):
        return
    if m not in _watched or not m.__dict__.get("_fxmask_nm_rebuilt"):
        _watched[m], m._fxmask_nm_rebuilt = _digest(old), True
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_before_step))


def _digest(mask: Tensor) -> bytes:
    """Of a mask, which would take memory where nobody trains on."""
    return hashlib.sha256(mask.cpu().numpy().tobytes()).digest()


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Warn of layers whose mask is a load's, where the optimiser had stepped the weight."""
    if not _watched or torch.compiler.is_compiling() or makes_state():
        return
    held, lost = set(ids_of(optimizer)), []
    for m in alive(_watched):
        weight = m._parameters.get("weight")
        if weight is None or id(weight) not in held:
            continue
        before = _watched.pop(m, None)
        mask = m.nm_mask if m.__dict__.get("_fxmask_nm_rebuilt") and has_stepped(optimizer, weight) else None
        if mask is not None and _digest(mask) != before:
            lost.append(m.__dict__.get("_fxmask_nm_name", type(m).__name__))  # pickles of before have none
    if lost:
        what = "a load of weights has built permuted N:M masks anew, and the optimiser had stepped these weights: a run that is resumed, or goes back to"
        what += " weights of before, had other masks for them."
        fix = "fxmask.load_state_dict(model, saved) after the weights' load, of the state that was saved with them; where the new masks are meant,"
        warn(message(what, first_of(sorted(lost)), fix + " fxmask.refresh(model) before the step says so."))
