"""Writes of an owner's forward into a weight that it reads: W∘M takes them, and the Parameter would never see them.

What the source of the forward says is known beforehand (`passes.said`). Writes inside functions that are given the weight are looked for here, by the version
of what was read, in each layer's first eager forward: until that has ended what it read is held, and nothing after it.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from .kernels.errors import UnsupportedError, message

if TYPE_CHECKING:
    from .swap import ReadWeight

MOST = 4  # reads that are held: a generator may read for ever
_read: weakref.WeakKeyDictionary[ReadWeight, list[tuple[Tensor, int]]] = weakref.WeakKeyDictionary()
_clean: weakref.WeakSet[ReadWeight] = weakref.WeakSet()


def look_at(m: ReadWeight, weight: Tensor) -> Tensor:
    """The W∘M that a read gives, which is looked at again when the forward has ended."""
    if torch.compiler.is_dynamo_compiling() or m in _clean or weight.is_inference() or torch._C._functorch.is_functorch_wrapped_tensor(weight):
        return weight
    held = _read.setdefault(m, [])
    if len(held) < MOST:
        held.append((weight, weight._version))
    return weight


def refuse_lost_writes(layers: Sequence[ReadWeight], owner: nn.Module) -> None:
    """UnsupportedError where an eager forward that has ended wrote into what it read."""
    for m in layers:
        held = None if m._fxmask_owned else _read.pop(m, None)
        if held is None:
            continue
        if any(weight._version != version for weight, version in held):
            name = getattr(type(owner), "_fxmask_base", type(owner)).__name__
            what = f"the forward of {name} writes into the weight of this layer, which it reads as W∘M: the Parameter would not see the write."
            fix = "write in that forward itself, as in self.layer.weight.mul_(...), where fxmask.apply sees it, and call the layer there; or exclude the layer."
            raise UnsupportedError(message(what, m._fxmask_name, fix))
        _clean.add(m)
