"""What N:M masks are besides weights and logits, for `fxmask.state_dict`: frozen and permuted masks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels.errors import StateError, message
from ..passes.finding.weights import peek_weight
from ..passes.settings.nm_mask import NMMask
from ..passes.settings.options import agreed
from ..passes.state.tensors import has_values
from .nm_attributes import LOGITS, MASK, ORDER, is_order, write_tau
from .nm_layers import NMLayer, nm_layers

KEYS = {"settings", "frozen", "mask", "permutation"}


def nm_state(model: nn.Module) -> dict[str, dict[str, Any]]:
    """{name of the layer: settings, whether its mask is frozen, mask, permutation, steps of a temperature where there are such}; tensors and plain values."""

    def saved(m: NMLayer, name: str) -> Tensor | None:
        t: Tensor | None = getattr(m, name)
        if t is None:
            return None
        return t.detach().to("meta") if m._fxmask_nm_lost else t.detach().clone()  # what was lost is saved without values, and no load takes it

    return {
        name: {
            "settings": agreed(m._fxmask_nm),
            "frozen": m._fxmask_nm_frozen,
            "mask": saved(m, MASK),
            "permutation": saved(m, ORDER),
            **({} if m._fxmask_nm.tau_from is None else {"step": m._fxmask_nm_step, "counted": m._fxmask_nm_counted}),
        }
        for name, m in nm_layers(model)
    }


def _order_fits(m: NMLayer, order: object) -> bool:
    if m._fxmask_nm.mode != "permuted" and not m._fxmask_nm.permute:
        return order is None
    weight = peek_weight(m)
    return isinstance(order, Tensor) and has_values(order) and is_order(order, weight.numel() // len(weight))


@torch.inference_mode(False)
@torch.no_grad()
def load_nm_state(model: nn.Module, saved: Any) -> None:
    """Take up what `nm_state` has saved, for the same layers and settings; raises StateError before anything has changed."""
    ours, fix = dict(nm_layers(model)), "apply fxmask as in the run that saved it, and load a state as fxmask.state_dict returned it."
    if not isinstance(saved, Mapping) or set(saved) != set(ours):
        got = sorted(map(str, saved))[:5] if isinstance(saved, Mapping) else repr(saved)
        raise StateError(message(f"the state is of other N:M masks: expected {sorted(ours)[:5]}, got {got}.", type(model).__name__, fix))
    defaults = agreed(NMMask())
    for name, m in ours.items():
        entry: Mapping[str, Any] = saved[name] if isinstance(saved[name], Mapping) else {}
        shape, config, settings = tuple(peek_weight(m).shape), agreed(m._fxmask_nm), entry.get("settings")
        if isinstance(settings, Mapping) and {**defaults, **settings} != config:  # a setting that it does not name is a newer one
            raise StateError(message(f"the state was saved with other settings: expected {config}, got {settings}.", name, fix))
        keys = KEYS | ({"step", "counted"} if m._fxmask_nm.tau_from is not None else set())
        step, flags = entry.get("step", 0), (entry.get("frozen"), entry.get("counted", True))
        if not isinstance(settings, Mapping) or set(entry) != keys or {*map(type, flags)} != {bool} or type(step) is not int or step < 0:
            raise StateError(message("the state of this N:M mask was changed since it was saved.", name, fix))
        wanted, mask = entry["frozen"] or m._fxmask_nm.mode == "permuted", entry["mask"]
        fits = isinstance(mask, Tensor) and has_values(mask) and mask.dtype == torch.bool and tuple(mask.shape) == shape
        if not (fits if wanted else mask is None):
            raise StateError(message(f"the saved mask does not fit: expected {f'bool {shape}, with values' if wanted else None}.", name, fix))
        if not _order_fits(m, entry["permutation"]):
            raise StateError(message("the saved permutation does not fit: expected one of the weight's columns, where the mask has one.", name, fix))
    for name, m in ours.items():
        entry, device = saved[name], peek_weight(m).device
        for key, leaf in (("mask", MASK), ("permutation", ORDER)):
            setattr(m, leaf, None if entry[key] is None else entry[key].to(device).clone())
        m._fxmask_nm_frozen, m._fxmask_nm_own, m._fxmask_nm_rebuilt = entry["frozen"], False, False
        m._fxmask_nm_lost = device.type == "meta" and (m.nm_mask is not None or m.nm_permutation is not None)  # there they have no values
        m._fxmask_nm_step, m._fxmask_nm_counted = entry.get("step", 0), entry.get("counted", False)
        write_tau(m)
        logits = m._parameters.get(LOGITS)
        if logits is not None:
            logits.requires_grad_(not m._fxmask_nm_frozen)
