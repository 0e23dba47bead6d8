"""What a masked run is besides its weights: steps, cached masks, counters. Saved as tensors and plain numbers, so that `weights_only=True` loads it."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn

from .kernels.errors import StateError, message
from .passes import rebuild
from .passes import site as state
from .passes.config import WeightMask
from .passes.site import Site
from .sites import required_sites

FORMAT = 1
HOW_RUN = ("impl",)  # settings that another machine may choose differently without changing what is computed


def state_dict(model: nn.Module) -> dict[str, Any]:
    """The masks' state: {"format": 1, "masks": {parameter's name: {...}}}, for each masked weight its settings, step, step of the last rebuild, whether steps
    are counted, the guard's policy, and where they are cached the mask (bool [NB, KB]) and the flips.

    Save it beside `model.state_dict()` and the optimiser's; `torch.load(weights_only=True)` reads it. A copy: later steps do not change it.
    Raises: StateError without masks, and inside `fxmask.dense`.
    """
    found = required_sites(model, "fxmask.state_dict")
    _not_dense(found, "fxmask.state_dict")
    return {"format": FORMAT, "masks": {name: _one(site) for name, site, _ in found}}


def _one(site: Site) -> dict[str, Any]:
    mask, flips = site._fxmask_mask, site._fxmask_flips
    return {
        "settings": _settings(site._fxmask_config),
        "step": site._fxmask_step,
        "built": site._fxmask_built,
        "announced": site._fxmask_announced,
        "policy": site._fxmask_policy,
        "mask": None if mask is None else mask.detach().clone(),
        "flips": None if flips is None else flips.detach().clone(),
    }


def _settings(config: WeightMask) -> dict[str, Any]:
    plain = {k: v for k, v in dataclasses.asdict(config).items() if k not in HOW_RUN}
    return {**plain, "block": list(plain["block"])}


@torch.inference_mode(False)
@torch.no_grad()
def load_state_dict(model: nn.Module, saved: dict[str, Any]) -> None:
    """Take up a saved state: the next step is the one that the saved run would have made.

    Load the weights first: `model.load_state_dict`, then this, then the optimiser's. The model must be masked with the same settings (`impl` may differ).
    Where a guard was in force, training raises until `fxmask.guard` is called again: hooks cannot be saved.
    Raises: StateError (nothing masked, inside `fxmask.dense`, not such a state, other weights, settings or shapes); then nothing has changed.
    """
    found = required_sites(model, "fxmask.load_state_dict")
    _not_dense(found, "fxmask.load_state_dict")
    entries = _entries(saved)
    missing, unknown = sorted({n for n, _, _ in found} - set(entries)), sorted(set(entries) - {n for n, _, _ in found})
    if missing or unknown:
        what = f"the state is of other weights: expected an entry for each masked weight, got none for {missing[:5]} and unknown ones for {unknown[:5]}."
        raise StateError(message(what, type(model).__name__, "apply fxmask as in the run that saved it."))
    for name, site, _ in found:
        _check(name, site, entries[name])
    for name, site, _ in found:
        _load(site, entries[name])
    state.sync(*(site for _, site, _ in found))


def _entries(saved: Any) -> dict[str, dict[str, Any]]:
    keys = set(_KEYS)
    entries = saved.get("masks") if isinstance(saved, dict) and saved.get("format") == FORMAT else None
    if not isinstance(entries, dict) or not all(isinstance(e, dict) and set(e) == keys for e in entries.values()):
        got = f"keys {sorted(map(str, saved))[:5]}" if isinstance(saved, dict) else type(saved).__name__
        raise StateError(f"fxmask.load_state_dict: expected what fxmask.state_dict returned (format {FORMAT}), got {got}.")
    return entries


_KEYS = ("settings", "step", "built", "announced", "policy", "mask", "flips")


def _check(name: str, site: Site, entry: dict[str, Any]) -> None:
    ours, theirs = _settings(site._fxmask_config), entry["settings"]
    differ = [f"{k}: {ours.get(k)!r} here, {theirs.get(k)!r} saved" for k in {**ours, **theirs} if ours.get(k) != theirs.get(k)]
    if differ:
        what = f"the state was saved with other settings: expected the same, got {'; '.join(differ)}."
        raise StateError(message(what, name, "apply fxmask with the saved settings, or go on without the saved masks by fxmask.step(model, n)."))
    mask = entry["mask"]
    if (mask is None) != (site._fxmask_mask is None) or (mask is not None and tuple(mask.shape) != site._fxmask_grid):
        got = None if mask is None else tuple(mask.shape)
        raise StateError(message(f"the saved mask is of another shape: expected {site._fxmask_grid}, got {got}.", name, "load the state of this architecture."))


def _load(site: Site, entry: dict[str, Any]) -> None:
    site._fxmask_step, site._fxmask_built = int(entry["step"]), int(entry["built"])
    site._fxmask_announced = bool(entry["announced"])
    site._fxmask_unguarded = entry["policy"] is not None and site._fxmask_policy is None
    device = site._fxmask_keep.device
    if entry["mask"] is not None:
        mask = entry["mask"].to(device=device, dtype=torch.bool).clone()
        rebuild.hold(site, mask, state.lists_of(site, mask))
        site._fxmask_flips = entry["flips"].to(device=device).clone()
        site._fxmask_lost = False


def _not_dense(found: list[tuple[str, Site, Any]], caller: str) -> None:
    for name, site, _ in found:
        if site._fxmask_is_dense:
            raise StateError(message(f"{caller} inside fxmask.dense: expected masks in force.", name, "leave the with block first."))
