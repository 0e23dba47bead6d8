"""What a saved state must be before it is taken up: of this format, of the same settings and shapes, with values that a run can have saved."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from .kernels.errors import StateError, message
from .kernels.grid import grid_shape
from .passes.settings import looks, phases
from .passes.settings.config import Schedule, WeightMask
from .passes.settings.feedback import bounds
from .passes.settings.options import agreed
from .passes.state.site import Site
from .passes.state.tensors import has_values
from .passes.stepping.guarded_weight import POLICIES

FORMAT = 1
_KEYS = ("settings", "step", "built", "announced", "guarded", "policy", "mask", "flips")
_NEWER: dict[str, Any] = {"shape": None, "score": None, "growth": None}  # what there was not in the first states


def settings_of(config: WeightMask) -> dict[str, Any]:
    """A configuration as states hold it: plain values."""
    return {**agreed(config), "block": list(config.block), "phases": phases.plain(config.phases)}


def _completed(saved: dict[str, Any]) -> dict[str, Any]:
    """Saved settings, with the defaults of what there was not yet when they were saved."""
    schedule = saved.get("schedule")
    if isinstance(schedule, dict) and "measure" not in schedule:  # a Feedback says all of its own
        saved = {**saved, "schedule": {**dataclasses.asdict(Schedule()), **schedule}}
    return {**settings_of(WeightMask()), **saved}


def entries_of(saved: Any) -> dict[str, dict[str, Any]]:
    """The entries of a saved state by the weights' names; StateError for what is none."""
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


def check_entry(name: str, site: Site, entry: dict[str, Any]) -> None:
    """StateError for the entry of a weight that is masked otherwise, or one that no run has saved."""
    ours, theirs = settings_of(site._fxmask_given), entry["settings"]
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
    if then.cached and (mask is None or (isinstance(mask, torch.Tensor) and tuple(mask.shape) != grid)):
        got = None if mask is None else tuple(mask.shape)
        raise StateError(message(f"the saved mask is of another shape: expected {grid}, got {got}.", name, "load the state of this architecture."))
    shape = site._fxmask_shape
    if entry["shape"] not in (None, list(shape), shape):
        what = f"the state is of a weight of another shape: expected {list(shape)}, got {entry['shape']!r}."
        raise StateError(message(what, name, "load the state of this architecture."))
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
        if c.cached and (not isinstance(t, torch.Tensor) or t.dtype != dtype or not has_values(t) or (key == "flips" and t.ndim)):
            yield f"{key}: expected a tensor of {dtype} with values, got {f'one of {t.dtype}, {tuple(t.shape)}' if isinstance(t, torch.Tensor) else repr(t)}"
        if not c.cached and t is not None:
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
