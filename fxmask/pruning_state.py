"""What a schedule of pruned inputs is besides its settings, for `fxmask.state_dict`: its step, and who counts it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from .kernels.errors import StateError, message
from .passes.settings.activation_pruning import ActivationPruning
from .passes.settings.options import agreed
from .passes.state.pruning_schedule import advance, is_announced
from .pruning import scheduled_layers

KEYS = {"settings", "step", "announced", "guarded"}


def pruning_state(model: nn.Module) -> dict[str, dict[str, Any]]:
    """{name of the layer: settings, step, whether steps are counted, whether a guard counts them}, of layers whose ratio depends on the step."""
    return {name: _one(m) for name, m in scheduled_layers(model)}


def _one(m: nn.Module) -> dict[str, Any]:
    d = m.__dict__
    return {
        "settings": agreed(d["_fxmask_pruning_given"]),
        "step": d["_fxmask_pruning_step"],
        "announced": is_announced(m),
        "guarded": d["_fxmask_pruning_guard"] is not None,
    }


def check_pruning_state(model: nn.Module, saved: Any) -> None:
    """StateError unless `saved` is of the same layers and settings."""
    ours, fix = dict(scheduled_layers(model)), "apply fxmask as in the run that saved it, and load a state as fxmask.state_dict returned it."
    if not isinstance(saved, Mapping) or set(saved) != set(ours):
        got = sorted(map(str, saved))[:5] if isinstance(saved, Mapping) else repr(saved)
        raise StateError(message(f"the state is of other schedules of pruned inputs: expected {sorted(ours)[:5]}, got {got}.", type(model).__name__, fix))
    for name, m in ours.items():
        entry, config = saved[name], agreed(m.__dict__["_fxmask_pruning_given"])
        right = isinstance(entry, Mapping) and set(entry) == KEYS and type(entry["step"]) is int and entry["step"] >= 0
        if not right or not isinstance(entry["settings"], Mapping) or type(entry["announced"]) is not bool or type(entry["guarded"]) is not bool:
            raise StateError(message("the state of this schedule of pruned inputs was changed since it was saved.", name, fix))
        if {**agreed(ActivationPruning()), **entry["settings"]} != config:
            raise StateError(message(f"the state was saved with other settings: expected {config}, got {dict(entry['settings'])}.", name, fix))


def load_pruning_state(model: nn.Module, saved: Mapping[str, Any]) -> None:
    """Take up what `check_pruning_state` has passed. Where a guard counted the steps, training raises until there is one again: hooks cannot be saved."""
    for name, m in scheduled_layers(model):
        d, entry = m.__dict__, saved[name]
        d["_fxmask_pruning_step"], d["_fxmask_pruning_resumed"] = entry["step"], True
        if d["_fxmask_pruning_guard"] is not None or (entry["announced"] and not entry["guarded"]):
            advance(m, 0)
        else:
            d["_fxmask_pruning"] = d["_fxmask_pruning_given"]
