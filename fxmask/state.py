"""What a masked run is besides its weights: steps, cached masks, counters. Saved as tensors and plain numbers, so that `weights_only=True` loads it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from .kernels.errors import StateError, message
from .nm.nm_layers import any_nm, nm_layers
from .nm.nm_state import load_nm_state, nm_state
from .passes.settings import looks, phase_change
from .passes.state import rebuild, tensors
from .passes.state.site import Site, note_weight
from .pruning import scheduled_layers
from .pruning_state import check_pruning_state, load_pruning_state, pruning_state
from .sites import expect_module, sites_in_force
from .state_checks import FORMAT, check_entry, entries_of, settings_of


def state_dict(model: nn.Module) -> dict[str, Any]:
    """The masks' state: {"format": 1, "masks": {parameter's name: {...}}}, for each masked weight its settings, shape as a matrix, step, step of the last
    rebuild, whether steps are counted, whether a guard counts them and its policy, and where there are such the cached mask (bool [NB, KB]), the flips, the
    scores that steps have added to (float32 [NB, KB]), and how far a feedback has come. With a schedule of pruned inputs also {"pruning": {layer: settings,
    step, announced, guarded}}. With N:M masks also {"nm": {layer: settings, frozen, mask, permutation, and where a temperature moves its step and whether
    steps are counted}}: a frozen or permuted mask is in no other state; logits are in `model.state_dict()`.

    Save it beside `model.state_dict()` and the optimiser's; `torch.load(weights_only=True)` reads it. A copy: later steps do not change it. Its form may change
    as masks train (None becomes a tensor, a phase changes the block), so torch.distributed.checkpoint, which loads into a form that is there, may not load it:
    use torch.save, of one rank, as it is the same on all.
    Raises: StateError without masks, and inside `fxmask.dense`.
    """
    expect_module(model, "fxmask.state_dict")
    nm, pruning = nm_state(model), pruning_state(model)
    found = sites_in_force(model, "fxmask.state_dict", nm or pruning)
    more = {"nm": nm, "pruning": pruning}
    return {"format": FORMAT, "masks": {name: _one(site) for name, site, _ in found}, **{key: entries for key, entries in more.items() if entries}}


def _one(site: Site) -> dict[str, Any]:
    mask, flips = site._fxmask_mask, site._fxmask_flips
    return {
        "settings": settings_of(site._fxmask_given),
        "shape": list(site._fxmask_shape),
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


@torch.inference_mode(False)
@torch.no_grad()
def load_state_dict(model: nn.Module, saved: dict[str, Any]) -> None:
    """Take up a saved state: the next step is the one that the saved run would have made.

    Load the weights first: `model.load_state_dict`, then this, then the optimiser's. The model must be masked with the same settings (`impl` may differ). What
    torch.compile and checkpoint_wrapper put into names does not count.
    Weights that are loaded later build the cached masks anew, but for those of `refresh=0` that were trained with and those that `apply` was given; a warning
    says so where that changes one before its first step, unless others came before it.
    Where a guard was in force, training raises until `fxmask.guard` is called again: hooks cannot be saved.
    Raises: StateError (nothing masked, inside `fxmask.dense`, not such a state, other weights, settings or shapes); then nothing has changed.
    """
    expect_module(model, "fxmask.load_state_dict")
    found = sites_in_force(model, "fxmask.load_state_dict", any_nm(model) or scheduled_layers(model))
    entries = _named_as_here(entries_of(saved), found)
    nm, pruning = _named_as_here(saved.get("nm", {}), nm_layers(model)), _named_as_here(saved.get("pruning", {}), scheduled_layers(model))
    missing, unknown = sorted({n for n, _, _ in found} - set(entries)), sorted(set(entries) - {n for n, _, _ in found})
    if missing or unknown:
        what = f"the state is of other weights: expected an entry for each masked weight, got none for {missing[:5]} and unknown ones for {unknown[:5]}."
        fix = "apply fxmask as in the run that saved it; if a wrapper stands in the names (module.), save and load the plain model."
        raise StateError(message(what, type(model).__name__, fix))
    for name, site, _ in found:
        check_entry(name, site, entries[name])
    check_pruning_state(model, pruning)
    load_nm_state(model, nm)
    load_pruning_state(model, pruning)
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


def _named_as_here(entries: Any, found: Iterable[tuple[Any, ...]]) -> Any:
    """Saved entries under the names that this model has for them: torch.compile and checkpoint_wrapper put more into the names of what is inside of a model,
    which its state_dict or torch.distributed.checkpoint's leaves out, and who evaluates a run may have neither."""
    if not isinstance(entries, Mapping):
        return entries
    here = {_unwrapped(name): name for name, *_ in found}
    renamed = {here.get(_unwrapped(name), name): entry for name, entry in entries.items()}
    return renamed if len(renamed) == len(entries) else entries


def _unwrapped(name: Any) -> Any:
    return ".".join(part for part in name.split(".") if part not in ("_orig_mod", "_checkpoint_wrapped_module")) if isinstance(name, str) else name


def _load(site: Site, entry: dict[str, Any]) -> None:
    guarded = site._fxmask_guard is not None
    site._fxmask_step, site._fxmask_built = entry["step"], entry["built"]
    site._fxmask_announced = entry["announced"] or guarded
    site._fxmask_unguarded, site._fxmask_copied, site._fxmask_resumed = entry["guarded"] and not guarded, False, True
    phase_change.follow(site, taken=False)
    looks.load(site, entry.get("feedback"))
    note_weight(site, site._parameters.get("weight"))
    device = site._fxmask_keep.device
    if entry["mask"] is not None:
        mask = entry["mask"].to(device=device).clone()
        rebuild.hold(site, mask, tensors.lists_of(site, mask))
        site._fxmask_flips = entry["flips"].to(device=device).clone()
        site._fxmask_lost = False
    for key in _scores(site):
        setattr(site, f"_fxmask_{key}", None if entry[key] is None else entry[key].to(device=device).clone())
    if site._fxmask_own is not None:
        site._fxmask_own = entry["score"].cpu().clone()
