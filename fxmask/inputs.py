"""Configurations of what layers read, `ActivationPruning` and `BlockDropout`: which layers they select, with overrides, beside a WeightMask or alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from .dense_warnings import warn_of_regions
from .dropping import any_dropped, drop_inputs, dropped_layers, resolved, undrop, warn_of_exports, warn_of_siblings
from .kernels.errors import ConfigError, StateError, UnsupportedError, first_of, message, warn
from .passes.finding.candidate import Candidate
from .passes.finding.choose import Decision, reasons_of
from .passes.finding.patterns import matches
from .passes.finding.products import find_products
from .passes.settings.activation_pruning import ActivationPruning
from .passes.settings.block_dropout import BlockDropout
from .passes.settings.nm_mask import NMMask
from .pruning import any_pruned, prune, pruned_layers, unprune
from .sites import REASONS, any_masked
from .swapped import forget_asked

KEYS: dict[type, str] = {ActivationPruning: "activations", BlockDropout: "dropout"}  # of an override, beside a WeightMask's options
PRUNED_INPUT = "dense; its input is saved pruned"
DROPPED_INPUT = "dense; its input is dropped in blocks"
RESTS = "dense; its input would be saved pruned, but its weight asks for no gradient: nothing is saved"
OWN_FORWARD = "where that is a linear, write it as F.linear(x, self.weight, self.bias), or call an nn.Linear in it"
Config = TypeVar("Config", ActivationPruning, BlockDropout)
Other = ActivationPruning | BlockDropout


def mask_overrides(overrides: Mapping[Any, Any] | None, config: object, alone: bool) -> Mapping[Any, Any] | None:
    """The overrides without what they say of `config`. `alone`: no WeightMask is given, so that all options are of it."""
    if not isinstance(overrides, Mapping):
        return overrides
    key = KEYS.get(type(config), "")
    return {p: c if not isinstance(c, Mapping) else {} if alone else {k: v for k, v in c.items() if k != key} for p, c in overrides.items()}


def has_input(d: Decision) -> bool:
    """Whether anybody calls the layer, a Linear: not where its owner reads its weight instead, or its own forward does."""
    c = d.candidate
    if nn.Conv2d in c.types:
        return False
    return c.module is None or not (isinstance(c.module, NonDynamicallyQuantizableLinear) or c.reads_itself)


def selected(
    decisions: list[Decision], config: Config, overrides: Mapping[Any, Any] | None, alone: bool, lifted: bool = False
) -> list[tuple[Decision, Config]]:
    """Which layers a config of inputs has, and with which options. Raises before anything is changed. `lifted`: of a Dynamo graph."""
    found, changes = [], _changes(config, overrides, alone)
    for d in decisions:
        if d.config is None or not has_input(d):
            continue
        c: Config | None = config
        for pattern, change in changes.items():
            if matches(pattern, d.candidate):
                c = change
        if c is None:
            continue
        if isinstance(c, ActivationPruning) and isinstance(config, ActivationPruning) and c.affine != config.affine:
            what = "affine says what is looked for, and not how a layer is pruned: expected it in ActivationPruning(...) alone, got it in overrides."
            raise ConfigError(message(what, d.candidate.name, "overrides={pattern: False} leaves single products out."))
        if isinstance(c, ActivationPruning) and d.candidate.product:
            c = dataclasses.replace(c, impl="auto")  # which is of dW, and here is none
        if isinstance(c, BlockDropout) and c.mc and d.config.read == "weight":
            what = "mc=True drops in evaluation, and there the owner of this layer may read its weight past it (its fast path)."
            raise UnsupportedError(message(what, d.candidate.name, f"overrides={{{d.candidate.name!r}: False}}, or mc=False."))
        if isinstance(c, BlockDropout) and c.impl in ("cpu", "triton") and not alone:
            what = f"impl={c.impl!r} of BlockDropout beside a WeightMask: its input is dropped in plain PyTorch, and the mask's own impl multiplies."
            raise UnsupportedError(message(what, d.candidate.name, "BlockDropout(..., impl='auto')."))
        if d.candidate.host is not None and not alone and not lifted:
            what = f"a WeightMask and {type(config).__name__} together in a traced graph, whose masked node reads its input itself."
            raise UnsupportedError(message(what, d.candidate.name, "call fxmask.apply on the nn.Module instead of its trace."))
        found.append((d, c))
    return found


def _changes(config: Config, overrides: Mapping[Any, Any] | None, alone: bool) -> dict[Any, Config | None]:
    """What overrides make of a config, None where they say False; checked whatever they match."""
    changes: dict[Any, Config | None] = {}
    for pattern, change in (overrides or {}).items():
        key = KEYS[type(config)]
        own = change if alone else change.get(key) if isinstance(change, Mapping) else change
        if own is None:
            continue
        if own is not False and not isinstance(own, Mapping):
            raise ConfigError(f"overrides[{pattern!r}][{key!r}]: expected a dict of options or False, got {own!r}.")
        changes[pattern] = None if own is False else config.replace(dict(own), f"overrides[{pattern!r}]")
    return changes


def out_of_reach(found: list[Candidate]) -> list[Candidate]:
    """The layers of a model for a config of inputs alone: what a forward of one's own does with its input cannot be changed, and read='weight' is of masks."""
    for c in found:
        if c.reads_itself:
            c.skip = f"{type(c.module).__name__} has its own forward, whose input is out of reach; {OWN_FORWARD}"
    return found


def wanted_products(model: nn.Module, config: object) -> list[Candidate]:
    """The products with parameters that a config looks for; none unless it says `affine`."""
    return find_products(model) if isinstance(config, ActivationPruning) and config.affine else []


def warn_of_products(decisions: list[Decision]) -> None:
    """Say which products stay dense though `affine` asked for them."""
    products = [d for d in decisions if d.candidate.product]
    left = [d for d in products if d.config is None and d.reason == d.candidate.skip]
    if left:
        names = first_of([d.candidate.name for d in left])
        fix = "graphs have them as calls: apply it to a torch.fx.symbolic_trace or torch.export of the model, or torch.compile(model, backend='fxmask')."
        warn(message(f"affine=True leaves products with these parameters dense: {names}: {left[0].reason}.", "", fix))
    if all(d.config is None for d in products) and any(d.config is not None for d in decisions):
        what = f"affine=True prunes no product: expected a selected product with a parameter, got {len(products)}, none of them selected."
        warn(message(what, "", "leave affine out, or include the parameters' names."))


def check_inputs(model: nn.Module, config: object, other: object) -> None:
    """StateError for a model whose inputs are pruned or dropped already, and, where no WeightMask is given in `config`, for one that is masked."""
    there = [any_masked(model), any_pruned(model), any_dropped(model)]
    if not (any(there[1:]) or (config is None and there[0])):
        return
    what, fix = "this model is masked, pruned or dropped already: expected a dense one", "call fxmask.restore(model) first"
    if isinstance(other, NMMask):
        raise StateError(message(f"{what}.", type(model).__name__, f"{fix}; N:M masks do not go with other methods."))
    asked = [config is not None, isinstance(other, ActivationPruning), isinstance(other, BlockDropout)]
    both = [kind for kind, here, new in zip(("WeightMask", "ActivationPruning", "BlockDropout"), there, asked, strict=True) if here or new]
    if len(both) == 2 and both[0] == "WeightMask":
        fix = f"fxmask.restore(model), then fxmask.apply(model, {both[0]}(...), {both[1]}(...))"
    raise StateError(message(f"{what}, or both configs in one call.", type(model).__name__, f"{fix}."))


class Inputs:
    """What a config of inputs would change, chosen before anything is."""

    def __init__(self, model: nn.Module, decisions: list[Decision], config: Other | None, overrides: Mapping[Any, Any] | None, alone: bool) -> None:
        self.pruned = selected(decisions, config, overrides, alone) if isinstance(config, ActivationPruning) else []
        offered = selected(decisions, config, overrides, alone) if isinstance(config, BlockDropout) else []
        self.dropped = resolved(model, offered)
        warn_of_siblings(model, self.dropped)
        warn_of_exports(model, self.dropped)
        self.wanted = {id(d) for d, _ in (*self.pruned, *offered)}
        self.config = config

    def warn_if_none(self) -> None:
        """Beside a WeightMask: say so where no layer has what was asked for."""
        if self.config is not None and not self.pruned and not self.dropped:
            why = "none that is masked is a Linear that somebody calls"
            if isinstance(self.config, BlockDropout) and self.wanted:
                why = "none has an active dropout right before it, and no p was given"
            warn(f"fxmask.apply: {type(self.config).__name__} changes no layer: {why}.")

    def change(self, model: nn.Module, last: Callable[[], None] = lambda: None) -> None:
        """Change what was chosen, then do what comes last; where either fails, change it back. Masks are in place by then."""
        try:
            prune(model, self.pruned)
            drop_inputs(model, self.dropped)
            last()
        except BaseException:
            unprune(model)
            undrop(model)
            for m in [d.candidate.module for d, _ in self.pruned] + [d.candidate.module for d, _, _ in self.dropped]:
                if m is not None:
                    forget_asked(m)
            raise


def saved_pruned(model: nn.Module, decisions: list[Decision]) -> list[Decision]:
    """The decisions, those whose input is saved pruned with that as their reason."""
    done = {name for name, _ in pruned_layers(model)}
    for d in decisions:
        if d.candidate.name in done:
            d.reason = PRUNED_INPUT if d.candidate.parameter(model).requires_grad else RESTS
    return decisions


def only_inputs(model: nn.Module, decisions: list[Decision], inputs: Inputs) -> None:
    """`apply` without a WeightMask."""
    warn_of_regions(model, [d for d in decisions if id(d) in inputs.wanted])
    inputs.change(model)
    model.__dict__.pop(REASONS, None)
    dropped = {name for name, _ in dropped_layers(model)}
    done = bool(dropped)
    for d in saved_pruned(model, decisions):
        if d.candidate.name in dropped:
            d.reason = DROPPED_INPUT
        elif d.reason in (PRUNED_INPUT, RESTS):
            done = True
        elif d.config is not None:
            left = "overrides: False" if id(d) not in inputs.wanted else "no active dropout before it, and no p was given"
            d.reason = left if has_input(d) else "its owner reads its weight and never calls it: it has no input"
    if not done:
        warn(f"fxmask.apply changed nothing: {reasons_of(decisions)}.")
    model.__dict__[REASONS] = {d.candidate.key: d.reason for d in decisions}
