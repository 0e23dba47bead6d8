"""Masked forms of nn.Linear by class swap: the same object, Parameters, keys and hooks, another forward.

A swapped class is made once for each base class, so that subclasses and parametrised Linears keep what they add. Where the owner of a layer reads
`.weight` and never calls it (nn.MultiheadAttention's out_proj), the class has a `weight` property that gives W∘M; the Parameter stays in `_parameters`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from .kernels import ops, reference
from .kernels.grid import expand_mask
from .passes import site as state
from .passes.config import WeightMask
from .passes.site import Site


class MaskedLinear(Site):
    """Forward of a masked Linear: x (..., K) -> (..., N). Mixed into a subclass of the layer's own class, never constructed."""

    _fxmask_base: type[nn.Module]  # of the class: what it was before

    def forward(self, x: Tensor) -> Tensor:
        c, weight = self._fxmask_config, raw_weight(self)
        mask = state.forward_mask(self, weight)
        return ops.linear(x, weight, self.bias, mask, c.block, c.backward, self._fxmask_dense, c.impl)  # type: ignore[arg-type]

    def extra_repr(self) -> str:
        c = self._fxmask_config
        return f"{super().extra_repr()}, ratio={c.ratio}, block={c.block}, backward={c.backward!r}"

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        state.rebuild(self, raw_weight(self))

    def __reduce_ex__(self, protocol: Any) -> Any:
        if not is_own_class(self):
            return super().__reduce_ex__(protocol)
        return _rebuild_class, (type(self)._fxmask_base, issubclass(type(self), ReadWeight)), self.__getstate__()


class ReadWeight(MaskedLinear):
    """A masked Linear whose owner reads `.weight`: the read gives W∘M (N, K), with the gradient of the backward mode."""

    @property
    def weight(self) -> Tensor:
        try:
            return _masked_weight(self)
        except AttributeError as e:  # nn.Module would answer an AttributeError with the dense Parameter
            raise RuntimeError(f"reading a masked weight failed: {e}") from e

    def forward(self, x: Tensor) -> Tensor:
        base = type(self)._fxmask_base
        return MaskedLinear.forward(self, x) if base.forward is nn.Linear.forward else base.forward(self, x)


def _masked_weight(m: ReadWeight) -> Tensor:
    c, w = m._fxmask_config, raw_weight(m)
    mask = state.forward_mask(m, w)
    wanted = reference.gradient_mask(mask, m._fxmask_dense, c.backward)
    if wanted is mask:
        return reference.masked(w, mask, c.block)
    reached = w if wanted is None else reference.masked(w, wanted, c.block)
    return reached - torch.where(expand_mask(mask, w.shape, c.block), 0, reached).detach()


def raw_weight(m: nn.Module) -> Tensor:
    """The dense weight (N, K) of a masked Linear; a parametrised one computes it."""
    weight = m._parameters.get("weight")
    return m.weight if weight is None else weight  # type: ignore[return-value]


@cache
def _masked_class(base: Any, read: bool) -> Any:
    mixin = ReadWeight if read else MaskedLinear
    return type(f"Masked{base.__name__}", (mixin, base), {"_fxmask_base": base, "__module__": __name__})


def masked_class(base: type[nn.Module], read: bool) -> type[MaskedLinear]:
    """The masked subclass of a Linear class, made once."""
    return _masked_class(base, read)  # type: ignore[arg-type]  # a class is hashable, Module.__hash__ confuses the checker


def is_own_class(m: MaskedLinear) -> bool:
    """Whether nobody has changed the class since `swap`, as parametrisations and fully_shard do."""
    return type(m) is masked_class(m._fxmask_base, isinstance(m, ReadWeight))


def _rebuild_class(base: type[nn.Module], read: bool) -> nn.Module:
    cls = masked_class(base, read)
    return cls.__new__(cls)


def swap(m: nn.Module, config: WeightMask, name: str, stream_name: str) -> None:
    """Make a Linear a masked one, in place."""
    weight = raw_weight(m)
    m.__class__ = masked_class(type(m), config.read == "weight")
    assert isinstance(m, Site)
    state.install(m, config, name, weight, stream_name)
    if config.start == 0:
        state.rebuild(m, weight)


def unswap(m: nn.Module) -> None:
    """Make a masked Linear what it was, in place; harmless where `swap` failed half-way."""
    if isinstance(m, Site):
        m.__class__ = type(m)._fxmask_base  # type: ignore[attr-defined]
        state.uninstall(m)
