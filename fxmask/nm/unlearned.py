"""Learned masks that nobody learns: `apply` gives a layer logits, of which an optimiser that was made before it knows nothing."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..kernels.errors import first_of, message, warn
from ..passes.frames import makes_state
from ..passes.state.weak_sets import alive
from ..passes.stepping.held import ids_of
from .nm_attributes import LOGITS

if TYPE_CHECKING:
    from .nm_layers import NMLayer

_waiting: weakref.WeakSet[NMLayer] = weakref.WeakSet()  # layers whose logits no optimiser has stepped yet
_once: weakref.WeakKeyDictionary[Optimizer, weakref.WeakSet[NMLayer]] = weakref.WeakKeyDictionary()  # and which an optimiser has passed over once
_hooks: list[Any] = []


def expect_learning(m: NMLayer) -> None:
    """Watch who steps the logits of a layer."""
    _waiting.add(m)
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_before_step))


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Warn of layers whose weight this optimiser holds and whose logits have a gradient that none takes: in its second step, as theirs may come behind it."""
    if not _waiting or torch.compiler.is_compiling() or makes_state():
        return
    held = set(ids_of(optimizer))
    passed, left = _once.setdefault(optimizer, weakref.WeakSet()), []
    for m in alive(_waiting):
        logits, weight = m._parameters.get(LOGITS), m._parameters.get("weight")
        if logits is None or not logits.requires_grad or id(logits) in held:  # restored, frozen, or learned
            _waiting.discard(m)
        elif logits.grad is not None and id(weight) in held:
            if m in passed:
                _waiting.discard(m)
                left.append(m._fxmask_nm_name)
            passed.add(m)
    if left:
        what = "the logits of learned N:M masks have gradients, and the optimiser that holds the weights steps without them: expected one that has them."
        fix = "make the optimiser after fxmask.apply, or optimizer.add_param_group({'params': logits}), of the parameters whose names end in nm_logits."
        warn(message(what, first_of(sorted(left)), fix))
