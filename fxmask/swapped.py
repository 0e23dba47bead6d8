"""Another forward for a layer by class swap: the classes that it gets, each made once for a base class, so that subclasses and parametrised Linears keep what
they add; how such a layer is copied and pickled, and what a class that somebody changed since means.
"""

from __future__ import annotations

import inspect
import weakref
from functools import wraps
from typing import Any

from torch import nn

from .kernels.errors import UnsupportedError, message
from .passes.finding.readers import forward_codes
from .passes.settings.options import Options
from .passes.state import noted
from .passes.state.pruning_schedule import copied
from .passes.state.scripting import refuse_scripting, refuse_symbolic
from .passes.state.site import Site
from .reading import FORWARDS


class Swapped(nn.Module):
    """Base of the mixins that give a layer another forward: how it is copied and pickled."""

    _fxmask_prefix: str = "Masked"  # of the mixin: how names of the classes begin that it is mixed into
    _fxmask_reads: bool = False  # of the mixin: the base's forward reads weights
    _fxmask_base: type[nn.Module]  # of the class: what it was before
    _fxmask_mixin: type[nn.Module]  # what of ours is mixed in
    _fxmask_class: type[nn.Module]  # the class that `masked_class` made
    _fxmask_asked: int = 0  # a number of what was asked for, see `note_asked`
    __prepare_scriptable__ = refuse_scripting

    def __reduce_ex__(self, protocol: Any) -> Any:
        if not is_own_class(self):
            return super().__reduce_ex__(protocol)
        attributes = self.__getstate__() if isinstance(self, Site) else {k: v for k, v in self.__dict__.items() if k != "_compiled_call_impl"}
        return _rebuild_class, (self._fxmask_base, self._fxmask_mixin), copied(attributes)


_kept: dict[tuple[type, type], type] = {}  # the compiler's guards know a class, so it stays the same,
_made: weakref.WeakValueDictionary[tuple[type, type], type] = weakref.WeakValueDictionary()  # but for those of functions, which go with what they close over


def _masked_class(base: Any, mixin: Any) -> Any:
    made, key = _made if "<locals>" in base.__qualname__ else _kept, (base, mixin)
    return made.get(key) or made.setdefault(key, _make_class(base, mixin))


def _make_class(base: Any, mixin: Any) -> Any:
    @wraps(base.forward)  # its signature, by which exporters and trainers name arguments
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return mixin.forward(self, *args, **kwargs)

    own = {"forward": forward} if mixin.forward.__code__.co_flags & inspect.CO_VARARGS else {}
    cls: Any = type(f"{mixin._fxmask_prefix}{base.__name__}", (mixin, base), {"_fxmask_base": base, "_fxmask_mixin": mixin, "__module__": __name__, **own})
    cls._fxmask_class = cls  # a class that others derive from this one inherits it, and so is told apart
    if mixin._fxmask_reads:
        FORWARDS.update(forward_codes(base))
    return cls


def masked_class(base: type[nn.Module], mixin: type[nn.Module]) -> type[nn.Module]:
    """The masked subclass of a class, made once; of one that a parametrisation has made, the parametrised subclass of the masked one.

    So PyTorch's remove_parametrizations finds the property where it looks for it, in the layer's class, and leaves the masked layer that is below.
    """
    below: Any = base.__bases__[0]
    if base.__name__ != f"Parametrized{below.__name__}" or "__getstate__" not in base.__dict__:
        return _masked_class(base, mixin)
    inner: Any = _masked_class(below, mixin)
    made = {name: value for name, value in base.__dict__.items() if isinstance(value, property)}
    cls: Any = type(f"{inner.__name__.removesuffix(below.__name__)}{base.__name__}", (inner,), {"_fxmask_base": base, "__module__": __name__, **made})
    cls._fxmask_class = cls
    return cls


def is_own_class(m: Any) -> bool:
    """Whether nobody has changed the class since `swap`, as parametrisations and fully_shard do."""
    return type(m) is m._fxmask_class


def refuse_changed_class(name: str, m: Any) -> None:
    """UnsupportedError for `fxmask.restore` where somebody has."""
    if not is_own_class(m):
        what = f"the class of {name or 'the model'} was changed after fxmask.apply (to {type(m).__name__}): expected the masked class."
        raise UnsupportedError(message(what, name, "undo that change (remove the parametrisation, gather the shards) before fxmask.restore."))


def _rebuild_class(base: type[nn.Module], mixin: type[nn.Module]) -> nn.Module:
    cls = masked_class(base, mixin)
    return cls.__new__(cls)


def of_now(m: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The forward that a module has by now, for one of ours that was bound before `fxmask.restore`, as wrappers of forwards keep it (Accelerate's hooks)."""
    return type(m).forward(m, *args, **kwargs)


def begin(m: Swapped, input: object, layer: str, config: str) -> None:
    """Of a forward whose input is pruned or dropped: note that it runs, and look at what the compiler is to compare. UnsupportedError where a symbolic trace
    runs it, and would freeze that."""
    noted.note(m)
    look_at_asked(m)
    refuse_symbolic(m, input, layer, config)


def note_asked(m: nn.Module, config: Options) -> None:
    """Let a layer hold a number of what was asked for, of all of it where that is more than one configuration."""
    m.__dict__["_fxmask_asked"] = m.__dict__.get("_fxmask_asked", 0) ^ config.kind


def forget_asked(m: nn.Module) -> None:
    m.__dict__.pop("_fxmask_asked", None)


def look_at_asked(m: Swapped) -> None:
    """Look at that number, because the compiler compares what is looked at; see `Options.kind`. No assertion, which `python -O` would leave out."""
    if m._fxmask_asked < 0:
        raise AssertionError
