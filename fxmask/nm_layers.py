"""Linears and Conv2ds under `NMMask`, by class swap: the same object, Parameters, keys and hooks, a forward with W∘M."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Proxy

from .conv_layers import conv_forward
from .kernels import nm
from .kernels.conv import in_format_of
from .kernels.errors import StateError, UnsupportedError, message
from .kernels.nm_ops import by_kernel, learned, sr_ste
from .passes.nm_mask import NMMask
from .passes.weights import peek_weight, raw_weight
from .swap import Swapped, masked_class

LOGITS, MASK, ORDER, TABLE, TAU = "nm_logits", "nm_mask", "nm_permutation", "nm_patterns", "nm_tau"
BUFFERS = (MASK, ORDER, TABLE, TAU)  # not persistent: no key of state_dict


class NMLayer(Swapped):
    """Forward of a Linear or a Conv2d with n:m masked weight. Mixed into a subclass of the layer's own class, never constructed."""

    _fxmask_nm: NMMask
    _fxmask_nm_frozen: bool
    _fxmask_nm_step: int  # optimiser steps that were told, and whether anybody tells them, of a temperature that moves
    _fxmask_nm_counted: bool
    _fxmask_nm_rested: tuple[str, ...]  # parameters whose requires_grad apply has switched off
    bias: Tensor | None

    def forward(self, input: Tensor) -> Tensor:
        if isinstance(input, Proxy):
            what = "torch.fx.symbolic_trace cannot look into a layer with an N:M mask: expected a dense model."
            raise UnsupportedError(message(what, type(self).__name__, "use torch.export.export or torch.compile; or fxmask.finalize(model) first, then trace."))
        weight = masked_weight(self)
        if isinstance(self, nn.Conv2d):
            return conv_forward(self, input, in_format_of(weight, raw_weight(self)))
        return F.linear(input, weight, self.bias)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, mask: {self._fxmask_nm.words()}{', frozen' if self._fxmask_nm_frozen else ''}"

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        if self._parameters.get(LOGITS) is not None:  # a dense checkpoint has none, and leaves them as they are
            state_dict.setdefault(prefix + LOGITS, self._parameters[LOGITS].detach())  # type: ignore[union-attr]
        super()._load_from_state_dict(state_dict, prefix, *args)


def masked_weight(m: NMLayer) -> Tensor:
    """W∘M of the next forward, with the gradient of the mode."""
    c, w, mask = m._fxmask_nm, raw_weight(m), m._buffers.get(MASK)
    logits, table = m._parameters.get(LOGITS), m._buffers.get(TABLE)
    if mask is None and logits is not None and table is not None and m.training:
        soft, hard = nm.sample(logits, table, _tau(m))
        soft = soft.reshape(w.shape)
        return w * soft.to(w.dtype) if c.soft else learned(w, soft, hard.reshape(w.shape))
    if mask is None and c.impl == "triton":
        return by_kernel(w, c.n, c.m, c.decay if c.mode == "sr-ste" else None)
    mask = c.mask_of(w, table, logits) if mask is None else mask
    return sr_ste(w, mask, c.decay) if c.mode == "sr-ste" else torch.where(mask, w, 0)


def _tau(m: NMLayer) -> float | Tensor:
    """The temperature of the next draw: a scalar on the device where it moves, so that nothing recompiles."""
    tau = m._buffers.get(TAU)
    if tau is None:
        return m._fxmask_nm.tau
    if not m._fxmask_nm_counted:
        what = "tau_from: the temperature moves by optimiser steps, and nobody tells them: expected fxmask.step."
        raise StateError(message(what, type(m).__name__, "call fxmask.step(model, 0) before training, and fxmask.step(model) after every optimizer.step()."))
    return tau


def advance(m: NMLayer, n: int) -> None:
    """Move the temperature on by n optimiser steps."""
    m._fxmask_nm_step, m._fxmask_nm_counted = m._fxmask_nm_step + n, True
    write_tau(m)


def write_tau(m: NMLayer) -> None:
    """Write the temperature of the step that is told, in place: a CUDA graph reads it there."""
    tau = m._buffers.get(TAU)
    if tau is not None and not tau.is_meta:
        with torch.inference_mode(False), torch.no_grad():
            tau.fill_(m._fxmask_nm.tau_at(m._fxmask_nm_step))


@torch.no_grad()
def element_mask(m: NMLayer, last: bool = False) -> Tensor:
    """The mask of the next forward in eval(), bool of the weight's shape; a copy. last: the one that `final` of a learned mask says, which may be drawn."""
    c, mask, logits, table = m._fxmask_nm, m._buffers.get(MASK), m._parameters.get(LOGITS), m._buffers.get(TABLE)
    if mask is not None:
        return mask.clone()
    w = peek_weight(m).detach()
    if last and c.final == "sample" and logits is not None and table is not None:
        return nm.sample(logits.detach(), table, c.tau_at(m._fxmask_nm_step))[1].reshape(w.shape)
    return c.mask_of(w, table, logits)


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
    found: dict[str, Tensor | None] = dict.fromkeys(BUFFERS)
    table = config.table()
    found[TABLE] = None if table is None else table.to(weight.device)
    if config.mode == "permuted":
        found[MASK], found[ORDER] = config.permuted(weight)
    if config.tau_from is not None:
        found[TAU] = torch.tensor(config.tau_from, dtype=torch.promote_types(weight.dtype, torch.float32), device=weight.device)
    logits = None if config.mode != "learned" else _logits(config, weight, found[TABLE])
    m.__class__ = masked_class(type(m), NMLayer)
    assert isinstance(m, NMLayer)
    m._fxmask_nm, m._fxmask_nm_frozen, m._fxmask_nm_rested = config, False, ()
    m._fxmask_nm_step, m._fxmask_nm_counted = 0, False
    for name, value in found.items():
        m.register_buffer(name, value, persistent=False)
    m.register_load_state_dict_post_hook(_after_load)
    if logits is not None:
        if not config.train_weights:
            m._fxmask_nm_rested = tuple(n for n, p in m.named_parameters() if p.requires_grad)
            for _, p in m.named_parameters():
                p.requires_grad_(False)
        m.register_parameter(LOGITS, nn.Parameter(logits))


def _logits(config: NMMask, weight: Tensor, table: Tensor | None) -> Tensor:
    assert table is not None
    if config.init == "magnitude":
        return nm.magnitude_logits(weight, table).to(weight.dtype)
    return nn.init.xavier_uniform_(torch.empty(weight.numel() // config.m, len(table), dtype=weight.dtype, device=weight.device))


def unswap_nm(model: nn.Module) -> None:
    """Make layers with N:M masks what they were, in place."""
    for _, m in list(nm_layers(model)):
        m.__class__ = m._fxmask_base  # type: ignore[assignment]
        m._parameters.pop(LOGITS, None)
        for name in BUFFERS:
            m._buffers.pop(name, None)
            m._non_persistent_buffers_set.discard(name)
        for n, p in m.named_parameters():
            if n in m._fxmask_nm_rested:
                p.requires_grad_(True)
        for name in ("_fxmask_nm", "_fxmask_nm_frozen", "_fxmask_nm_rested", "_fxmask_nm_step", "_fxmask_nm_counted"):
            del m.__dict__[name]
        hooks = m._load_state_dict_post_hooks
        for key in [k for k, hook in hooks.items() if hook is _after_load]:
            del hooks[key]


@torch.inference_mode(False)
@torch.no_grad()
def rebuild_nm(m: NMLayer) -> None:
    """Build a permuted mask from the weight as it is; a frozen one stays, and the other modes build theirs in each forward."""
    if m._fxmask_nm.mode == "permuted" and not m._fxmask_nm_frozen:
        m._buffers[MASK], m._buffers[ORDER] = m._fxmask_nm.permuted(peek_weight(m))


def _after_load(m: nn.Module, incompatible: object) -> None:
    if isinstance(m, NMLayer) and not peek_weight(m).is_meta:
        rebuild_nm(m)
        write_tau(m)  # to_empty has lost it


@torch.inference_mode(False)
def freeze(model: nn.Module) -> None:
    """Fix the N:M masks of a model as they are now, so that they survive steps and the loading of new weights; learned ones by their option `final`.

    Until then a learned mask in eval() is the argmax of its logits, always the same. Afterwards train() and eval() use one mask, and the logits, which nothing
    uses any more, ask for no gradient. Weights that a learned mask has put to rest stay so: `requires_grad_()` wakes them. `fxmask.state_dict` saves frozen
    masks, `model.state_dict()` does not. Freezing again changes nothing; `fxmask.restore` ends it.
    Raises: StateError without N:M masks, UnsupportedError for meta weights. Block masks are fixed by WeightMask(refresh=0).
    """
    found = list(nm_layers(model))
    if not found:
        what = "fxmask.freeze: this model has no N:M mask: expected one that fxmask.apply(model, fxmask.NMMask(...)) has changed."
        raise StateError(message(what, type(model).__name__, "block masks are fixed by fxmask.WeightMask(refresh=0), or made permanent by fxmask.finalize."))
    made = {name: element_mask(m, last=True) for name, m in found if has_values(name, m, "fxmask.freeze")}
    for name, m in found:
        if not m._fxmask_nm_frozen:
            hold(m, made[name])


def hold(m: NMLayer, mask: Tensor) -> None:
    """Freeze a layer with a mask."""
    m._buffers[MASK], m._fxmask_nm_frozen = mask, True
    logits = m._parameters.get(LOGITS)
    if logits is not None:
        logits.requires_grad_(False)


def has_values(name: str, m: NMLayer, caller: str) -> bool:
    """True, or UnsupportedError for a meta tensor."""
    if peek_weight(m).is_meta:
        what = f"{caller} needs the weight's values: expected real memory, got a meta tensor."
        raise UnsupportedError(message(what, name, "materialise the model first (to_empty, then load_state_dict)."))
    return True
