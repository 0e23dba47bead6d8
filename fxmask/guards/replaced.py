"""Masked layers that the model no longer has: what was put in their place is dense, and no guard holds it."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from ..kernels.errors import first_of, message, warn
from ..passes.finding.candidate import join
from ..passes.finding.conv import KINDS
from ..passes.stepping.guarded_weight import Guarded
from ..sites import SELECTED, read_dense
from ..swap import MaskedLayer, unmasked


def warn_of_lost(model: nn.Module) -> None:
    """FxMaskWarning where a layer without masks bears a name that `fxmask.apply` has masked: a new head, or embeddings that were resized."""
    now = dict(model.named_modules())
    for prefix, m in model.named_modules():
        names = (join(prefix, name) for name in m.__dict__.get(SELECTED, ()))
        if found := [name for name in names if isinstance(layer := now.get(name), KINDS) and not isinstance(layer, MaskedLayer) and layer not in unmasked]:
            what = "masked layers were replaced since fxmask.apply: expected theirs in the model, got layers that it has not seen, which are dense."
            fix = "fxmask.apply(model, ..., include=[...]) for the new layers before fxmask.guard; or replace layers first, then call fxmask.apply."
            warn(message(what, first_of(found), fix))


def warn_of_dense_owners(model: nn.Module) -> None:
    """FxMaskWarning where a module reads the weight of a layer that was masked without it, as the fast path of an encoder layer does in eval()."""
    if found := read_dense(model):
        what = "a module of this model reads the weights of masked layers without their masks: expected fxmask.apply to be given it, got a part without it."
        fix = "fxmask.restore what was masked, then fxmask.apply(model, ..., include=[...]) on the whole model."
        warn(message(what, first_of(found), fix))


def warn_of_replaced(model: nn.Module, suspects: Iterable[Guarded]) -> None:
    """FxMaskWarning where a layer without masks bears the name of a guarded one, which the model does not hold elsewhere."""
    held, now = {id(m) for m in model.modules()}, dict(model.named_modules())
    gone = [g.name for g in suspects if isinstance(g.site, MaskedLayer) and id(g.site) not in held]
    found = [name for name in gone if isinstance(m := now.get(name.rpartition(".")[0]), KINDS) and not isinstance(m, MaskedLayer)]
    if found:
        what = "masked layers were replaced since fxmask.guard: expected theirs in the model, got layers that fxmask.apply has not seen, which are dense."
        fix = "call remove() on the guard's handle, fxmask.apply(model, ..., include=[...]) for the new layers, then fxmask.guard again."
        warn(message(what, first_of(found), fix))
