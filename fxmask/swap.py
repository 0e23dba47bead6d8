"""Masked forms of layers by class swap: the same object, Parameters, keys and hooks, another forward.

A swapped class is made once for each base class, so that subclasses and parametrised Linears keep what they add. Where the owner of a layer reads `.weight`
and never calls it (nn.MultiheadAttention's out_proj), the owner's class is swapped too: while its forward runs, `.weight` of that layer is W∘M, and at any
other time it is the Parameter, so that initialisers, optimisers and surgery see what they expect.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterable
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Proxy

from .kernels import ops, reference
from .kernels.errors import UnsupportedError, message
from .late_forwards import ended
from .loads import unhook
from .lost_writes import look_at
from .passes.finding.readers import forward_codes
from .passes.finding.weights import peek_weight, raw_weight
from .passes.settings.activation_pruning import ActivationPruning, saves
from .passes.settings.block_dropout import BlockDropout
from .passes.settings.config import WeightMask
from .passes.settings.options import Options
from .passes.state import gpu_site
from .passes.state import site as state
from .passes.state.pruning_schedule import copied, words
from .passes.state.rebuild import Job, after_load, rebuild
from .passes.state.scripting import refuse_scripting
from .passes.state.site import Site
from .passes.state.site_forward import check_input, forward_lists, forward_mask, refuse_tracing
from .reading import FORWARDS, count, is_read

unmasked: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # layers whose masks fxmask itself has taken off


class Swapped(nn.Module):
    """Base of the mixins that give a layer another forward: how it is copied and pickled."""

    _fxmask_base: type[nn.Module]  # of the class: what it was before
    _fxmask_mixin: type[nn.Module]  # what of ours is mixed in
    _fxmask_class: type[nn.Module]  # the class that `masked_class` made
    _fxmask_asked: int = 0  # a number of what was asked for, see `note_asked`
    __prepare_scriptable__ = refuse_scripting

    def __reduce_ex__(self, protocol: Any) -> Any:
        if not is_own_class(self):
            return super().__reduce_ex__(protocol)
        attributes = self.__getstate__() if isinstance(self, Site) else self.__dict__.copy()
        return _rebuild_class, (self._fxmask_base, self._fxmask_mixin), copied(attributes)


class MaskedLayer(Swapped, Site):
    """What masked Linears and Conv2ds share. A mixin of a subclass of the layer's own class, never constructed."""

    def extra_repr(self) -> str:
        c = self._fxmask_config
        inputs = {"activations": self.__dict__.get("_fxmask_pruning"), "dropout": self.__dict__.get("_fxmask_dropping")}
        more = "".join(f", {name}: {words(self) if name == 'activations' else config.words()}" for name, config in inputs.items() if config is not None)
        return f"{super().extra_repr()}, ratio={c.ratio}, block={c.block}, backward={c.backward!r}{more}"


class MaskedLinear(MaskedLayer):
    """Forward of a masked Linear: input (..., K) -> (..., N)."""

    _fxmask_chooses = True

    def forward(self, input: Tensor) -> Tensor:
        if not isinstance(self, MaskedLinear):
            return of_now(self, input)
        c, weight = self._fxmask_config, raw_weight(self)
        if isinstance(input, Proxy):
            refuse_tracing(self)
        dropping: BlockDropout | None = self.__dict__.get("_fxmask_dropping")
        ran(self)
        look_at_asked(self)
        check_input(self, input, weight)
        input = input if dropping is None else dropping.drop(input, self.training)
        mask = forward_mask(self, weight)
        prune: ActivationPruning | None = self.__dict__.get("_fxmask_pruning")
        if prune is not None:
            prune.draw_unused(input, weight, self.training)
        if self._fxmask_softening:
            return (F if prune is None else prune).linear(input, softened(self, weight, mask), self.bias)  # type: ignore[arg-type]
        flag, bias = self._fxmask_dense, self.bias
        if prune is not None and saves(weight):  # under `auto` masked-dense on a GPU: no run has compared it
            lists = forward_lists(self, mask, c.impl)
            return prune.masked_linear(input, weight, bias, mask, c.block, c.backward, flag, c.impl, lists)  # type: ignore[arg-type]
        impl = gpu_site.implementation(self, input, weight, bias)  # type: ignore[arg-type]
        return ops.linear(input, weight, bias, mask, c.block, c.backward, flag, impl, forward_lists(self, mask, impl))  # type: ignore[arg-type]


def of_now(m: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The forward that a module has by now, for one of ours that was bound before `fxmask.restore`, as wrappers of forwards keep it (Accelerate's hooks)."""
    return type(m).forward(m, *args, **kwargs)


def note_asked(m: nn.Module, config: Options) -> None:
    """Let a layer hold a number of what was asked for, of all of it where that is more than one configuration."""
    m.__dict__["_fxmask_asked"] = m.__dict__.get("_fxmask_asked", 0) ^ config.kind


def forget_asked(m: nn.Module) -> None:
    m.__dict__.pop("_fxmask_asked", None)


def look_at_asked(m: Swapped) -> None:
    """Look at that number, because the compiler compares what is looked at; see `Options.kind`. No assertion, which `python -O` would leave out."""
    if m._fxmask_asked < 0:
        raise AssertionError


def ran(m: nn.Module) -> None:
    """Tell the Dropout that rests for a layer that its work is done."""
    pair = m.__dict__.get("_fxmask_pair")
    if pair is not None and not torch.compiler.is_compiling():
        pair.met(m)


def softened(site: Site, weight: Tensor, mask: Tensor) -> Tensor:
    """The weight of a soft mask on its ramp."""
    assert site._fxmask_scale is not None  # of soft masks
    return reference.softened(weight, mask, site._fxmask_config.block, site._fxmask_scale)


class ReadWeight(MaskedLinear):
    """A masked Linear whose owner reads `.weight`; inside the owner's forward the read gives W∘M (N, K), with the gradient of the backward mode."""

    _fxmask_chooses = False  # its owner reads W∘M
    _fxmask_reading: int = 0  # owners whose compiled forward runs, or is being traced
    _fxmask_owners: int = 0  # owners whose eager forward runs, in any thread
    _fxmask_owned: bool = False  # whether there are such; compiled parts of them look at it

    @property
    def weight(self) -> Tensor:
        if not is_read(self):
            there = self._parameters.get("weight", self.__dict__.get("weight"))
            if there is None:
                raise AttributeError(f"{type(self).__name__} has no weight")
            return there
        try:
            c, w = self._fxmask_config, raw_weight(self)
            mask = forward_mask(self, w)
            if self._fxmask_softening:
                return look_at(self, softened(self, w, mask))
            return look_at(self, reference.straight_through(w, mask, c.block, reference.gradient_mask(mask, self._fxmask_dense, c.backward)))
        except AttributeError as e:  # nn.Module would answer an AttributeError with the dense Parameter
            raise RuntimeError(f"reading a masked weight failed: {e}") from e

    @weight.setter
    def weight(self, value: Tensor) -> None:
        """A plain tensor, which nn.Module gives here when the Parameter is gone: old pruning, weight_norm and PEFT put what they compute in its place."""
        self.__dict__["weight"] = value

    @weight.deleter
    def weight(self) -> None:
        if self.__dict__.pop("weight", None) is None:
            raise AttributeError(f"{type(self).__name__} has no weight")

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_fxmask_reading": 0, "_fxmask_owners": 0, "_fxmask_owned": False}  # another thread may run what is copied

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self, ReadWeight):
            return of_now(self, *args, **kwargs)
        if self._fxmask_base.forward is nn.Linear.forward:
            return MaskedLinear.forward(self, *args, **kwargs)
        compiled = torch.compiler.is_dynamo_compiling()  # of this thread, where is_compiling is of all
        try:
            count([self], 1, compiled)  # a forward of its own is its own reader
            found: Any = self._fxmask_base.forward(self, *args, **kwargs)
        finally:
            count([self], -1, compiled)
        return ended(found, [self], self)


class WeightReader(Swapped):
    """Mixin of a module that reads the `.weight` of masked Linears in its forward."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self, WeightReader):
            return of_now(self, *args, **kwargs)
        read = [m for m in self.modules() if isinstance(m, ReadWeight)]
        for m in read:
            if not is_own_class(m):
                what = f"the class of a masked layer was changed after fxmask.apply (to {type(m).__name__}), and its owner would read it dense."
                fix = "change it before fxmask.apply; where fully_shard did, shard the owner and not the layer, which its owner reads without calling it."
                raise UnsupportedError(message(what, m._fxmask_name, fix))
        compiled = torch.compiler.is_dynamo_compiling()
        try:
            count(read, 1, compiled)
            found = super().forward(*args, **kwargs)
        finally:
            count(read, -1, compiled)
        return ended(found, read, self)


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
    prefix = {"PrunedLinear": "Pruned", "PrunedProduct": "Pruned", "DroppedLinear": "Dropped", "NMLayer": "NM"}.get(mixin.__name__, "Masked")
    cls: Any = type(f"{prefix}{base.__name__}", (mixin, base), {"_fxmask_base": base, "_fxmask_mixin": mixin, "__module__": __name__, **own})
    cls._fxmask_class = cls  # a class that others derive from this one inherits it, and so is told apart
    if issubclass(mixin, (ReadWeight, WeightReader)):
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


def _after_load(m: nn.Module, incompatible: object) -> None:
    if isinstance(m, MaskedLayer):
        after_load(m, peek_weight(m))


def swap(
    m: nn.Module, config: WeightMask, name: str, stream_name: str, owners: Iterable[nn.Module], mixin: type[MaskedLayer] = MaskedLinear,
    own: Tensor | None = None,
) -> None:  # fmt: skip
    """Make a layer a masked one by a mixin, in place, and its owners readers where it is read."""
    weight = peek_weight(m)
    m.__class__ = masked_class(type(m), ReadWeight if config.read == "weight" else mixin)
    assert isinstance(m, MaskedLayer)
    state.install(m, config, name, weight, stream_name, own)
    note_asked(m, config)
    if isinstance(m, ReadWeight):
        for owner in owners:
            if owner is not m and not isinstance(owner, WeightReader):
                owner.__class__ = masked_class(type(owner), WeightReader)
    m.register_load_state_dict_post_hook(_after_load)
    rebuild([Job(m, weight, first=True)])


def unswap(m: nn.Module) -> None:
    """Make a masked layer, or a reader of one, what it was, in place; harmless where `swap` failed half-way."""
    if isinstance(m, (MaskedLayer, WeightReader)):
        unmasked.add(m)
        m.__class__ = m._fxmask_base  # type: ignore[assignment]
        state.uninstall(m)
        unhook(m, lambda hook: hook is _after_load)
