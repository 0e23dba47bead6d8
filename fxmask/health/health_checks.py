"""Whether a state is one that a `HealthLog` has saved."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..passes.state.tensors import has_values


def fits(saved: Any, grids: dict[str, set[tuple[int, int]]]) -> bool:
    """Whether it is what `state_dict` returns of these weights, each of one of these numbers of blocks."""
    if not isinstance(saved, dict) or set(saved) != {"updates", "last", "activity"} or not all(isinstance(saved[k], dict) for k in ("last", "activity")):
        return False
    last, activity = saved["last"], saved["activity"]
    known = _counts(saved["updates"]) and set(last) == set(activity) <= set(grids)
    return known and all(isinstance(e, dict) and _entry_fits(e, activity[name], grids[name]) for name, e in last.items())


def _entry_fits(e: dict[str, Any], activity: Any, grids: set[tuple[int, int]]) -> bool:
    block, tensors = e.get("block", (1, 1)), (e.get("mask"), e.get("age"), activity)  # one of earlier logs names no block
    if not isinstance(block, (list, tuple)) or len(block) != 2 or not _counts(e.get("flips"), e.get("quiet"), e.get("since", 1), *block):
        return False
    held = [(t.dtype, t.layout, tuple(t.shape)) for t in tensors if isinstance(t, Tensor) and has_values(t)]
    return any(held == [(kind, torch.strided, grid) for kind in (torch.bool, torch.int64, torch.int64)] for grid in grids)


def _counts(*numbers: Any) -> bool:
    return all(type(n) is int and n >= 0 for n in numbers)
