"""Linears and Conv2ds under `NMMask`, by class swap: the same object, Parameters, keys and hooks, a forward with W∘M. Logits are a Parameter."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Proxy

from ..conv_layers import conv_forward
from ..kernels import nm
from ..kernels.conv import in_format_of
from ..kernels.errors import UnsupportedError, message
from ..kernels.nm_ops import by_kernel, learned, sr_ste
from ..loads import unhook
from ..passes.finding.weights import lacks_weight, peek_weight, raw_weight, refuse_wrapped
from ..passes.settings.nm_mask import NMMask
from ..passes.state import noted, ranks
from ..swapped import Swapped, forget_asked, look_at_asked, masked_class, note_asked, of_now
from .nm_attributes import ATTRIBUTES, LOGITS, MASK, ORDER, TABLE, TAU, check, move, refuse_lost, refuse_size, take_order, tau_of, warn_scaled
from .rebuilt import expect_state


class NMLayer(Swapped):
    """Forward of a Linear or a Conv2d with n:m masked weight. Mixed into a subclass of the layer's own class, never constructed."""

    _fxmask_prefix = "NM"
    _fxmask_nm: NMMask
    _fxmask_nm_name: str  # of the layer, where apply has masked it
    _fxmask_nm_frozen: bool
    _fxmask_nm_step: int  # optimiser steps that were told, and whether anybody tells them, of a temperature that moves
    _fxmask_nm_counted: bool
    _fxmask_nm_rested: tuple[str, ...]  # parameters whose requires_grad apply has switched off
    _fxmask_nm_device: torch.device  # of the attributes
    _fxmask_nm_own: bool  # the order of columns is this process's own, and nobody has asked whether that is the other ranks'
    _fxmask_nm_rebuilt: bool  # a load of weights has built a permuted mask anew, and neither a state nor `refresh` has come since
    _fxmask_nm_lost: bool  # a mask, or the order of its columns, went through the meta device, where it has no values
    nm_mask: Tensor | None  # bool of the weight's shape, where it is frozen or permuted
    nm_permutation: Tensor | None  # int64 (columns)
    nm_patterns: Tensor | None  # bool (patterns, m), or the tiles of transposable masks
    nm_tau: Tensor | None  # 0-d, where it moves
    bias: Tensor | None

    def forward(self, input: Tensor) -> Any:
        if not isinstance(self, NMLayer):
            return of_now(self, input)
        if isinstance(input, Proxy):
            what = "torch.fx.symbolic_trace cannot look into a layer with an N:M mask: expected a dense model."
            raise UnsupportedError(message(what, type(self).__name__, "use torch.export.export or torch.compile; or fxmask.finalize(model) first, then trace."))
        if self.nm_mask is None and LOGITS not in self._parameters and torch.jit.is_tracing():
            what = "torch.jit.trace cannot record how N:M masks rank a weight (PyTorch's tracer fails at Tensor.view(dtype)): expected fixed masks."
            fix = "use torch.export.export or torch.compile; or fxmask.freeze(model), or fxmask.finalize(model), first, then trace under torch.no_grad()."
            raise UnsupportedError(message(what, type(self).__name__, fix))
        noted.note(self)
        look_at_asked(self)
        weight = masked_weight(self)
        if isinstance(self, nn.Conv2d):
            return conv_forward(self, input, in_format_of(weight, raw_weight(self)))
        return F.linear(input, weight, self.bias)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, mask: {self._fxmask_nm.words()}{', frozen' if self._fxmask_nm_frozen else ''}"

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        if self._parameters.get(LOGITS) is not None:  # a dense checkpoint has none, and leaves them as they are
            state_dict.setdefault(prefix + LOGITS, self._parameters[LOGITS].detach())  # type: ignore[union-attr]
        order = state_dict.pop(prefix + ORDER, None) if self._fxmask_nm.permute else None
        super()._load_from_state_dict(state_dict, prefix, *args)
        if order is not None:
            take_order(self, prefix, order, args[-1])

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self._fxmask_nm.permute:
            destination[prefix + ORDER] = self.nm_permutation

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        result = super()._apply(fn, recurse)
        here, weight = self._fxmask_nm_device, None if lacks_weight(self) else peek_weight(self)
        if weight is not None and here.type == "meta" and not weight.is_meta:  # brought by a load that assigns
            move(self, weight.device)
        else:
            move(self, fn(torch.empty(0, device=here)).device)
        return result


def masked_weight(m: NMLayer) -> Tensor:
    """W∘M of the next forward, with the gradient of the mode."""
    c, w, mask = m._fxmask_nm, raw_weight(m), m.nm_mask
    logits, table, order = m._parameters.get(LOGITS), m.nm_patterns, m.nm_permutation
    check(m, w)
    refuse_wrapped(type(m).__name__, w)
    if c.mode == "sr-ste" and c.decay and not torch.compiler.is_compiling():
        warn_scaled(w)
    if mask is None and logits is not None and table is not None and m.training:
        soft, hard = nm.sample(logits, table, tau_of(m))
        soft = c.shaped(soft, w, order)
        return w * soft.to(w.dtype) if c.soft else learned(w, soft, c.shaped(hard, w, order))
    decays = c.mode == "sr-ste" and torch.is_grad_enabled()  # a program that is exported under no_grad has no op of ours
    if mask is None and c.impl == "triton":
        return by_kernel(w, c.n, c.m, c.decay if decays else None)
    mask = c.mask_of(w, table, logits, order) if mask is None else mask
    return sr_ste(w, mask, c.decay) if decays else torch.where(mask, w, 0)


@torch.no_grad()
def element_mask(m: NMLayer, last: bool = False) -> Tensor:
    """The mask of the next forward in eval(), bool of the weight's shape; a copy. last: the one that `final` of a learned mask says, which may be drawn."""
    c, mask, logits, table, order = m._fxmask_nm, m.nm_mask, m._parameters.get(LOGITS), m.nm_patterns, m.nm_permutation
    refuse_lost(m)
    refuse_size(m, peek_weight(m))
    if mask is not None:
        return mask.clone()
    w, scores = ranks.whole(peek_weight(m).detach()), None if logits is None else ranks.whole(logits.detach())
    if last and c.final == "sample" and scores is not None and table is not None:
        return ranks.first(c.shaped(nm.sample(scores, table, c.tau_at(m._fxmask_nm_step))[1], w, order))
    return c.mask_of(w, table, scores, order)


def nm_layers(model: nn.Module) -> Iterator[tuple[str, NMLayer]]:
    """(name, layer) of every layer with an N:M mask."""
    return ((name, m) for name, m in model.named_modules() if isinstance(m, NMLayer))


def any_nm(model: nn.Module) -> bool:
    """Whether any layer has an N:M mask."""
    return next(nm_layers(model), None) is not None


@torch.inference_mode(False)
@torch.no_grad()
def swap_nm(m: nn.Module, config: NMMask) -> None:
    """Give a layer an N:M mask, in place."""
    weight = peek_weight(m)
    found: dict[str, Tensor | None] = dict.fromkeys(ATTRIBUTES)
    table = config.table()
    found[TABLE] = None if table is None else table.to(weight.device)
    if config.mode == "permuted":
        found[MASK], found[ORDER] = config.permuted(weight)
    if config.permute:
        found[ORDER] = config.permuted(weight)[1]
    if config.tau_from is not None:
        found[TAU] = torch.tensor(config.tau_from, dtype=torch.promote_types(weight.dtype, torch.float32), device=weight.device)
    logits = None if config.mode != "learned" else _logits(config, weight, found[TABLE], found[ORDER])
    m.__class__ = masked_class(type(m), NMLayer)
    assert isinstance(m, NMLayer)
    m._fxmask_nm, m._fxmask_nm_frozen, m._fxmask_nm_rested, m._fxmask_nm_own = config, False, (), found[ORDER] is not None
    m._fxmask_nm_step, m._fxmask_nm_counted, m._fxmask_nm_lost, m._fxmask_nm_device = 0, False, False, weight.device
    note_asked(m, config)
    m.__dict__.update(found)
    m.register_load_state_dict_post_hook(_after_load)
    if logits is not None:
        if not config.train_weights:
            m._fxmask_nm_rested = tuple(n for n, p in m.named_parameters() if p.requires_grad)
            for _, p in m.named_parameters():
                p.grad = None  # an optimiser steps whatever has one
                p.requires_grad_(False)
        m.register_parameter(LOGITS, nn.Parameter(logits))


def _logits(config: NMMask, weight: Tensor, table: Tensor | None, order: Tensor | None) -> Tensor:
    assert table is not None
    if config.init == "magnitude":
        rows = weight.reshape(weight.shape[0], -1)
        return nm.magnitude_logits(rows if order is None else rows[:, order], table).to(weight.dtype)
    return nn.init.xavier_uniform_(torch.empty(weight.numel() // config.m, len(table), dtype=weight.dtype, device=weight.device))


def unswap_nm(model: nn.Module) -> None:
    """Make layers with N:M masks what they were, in place."""
    for _, m in list(nm_layers(model)):
        m.__class__ = m._fxmask_base  # type: ignore[assignment]
        m._parameters.pop(LOGITS, None)
        for n, p in m.named_parameters():
            if n in m._fxmask_nm_rested:
                p.requires_grad_(True)
        for name in [name for name in m.__dict__ if name in ATTRIBUTES or name.startswith("_fxmask_nm")]:
            del m.__dict__[name]
        forget_asked(m)
        unhook(m, lambda hook: hook is _after_load)


@torch.inference_mode(False)
@torch.no_grad()
def rebuild_nm(m: NMLayer) -> None:
    """Build a permuted mask from the weight as it is; a frozen one stays, and the other modes build theirs in each forward."""
    if m._fxmask_nm.mode == "permuted" and not m._fxmask_nm_frozen:
        m.nm_mask, m.nm_permutation = m._fxmask_nm.permuted(ranks.whole(peek_weight(m)))
        m._fxmask_nm_lost, m._fxmask_nm_own = False, True


def _after_load(m: nn.Module, incompatible: object) -> None:
    if isinstance(m, NMLayer) and not lacks_weight(m) and not (weight := peek_weight(m)).is_meta:
        move(m, weight.device)  # load_state_dict(assign=True) replaces the Parameter and moves nothing else
        old = m.nm_mask
        rebuild_nm(m)
        expect_state(m, old)
