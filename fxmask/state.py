"""What a masked run is besides its weights: steps, cached masks, counters. Saved as tensors and plain numbers, so that `weights_only=True` loads it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from .kernels.errors import StateError, message
from .kernels.grid import grid_shape
from .nm.nm_layers import any_nm
from .nm.nm_state import load_nm_state, nm_state
from .passes.settings import looks, phase_change, phases
from .passes.settings.config import Schedule, WeightMask
from .passes.settings.feedback import bounds
from .passes.settings.options import agreed
from .passes.state import rebuild, tensors
from .passes.state import site as state
from .passes.state.site import Site
from .passes.state.tensors import has_values
from .passes.stepping.guarded_weight import POLICIES
from .pruning import scheduled_layers
from .pruning_state import check_pruning_state, load_pruning_state, pruning_state
from .sites import any_masked, expect_module, sites_in_force

FORMAT = 1


def state_dict(model: nn.Module) -> dict[str, Any]:
    """The masks' state: {"format": 1, "masks": {parameter's name: {...}}}, for each masked weight its settings, step, step of the last rebuild, whether steps
    are counted, whether a guard counts them and its policy, and where there are such the cached mask (bool [NB, KB]), the flips, the scores that steps have
    added to (float32 [NB, KB]), and how far a feedback has come. With a schedule of pruned inputs also {"pruning": {layer: settings, step, announced,
    guarded}}. With N:M masks also {"nm": {layer: settings, frozen, mask, permutation, and where a temperature moves its step and whether steps are counted}}:
    a frozen or permuted mask is in no other state; logits are in `model.state_dict()`.

    Save it beside `model.state_dict()` and the optimiser's; `torch.load(weights_only=True)` reads it. A copy: later steps do not change it. Its form may change
    as masks train (None becomes a tensor, a phase changes the block), so torch.distributed.checkpoint, which loads into a form that is there, may not load it:
    use torch.save, of one rank, as it is the same on all.
    Raises: StateError without masks, and inside `fxmask.dense`.
    """
    expect_module(model, "fxmask.state_dict")
    nm, pruning = nm_state(model), pruning_state(model)
    found = sites_in_force(model, "fxmask.state_dict") if any_masked(model) or not (nm or pruning) else []
    more = {"nm": nm, "pruning": pruning}
    return {"format": FORMAT, "masks": {name: _one(site) for name, site, _ in found}, **{key: entries for key, entries in more.items() if entries}}


def _one(site: Site) -> dict[str, Any]:
    mask, flips = site._fxmask_mask, site._fxmask_flips
    return {
        "settings": _settings(site._fxmask_given),
        "step": site._fxmask_step,
        "built": site._fxmask_built,
        "announced": site._fxmask_announced,
        "guarded": site._fxmask_guard is not None or site._fxmask_unguarded,
        "policy": site._fxmask_policy,
        "mask": None if mask is None else mask.detach().clone(),
        "flips": None if flips is None else flips.detach().clone(),
        **{key: None if t is None else t.detach().clone() for key, t in _scores(site).items()},
        **looks.saved(site),
    }


def _scores(site: Site) -> dict[str, torch.Tensor | None]:
    return {"score": site._fxmask_score, "growth": site._fxmask_growth}


def _settings(config: WeightMask) -> dict[str, Any]:
    return {**agreed(config), "block": list(config.block), "phases": phases.plain(config.phases)}


def _completed(saved: dict[str, Any]) -> dict[str, Any]:
    """Saved settings, with the defaults of what there was not yet when they were saved."""
    schedule = saved.get("schedule")
    if isinstance(schedule, dict) and "measure" not in schedule:  # a Feedback says all of its own
        saved = {**saved, "schedule": {**dataclasses.asdict(Schedule()), **schedule}}
    return {**_settings(WeightMask()), **saved}


@torch.inference_mode(False)
@torch.no_grad()
def load_state_dict(model: nn.Module, saved: dict[str, Any]) -> None:
    """Take up a saved state: the next step is the one that the saved run would have made.

    Load the weights first: `model.load_state_dict`, then this, then the optimiser's. The model must be masked with the same settings (`impl` may differ).
    Weights that are loaded later build the cached masks anew, but for those of `refresh=0` that were trained with and those that `apply` was given; a warning
    says so where that changes one before its first step, unless others came before it.
    Where a guard was in force, training raises until `fxmask.guard` is called again: hooks cannot be saved.
    Raises: StateError (nothing masked, inside `fxmask.dense`, not such a state, other weights, settings or shapes); then nothing has changed.
    """
    expect_module(model, "fxmask.load_state_dict")
    found = sites_in_force(model, "fxmask.load_state_dict") if any_masked(model) or not (any_nm(model) or scheduled_layers(model)) else []
    entries = _entries(saved)
    missing, unknown = sorted({n for n, _, _ in found} - set(entries)), sorted(set(entries) - {n for n, _, _ in found})
    if missing or unknown:
        what = f"the state is of other weights: expected an entry for each masked weight, got none for {missing[:5]} and unknown ones for {unknown[:5]}."
        fix = "apply fxmask as in the run that saved it; if a wrapper stands in the names (module., _orig_mod.), save and load the plain model."
        raise StateError(message(what, type(model).__name__, fix))
    for name, site, _ in found:
        _check(name, site, entries[name])
    check_pruning_state(model, saved.get("pruning", {}))
    load_nm_state(model, saved.get("nm", {}))
    load_pruning_state(model, saved.get("pruning", {}))
    early: list[str] = []  # whose weights may be still to come
    for name, site, _ in found:
        _load(site, entries[name])
        if entries[name]["mask"] is not None and not site._fxmask_loaded:
            early.append(name)
            site._fxmask_restored = early
        else:
            site._fxmask_restored = None
        site._fxmask_loaded, site._fxmask_brought = False, entries[name]["mask"] is not None
    tensors.sync(*(site for _, site, _ in found))


_KEYS = ("settings", "step", "built", "announced", "guarded", "policy", "mask", "flips")
_NEWER: dict[str, Any] = {"score": None, "growth": None}  # what there was not in the first states


def _entries(saved: Any) -> dict[str, dict[str, Any]]:
    got = type(saved).__name__
    if isinstance(saved, dict):
        got, format = f"keys {sorted(map(str, saved))[:5]}", saved.get("format")
        entries = saved.get("masks")
        if type(format) is int and format != FORMAT:
            got = f"format {format}"
        elif type(format) is int and isinstance(entries, dict):
            odd = sorted(str(n) for n, e in entries.items() if not isinstance(e, dict) or {*_NEWER, *e} - {"feedback"} != {*_NEWER, *_KEYS})
            if not odd:
                return {n: {**_NEWER, **e} for n, e in entries.items()}
            got = f"other entries for {odd[:5]}"
    what = f"fxmask.load_state_dict: expected what fxmask.state_dict returned (format {FORMAT}), got {got}."
    raise StateError(message(what, fix="save fxmask.state_dict(model) beside model.state_dict(), and hand each to its own load_state_dict."))


def _check(name: str, site: Site, entry: dict[str, Any]) -> None:
    ours, theirs = _settings(site._fxmask_given), entry["settings"]
    if not isinstance(theirs, dict):
        raise StateError(message(f"settings: expected a dict, got {theirs!r}.", name, "load a state as fxmask.state_dict returned it."))
    theirs = _completed(theirs)
    differ = [f"{k}: {ours.get(k)!r} here, {theirs.get(k)!r} saved" for k in {**ours, **theirs} if ours.get(k) != theirs.get(k)]
    if differ:
        what = f"the state was saved with other settings: expected the same, got {'; '.join(differ)}."
        fix = "apply fxmask with the saved settings; or load the weights, then go on without the saved masks by fxmask.step(model, n)."
        raise StateError(message(what, name, fix))
    mask, then = entry["mask"], _then(site, entry)
    grid = grid_shape(site._fxmask_shape, then.block)
    if (mask is None) == then.cached or (isinstance(mask, torch.Tensor) and tuple(mask.shape) != grid):
        got = None if mask is None else tuple(mask.shape)
        raise StateError(message(f"the saved mask is of another shape: expected {grid}, got {got}.", name, "load the state of this architecture."))
    for wrong in _wrong_values(site, entry):
        raise StateError(message(f"the state was changed since it was saved: {wrong}.", name, "load a state as fxmask.state_dict returned it."))


def _then(site: Site, entry: dict[str, Any]) -> WeightMask:
    """The configuration of the phase in which an entry was saved."""
    return phases.in_force(site._fxmask_given, entry["step"] if type(entry["step"]) is int else site._fxmask_step)


def _wrong_values(site: Site, entry: dict[str, Any]) -> Iterator[str]:
    """What no run can have saved; for the first error alone."""
    for key in ("step", "built"):
        if type(entry[key]) is not int or entry[key] < 0:
            yield f"{key}: expected an int of at least 0, got {entry[key]!r}"
    if entry["built"] > entry["step"]:
        yield f"built: expected at most step {entry['step']}, got {entry['built']}"
    for key in ("announced", "guarded"):
        if type(entry[key]) is not bool:
            yield f"{key}: expected a bool, got {entry[key]!r}"
    if entry["policy"] is not None and (type(entry["policy"]) is not str or entry["policy"] not in POLICIES[1:]):
        yield f"policy: expected one of {', '.join(POLICIES[1:])} or None, got {entry['policy']!r}"
    mask, flips, c = entry["mask"], entry["flips"], _then(site, entry)
    for key, t, dtype in (("mask", mask, torch.bool), ("flips", flips, torch.int64)):
        wanted = c.cached
        if wanted and (not isinstance(t, torch.Tensor) or t.dtype != dtype or not has_values(t) or (key == "flips" and t.ndim)):
            yield f"{key}: expected a tensor of {dtype} with values, got {f'one of {t.dtype}, {tuple(t.shape)}' if isinstance(t, torch.Tensor) else repr(t)}"
        if not wanted and t is not None:
            yield f"{key}: expected None, because each forward builds the mask, got {type(t).__name__}"
    grid = grid_shape(site._fxmask_shape, c.block)
    for key, wanted in (("score", c.observes or site._fxmask_own is not None), ("growth", c.wants_growth)):
        t = entry[key]
        fits = isinstance(t, torch.Tensor) and t.dtype == torch.float32 and tuple(t.shape) == grid and has_values(t)
        if (t is not None and not (wanted and fits)) or (t is None and key == "score" and wanted):
            yield f"{key}: expected {f'torch.float32 {grid}' if wanted else None}, got {t if t is None else type(t).__name__}"
    if mask is not None:
        kept, (least, most) = int(mask.sum()), bounds(c, entry["built"], mask.numel())
        if kept < min(least, mask.numel()) or (kept > most and c.ties == "lowest"):
            yield f"mask: expected {least}{f' to {most}' if most > least else ''} kept blocks, got {kept}"
    yield from looks.wrong(site, entry.get("feedback"), grid)


def _load(site: Site, entry: dict[str, Any]) -> None:
    guarded = site._fxmask_guard is not None
    site._fxmask_step, site._fxmask_built = entry["step"], entry["built"]
    site._fxmask_announced = entry["announced"] or guarded
    site._fxmask_unguarded, site._fxmask_copied = entry["guarded"] and not guarded, False
    phase_change.follow(site, taken=False)
    looks.load(site, entry.get("feedback"))
    device = site._fxmask_keep.device
    if entry["mask"] is not None:
        mask = entry["mask"].to(device=device).clone()
        rebuild.hold(site, mask, tensors.lists_of(site, mask))
        state.note_weight(site, site._parameters.get("weight"))
        site._fxmask_flips = entry["flips"].to(device=device).clone()
        site._fxmask_lost = False
    for key in _scores(site):
        setattr(site, f"_fxmask_{key}", None if entry[key] is None else entry[key].to(device=device).clone())
    if site._fxmask_own is not None:
        site._fxmask_own = entry["score"].cpu().clone()
