"""Writes of an owner's forward into a weight that it reads: W∘M takes them, and the Parameter would never see them.

What the source of the forward says is known beforehand (`passes.finding.said`). Writes inside functions that are given the weight are looked for here, by the
version of what was read, in each layer's first eager forward that ends, and not after it: a write that this one does not make, as under `if self.training` in
eval(), is not seen.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from .kernels.errors import UnsupportedError, message
from .passes.finding.candidate import base_of

if TYPE_CHECKING:
    from .swap import ReadWeight

MOST = 64  # the last reads kept for a layer: a generator may read for ever, and a forward that fails never clears its own
_read: weakref.WeakKeyDictionary[ReadWeight, deque[tuple[Tensor, int]]] = weakref.WeakKeyDictionary()
_clean: weakref.WeakSet[ReadWeight] = weakref.WeakSet()


def look_at(m: ReadWeight, weight: Tensor) -> Tensor:
    """The W∘M that a read gives, which is looked at again when the forward has ended."""
    if torch.compiler.is_dynamo_compiling() or m in _clean or weight.is_inference() or torch._C._functorch.is_functorch_wrapped_tensor(weight):
        return weight
    _read.setdefault(m, deque(maxlen=MOST)).append((_counter(weight), weight._version))
    return weight


def _counter(weight: Tensor) -> Tensor:
    """What counts the writes into a tensor and holds neither its memory nor its graph, which would outlive a forward that fails: an alias, then emptied."""
    if type(weight) is not Tensor or torch._C._len_torch_dispatch_stack():  # a mode that traces would record it
        return weight
    alias = weight.detach()
    alias.data = weight.new_empty(0)  # another memory under the same count
    return alias


def refuse_lost_writes(layers: Sequence[ReadWeight], owner: nn.Module) -> None:
    """UnsupportedError where an eager forward that has ended wrote into what it read."""
    for m in () if torch.compiler.is_dynamo_compiling() else layers:
        held = None if m._fxmask_owned else _read.pop(m, None)
        if held is None:
            continue
        if any(weight._version != version for weight, version in list(held)):  # a thread may still add to it
            name = base_of(owner).__name__
            what = f"the forward of {name} writes into the weight of this layer, which it reads as W∘M: the Parameter would not see the write."
            fix = "write in that forward itself, as in self.layer.weight.mul_(...), where fxmask.apply sees it, and call the layer there; or exclude the layer."
            raise UnsupportedError(message(what, m._fxmask_name, fix))
        _clean.add(m)
