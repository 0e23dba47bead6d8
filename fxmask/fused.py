"""Dropouts that rest: the linear right behind one in an nn.Sequential does its work, and the two watch whether they still run together."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from itertools import pairwise
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from .kernels.errors import message, warn
from .passes.graphs.fused_dropout import is_plain_dropout
from .swapped import of_now


class Pair:
    """What a Dropout and the linear that does its work both hold, so that copies of a model hold a copy of it.

    waiting: the thread whose forward of the Dropout no forward of the linear has followed yet, or 0. p: the Dropout's when it was fused. on: whether its last
    forward was in train(). rests: the Dropout itself; of a copy since that has run.
    """

    waiting = 0
    rests: weakref.ref[nn.Module] | None = None
    p: float
    on: bool | None = None

    def met(self, m: nn.Module) -> None:
        """The linear runs: its work is done, by its own training flag, whatever the Dropout's says."""
        self.waiting, on, self.on = 0, self.on, None
        if m._fxmask_dropping.mc:  # type: ignore[union-attr]
            return
        if on is not None and on != m.training:
            of = ("train()", "drops nothing") if on else ("eval()", "drops")
            warn_of_fused(f"a Dropout in {of[0]} rests for the linear behind it, which is not, and {of[1]}: expected both in one mode.")
        if self.rests is not None and self.rests() is None and m.training:
            warn_of_fused("a linear drops for a Dropout that is in the model no more: expected that where it was, or no dropout, got the linear's.")

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "rests"}  # a copy's Dropout is another one, or with another part of the model


def warn_of_fused(what: str) -> None:
    """Say what was done to a fused Dropout, which is without effect."""
    fix = "fxmask.restore(model), change the Dropout, then fxmask.apply again; train() and eval() of the whole model, or of the linear, are seen."
    warn(message(what, "nn.Sequential", fix))


class FusedDropout(nn.Dropout):
    """A Dropout whose work the next linear does."""

    _fxmask_pair: Pair

    def forward(self, input: Tensor) -> Any:
        if not isinstance(self, FusedDropout):
            return of_now(self, input)
        compiling, pair = torch.compiler.is_compiling(), self._fxmask_pair
        if not compiling:
            pair.on, pair.rests = self.training, pair.rests or weakref.ref(self)
            if self.p != pair.p:
                warn_of_fused(f"the p of a Dropout that rests for the linear behind it was changed: expected {pair.p:g}, of which it knows, got {self.p:g}.")
        if self.training and not compiling and torch._C._current_graph_task_id() == -1:  # a checkpoint's second forward may end here
            if pair.waiting == threading.get_ident():  # another thread may be on its way to the linear
                what = f"a Dropout(p={self.p:g}) rests for the linear behind it, and that has not run since: nothing was dropped there."
                fix = "fxmask.restore(model) before a layer is replaced or called alone, then fxmask.apply again."
                warn(message(what, "nn.Sequential", fix))
            pair.waiting = threading.get_ident()
        return input

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, fused into the next linear"


def fuse(dropout: nn.Dropout, linear: nn.Module) -> None:
    """Put a Dropout to rest; the linear behind it, which drops from now on, knows it."""
    dropout.__class__ = FusedDropout
    dropout._fxmask_pair = linear._fxmask_pair = pair = Pair()  # type: ignore[assignment]
    pair.p, pair.rests = dropout.p, weakref.ref(dropout)


def runs_in_turn(m: nn.Module) -> TypeGuard[nn.Sequential]:
    """Whether a module runs its children one after the other, and does nothing else."""
    return isinstance(m, nn.Sequential) and type(m).forward is nn.Sequential.forward


def dropouts_before(model: nn.Module) -> dict[int, nn.Dropout]:
    """{id of a Linear: the Dropout right before it in an nn.Sequential}, of modules that are in one place only."""
    places = Counter(id(m) for _, m in model.named_modules(remove_duplicate=False))
    found = {}
    for m in model.modules():
        if runs_in_turn(m):
            for first, then in pairwise(m):
                if is_plain_dropout(first) and isinstance(then, nn.Linear) and places[id(first)] == places[id(then)] == 1:
                    found[id(then)] = first
    return found


def resting_dropouts(model: nn.Module) -> tuple[list[str], list[str]]:
    """Names of the modules whose work the next linear does, and of those whose linear is in the model no more."""
    dropping = {id(m.__dict__.get("_fxmask_pair")) for m in model.modules() if "_fxmask_dropping" in m.__dict__}
    rest = [(name, m) for name, m in model.named_modules() if isinstance(m, FusedDropout)]
    return [name for name, m in rest if id(m._fxmask_pair) in dropping], [name for name, m in rest if id(m._fxmask_pair) not in dropping]
