"""Masked forms of layers by class swap: the same object, Parameters, keys and hooks, another forward. The classes are made in `swapped`.

Where the owner of a layer reads `.weight` and never calls it (nn.MultiheadAttention's out_proj), the owner's class is swapped too: while its forward runs,
`.weight` of that layer is W∘M, and at any other time it is the Parameter, so that initialisers, optimisers and surgery see what they expect.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
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
from .passes.finding.weights import lacks_weight, peek_weight, raw_weight, refuse_missing
from .passes.settings.activation_pruning import ActivationPruning, saves
from .passes.settings.block_dropout import BlockDropout
from .passes.settings.config import WeightMask
from .passes.state import gpu_site
from .passes.state import site as state
from .passes.state.loaded import after_load
from .passes.state.pruning_schedule import words
from .passes.state.rebuild import Job, rebuild
from .passes.state.site import Site
from .passes.state.site_forward import check_input, forward_lists, forward_mask, refuse_tracing
from .reading import count, is_read
from .swapped import Swapped, is_own_class, look_at_asked, masked_class, note_asked, of_now

unmasked: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # layers whose masks fxmask itself has taken off


class MaskedLayer(Swapped, Site):
    """What masked Linears and Conv2ds share. A mixin of a subclass of the layer's own class, never constructed."""

    def extra_repr(self) -> str:
        c, dropping = self._fxmask_config, self.__dict__.get("_fxmask_dropping")
        more = f", activations: {words(self)}" if "_fxmask_pruning" in self.__dict__ else ""
        more += f", dropout: {dropping.words()}" if dropping is not None else ""
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
    _fxmask_reads = True
    _fxmask_reading: int = 0  # owners whose compiled forward runs, or is being traced
    _fxmask_owners: int = 0  # owners whose eager forward runs, in any thread
    _fxmask_owned: bool = False  # whether there are such; compiled parts of them look at it

    @property
    def weight(self) -> Tensor:
        there = self._parameters.get("weight", self.__dict__.get("weight"))
        if not is_read(self):
            if there is None:
                raise AttributeError(f"{type(self).__name__} has no weight")
            return there
        if there is None:
            refuse_missing(self)
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

    _fxmask_reads = True

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


def _after_load(m: nn.Module, incompatible: object) -> None:
    if isinstance(m, MaskedLayer) and not lacks_weight(m):
        after_load(m, peek_weight(m))


def swap(
    m: nn.Module, config: WeightMask, name: str, stream_name: str, owners: Iterable[nn.Module], mixin: type[MaskedLayer], own: Tensor | None
) -> None:
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
