"""Marks of what `apply` has masked or left dense, so that the compiler backend, which sees weights and no modules, leaves it alone.

The mark is on the weight, where a graph meets it, and on the layer, which makes marks of the weights that it is given later. Weak references to weights would
stop torch.utils.swap_tensors.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from .passes.finding.choose import Decision
from .passes.state.weak_sets import alive

_DECIDED = "_fxmask_decided"
_layers: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_times_applied = 0  # without restores, which give a guard nothing new to look for
_times_changed = 0


class _Mark:
    """An attribute of a layer, by which its copies are known, too."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer = weakref.ref(layer)
        _layers.add(layer)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        layer = memo.get(id(self.layer()))  # a copy is there before its attributes are
        return True if layer is None else _Mark(layer)

    def __reduce__(self) -> Any:
        return bool, (True,)  # pickled weights keep their marks, and a dense layer is read without fxmask


def mark_decided(decisions: Iterable[Decision]) -> None:
    """Note that `apply` has decided about these weights."""
    global _times_applied
    _times_applied += 1
    for c in (d.candidate for d in decisions):
        setattr(c.weight, _DECIDED, True)
        if c.module is not None and c.host is None:
            c.module.__dict__[_DECIDED] = _Mark(c.module)


def forget_decided(model: nn.Module) -> None:
    """`apply` has no more to say of this model."""
    for m in model.modules():
        m.__dict__.pop(_DECIDED, None)
    for p in model.parameters():
        p.__dict__.pop(_DECIDED, None)


def mark_again() -> None:
    """Mark the weights that layers have been given since, by a copy or by `load_state_dict(assign=True)`."""
    for weight in decided_weights():
        setattr(weight, _DECIDED, True)


def decided_by_apply(w: Tensor) -> bool:
    """Whether `apply` has masked a weight or left it dense."""
    return hasattr(w, _DECIDED)


def decided_weights() -> list[Tensor]:
    """Those of layers that `apply` has decided about."""
    return [w for m in alive(_layers) if _DECIDED in m.__dict__ and (w := m._parameters.get("weight")) is not None]


def left_by_apply(layer: nn.Module | None) -> bool:
    """Whether `apply` has decided about a layer, so that one without a mask was left dense by it."""
    return layer is not None and _DECIDED in layer.__dict__


def times_applied() -> int:
    """How often `apply` has masked weights in this process: whoever guards some knows without a walk that there can be no others since."""
    return _times_applied


def note_change() -> None:
    """A model is changed, by `apply` or `restore`."""
    global _times_changed
    _times_changed += 1


def times_changed() -> int:
    """How often that was: in a graph, layers that were seen once may have others in their places, and know nothing of it."""
    return _times_changed
