"""`fxmask.apply(model, NMMask(...))`: which layers it takes, and the rows of `explain` for them and for those that stay dense."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from ..compiler.backend_watch import forget
from ..decided import mark_decided
from ..dense_warnings import warn_of_holders, warn_of_regions
from ..explaining.layer_rows import LOST, RESIZED, TAKEN, ratios
from ..inputs import mask_overrides
from ..kernels.errors import ConfigError, StateError, UnsupportedError, message, warn
from ..passes.finding.candidate import Candidate
from ..passes.finding.choose import Decision, choose, reasons_of
from ..passes.finding.graph_linears import graph_modules
from ..passes.finding.nm_find import find_nm
from ..passes.finding.patterns import Patterns, matches
from ..passes.finding.weights import peek_weight
from ..passes.settings.config import WeightMask
from ..passes.settings.nm_mask import NMMask
from ..passes.state.tensors import has_values, is_taken
from ..sites import FINAL, REASONS, values_of
from .nm_attributes import is_resized
from .nm_layers import NMLayer, element_mask, nm_layers, rebuild_nm, swap_nm, unswap_nm
from .unlearned import expect_learning

FROZEN_LOST = "; its mask was lost on the meta device, and its forward raises until fxmask.load_state_dict brings it"

M = TypeVar("M", bound=nn.Module)
Chosen = list[tuple[Decision, NMMask]]


def apply_nm(
    model: M, config: NMMask, include: Patterns, exclude: Patterns, overrides: Mapping[Any, Any] | None, kinds: tuple[type[nn.Module], ...]
) -> M:
    """`apply` of an NMMask; the model is as it was where it raises."""
    for name, gm in graph_modules(model):
        what = "an N:M mask in a traced graph: expected nn.Linear and nn.Conv2d modules."
        raise UnsupportedError(message(what, name or type(gm).__name__, "call fxmask.apply on the nn.Module instead of its trace; torch.compile that."))
    decisions = choose(find_nm(model, kinds), WeightMask(), include, exclude, mask_overrides(overrides, config, True), model)
    chosen = _selected(decisions, config, overrides)
    _check(chosen)
    warn_of_holders(model, [d for d, _ in chosen], decisions)
    warn_of_regions(model, [d for d, _ in chosen])
    try:
        for d, c in chosen:
            assert d.candidate.module is not None  # no graph is left
            swap_nm(d.candidate.module, c)
            d.candidate.module.__dict__["_fxmask_nm_name"] = d.candidate.name or "the model itself"
    except BaseException:
        unswap_nm(model)
        raise
    if not chosen:
        warn(f"fxmask.apply masked nothing: {reasons_of(decisions, 'it has no Linear and no Conv2d')}.")
    model.__dict__.pop(FINAL, None)
    for d, c in chosen:
        if c.mode == "learned":
            expect_learning(d.candidate.module)  # type: ignore[arg-type]
    taken = {id(d) for d, _ in chosen}
    model.__dict__[REASONS] = {d.candidate.name: d.reason for d in decisions if id(d) not in taken}
    mark_decided(decisions)
    forget(model, (d.candidate.weight for d in decisions))
    return model


def refuse_nm(model: nn.Module) -> None:
    """StateError for a model that has N:M masks already."""
    for name, _ in nm_layers(model):
        what = "this model has N:M masks already: expected a dense one."
        raise StateError(message(what, name or type(model).__name__, "call fxmask.restore(model) first; N:M masks do not go with other methods."))


def _selected(decisions: list[Decision], config: NMMask, overrides: Mapping[Any, Any] | None) -> Chosen:
    """The layers that can be masked, with their options; the reason of the others. Overrides are checked whatever they match, and the last match wins."""
    changed = [(p, config.replace(dict(c), f"overrides[{p!r}]")) for p, c in (overrides or {}).items() if isinstance(c, Mapping)]
    chosen = []
    for d in decisions:
        if d.config is None:
            continue
        if d.config.read == "weight":
            d.reason = "its owner reads its weight and never calls it"
            continue
        c = next((other for pattern, other in reversed(changed) if matches(pattern, d.candidate)), config)
        misfit = c.misfit(d.candidate.weight)
        if misfit:
            d.reason = misfit
        else:
            chosen.append((d, c))
    return chosen


def _check(chosen: Chosen) -> None:
    """Errors before anything is changed: weights without values, and shared ones under two masks."""
    seen: dict[int, tuple[Candidate, NMMask]] = {}
    for d, c in chosen:
        name = d.candidate.name or "the model itself"
        if d.candidate.weight.is_meta and c.mode in ("permuted", "learned"):
            what = f"mode={c.mode!r} needs the weight's values: expected real memory, got a meta tensor."
            raise UnsupportedError(message(what, name, "materialise the model first, or use mode='magnitude'."))
        other, config = seen.setdefault(id(d.candidate.weight), (d.candidate, c))
        if other is not d.candidate and (config != c or c.mode == "learned"):
            what = f"one weight would have two masks: {other.name!r} and {name!r} share it."
            raise ConfigError(message(what, name, "give both the same options, and no learned mask; or exclude one of them."))


def refresh_nm(model: nn.Module) -> bool:
    """Build permuted masks anew; whether the model has N:M masks at all."""
    found = list(nm_layers(model))
    for name, m in found:
        if m._fxmask_nm.mode == "permuted" and not m._fxmask_nm_frozen:
            values_of(name, peek_weight(m), "fxmask.refresh")
    for _, m in found:
        rebuild_nm(m)
        m._fxmask_nm_rebuilt = False
    return bool(found)


def moving_nm(model: nn.Module) -> list[tuple[str, NMLayer]]:
    """Layers whose temperature depends on the step."""
    return [(name, m) for name, m in nm_layers(model) if m._fxmask_nm.tau_from is not None]


@torch.no_grad()
def nm_row(m: NMLayer) -> dict[str, Any]:
    """What `explain` says of a layer with an N:M mask, beyond its name and shape."""
    c, weight = m._fxmask_nm, peek_weight(m)
    ratio, frozen = 1 - c.n / c.m, m._fxmask_nm_frozen
    lost = FROZEN_LOST if frozen else LOST
    unfit = TAKEN if is_taken(weight) else lost if m._fxmask_nm_lost else RESIZED if is_resized(m, weight) else ""
    kept = None if not has_values(weight) or unfit else int(element_mask(m).sum())
    made = ", which a kernel makes in one pass" if c.impl == "triton" and not frozen else ""
    drawn = "; not frozen: train() draws patterns, eval() takes the likeliest" if c.mode == "learned" and not frozen else ""
    return {
        **ratios(kept, weight.numel(), ratio, ratio),
        "reason": f"selected{'; frozen' if frozen else ''}{unfit}",
        "block": f"{c.n}:{c.m}",
        "blocks": weight.numel() // c.m,
        "backward": "sr-ste" if c.mode == "sr-ste" else "masked",
        "ranks_by": c.words().partition(" ")[2],
        "impl": "masked_dense",
        "why": f"a dense product with W∘M{made}{drawn}",
    }
