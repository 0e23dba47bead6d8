"""Fake tensors in place of a model's own, for the time of a run: shapes, dtypes and gradients without memory."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ...kernels.errors import UnsupportedError, message
from ..state import pruning_schedule, tensors
from ..state.site import Site
from .calls import Call, storage_of, typical_mask

FAKES_LOG = "torch._subclasses.fake_tensor"
Views = dict[int, list[tuple[Tensor, Tensor]]]  # by storage: the real parameters that lie in it, and the fake ones in their places


@contextmanager
def quiet() -> Iterator[None]:
    """Inside, an op that refuses its operands is told of by what it raises alone: PyTorch logs a traceback, too. Records of other threads pass."""
    thread, log = threading.get_ident(), logging.getLogger(FAKES_LOG)

    def passes(record: logging.LogRecord) -> bool:
        return record.levelno < logging.ERROR or threading.get_ident() != thread

    log.addFilter(passes)
    try:
        yield
    finally:
        log.removeFilter(passes)


class Fakes:
    """Fake tensors of one mode: the same one for the same tensor, on a device that needs no hardware."""

    def __init__(self, mode: FakeTensorMode, dtype: torch.dtype | None) -> None:
        self.mode, self.dtype = mode, dtype
        self.made: dict[int, tuple[Tensor, Tensor]] = {}  # the original is held, so that its id stays its own

    def __call__(self, t: Tensor) -> Tensor:
        if id(t) not in self.made:
            if t.is_nested:  # jagged ones are of a wrapper class, strided ones have no sizes
                what = "analyze goes by the shapes of tensors: expected plain ones, got a nested tensor."
                raise UnsupportedError(message(what, "", "give it a padded one (torch.nested.to_padded_tensor), or all tokens as one tensor (.values())."))
            if is_traceable_wrapper_subclass(t):
                what = f"analyze runs the model on plain fake tensors: expected none of a wrapper class, got {type(t).__name__}."
                raise UnsupportedError(message(what, "", "analyse the model before fully_shard, tensor parallelism or quantisation changes its parameters."))
            if nn.parameter.is_lazy(t):
                what = f"analyze needs the shapes of all parameters: expected none that is lazy, got {type(t).__name__}."
                raise UnsupportedError(message(what, "", "run one forward first, which gives lazy modules their shapes."))
            if t.layout != torch.strided:
                what = f"analyze knows no costs of sparse products: expected strided tensors, got one with layout {t.layout}."
                raise UnsupportedError(message(what, "", "analyse the masked model before fxmask.finalize makes its weights sparse, or finalize it densely."))
            device = "cpu" if t.is_meta else t.device
            with self.mode:
                dtype = self.dtype if self.dtype and t.is_floating_point() else t.dtype
                fake = torch.empty_strided(tuple(map(int, t.shape)), tuple(map(int, t.stride())), dtype=dtype, device=device)
                fake = nn.Parameter(fake, t.requires_grad) if isinstance(t, nn.Parameter) else fake.requires_grad_(t.requires_grad)
            self.made[id(t)] = (t, fake)
        return self.made[id(t)][1]

    def views(self, parameters: Iterable[Tensor]) -> Views:
        found: Views = {}
        for p in parameters:
            found.setdefault(storage_of(p), []).append((p, self(p)))
        return found


def swap(root: nn.Module, faked: Fakes) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Put fake parameters and buffers in place of the real ones, which are returned by their names."""
    parameters: dict[str, Tensor] = dict(root.named_parameters())
    buffers = dict(root.named_buffers())
    for m in root.modules():
        own: tuple[dict[str, Any], ...] = (m._parameters, m._buffers)
        for table in own:
            table.update({name: faked(t) for name, t in table.items() if t is not None})
    swapped = {id(t): faked(t) for t in (*parameters.values(), *buffers.values())}
    views, seen = faked.views(parameters.values()), set[int]()
    for m in root.modules():
        constants = {name: t for name, t in m.__dict__.items() if isinstance(t, Tensor) and t.is_meta and not name.startswith("_fxmask_")}
        m.__dict__.update({name: faked(t) for name, t in constants.items() if view_of(t, views) is t})  # with the weights they move to where fake ones are
        _refer(m.__dict__, swapped, seen)
        if isinstance(m, Site):
            _prepare(m)
        if pruning_schedule.is_scheduled(m) and not pruning_schedule.is_announced(m):  # a look counts the ratio of now
            pruning_schedule.advance(m, 0)
        if "_fxmask_nm_lost" in m.__dict__:
            m.__dict__["_fxmask_nm_lost"] = False  # an N:M mask without values will do
    return parameters, buffers


def view_of(t: Tensor, views: Views) -> Tensor:
    """The same view of a fake parameter as `t` is of the real one, for an op below autograd; `t` itself where it is no view of any."""
    if type(t) is not Tensor or t.layout != torch.strided:
        return t
    end = t.storage_offset() + 1 + sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    for real, fake in views.get(storage_of(t), ()):
        begin = real.storage_offset()
        if t.dtype == real.dtype and begin <= t.storage_offset() and end <= begin + real.numel():
            return torch.as_strided(fake.detach(), t.shape, t.stride(), t.storage_offset() - begin)
    return t


def _refer(value: Any, swapped: dict[int, Tensor], seen: set[int]) -> Any:
    """Let lists and dicts that hold parameters, as recurrent layers have one, hold the fake ones; a tuple of them is another one then."""
    if id(value) in swapped:
        return swapped[id(value)]
    if isinstance(value, tuple):
        held = [_refer(v, swapped, seen) for v in value]
        return value if all(a is b for a, b in zip(value, held, strict=True)) else value._make(held) if hasattr(value, "_make") else tuple(held)
    if isinstance(value, (dict, list)) and id(value) not in seen:
        seen.add(id(value))
        for key, v in list(value.items() if isinstance(value, dict) else enumerate(value)):
            other = _refer(v, swapped, seen)
            if other is not v:
                value[key] = other
    return value


def _prepare(site: Site) -> None:
    """For a look nobody needs to count steps, and ranks need not agree; state on the meta device gets values, a cached mask there typical ones."""
    site._fxmask_announced, site._fxmask_copied, site._fxmask_unguarded, site._fxmask_called = True, False, False, True
    if site._fxmask_keep.is_meta:
        tensors.place_on(site, torch.device("cpu"))
        site._fxmask_lost = False
        if site._fxmask_mask is not None:
            site._fxmask_mask = typical_mask(site._fxmask_grid, int(site._fxmask_keep))
            site._fxmask_lists = tensors.lists_of(site, site._fxmask_mask)


def sparse_result(call: Call, t: Tensor) -> UnsupportedError:
    """Of a result without strides: its number of elements is a value, which no fake tensor has."""
    kind = "gradient" if call.differentiates else "tensor"
    what = f"analyze counts no {kind}s with layout {t.layout}: expected strided ones, got one from {call.op}."
    fix = "set sparse=False on the embedding, whose gradient and optimiser's step then count as dense ones; or phases=('fwd',)."
    return UnsupportedError(message(what, call.module or "(model)", fix if call.differentiates else "analyse the part of the model that makes none."))
