"""Whether `load_state_dict` brings a layer's weight: a load of other keys (a head, norms, adapters) leaves masks as they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

MARK = "_fxmask_brings"  # while a load is under way


def note_load(m: nn.Module, owner: nn.Module, given: Mapping[str, Any], prefix: str, leaf: str = "weight") -> None:
    """Before a load: note for `m`, a layer or the mask of one, whether the keys have its weight, or what a parametrisation or a pruning makes it of."""
    names = (f"{prefix}parametrizations.{leaf}.", f"{prefix}{leaf}_")
    m.__dict__[MARK] = f"{prefix}{leaf}" in given or (leaf not in owner._parameters and any(key.startswith(names) for key in given))


def was_loaded(m: nn.Module) -> bool:
    """After it, once."""
    return bool(m.__dict__.pop(MARK, True))
