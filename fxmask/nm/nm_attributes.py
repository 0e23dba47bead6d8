"""The tensors of a layer with an N:M mask that are no Parameters: mask, permutation, patterns, temperature; how they move, get lost and are checked.

They are plain attributes and no buffers, for the reasons of `passes.state.site`: an average of masks keeps more than n of m, and DDP would send them in every
step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..kernels.errors import StateError, UnsupportedError, message, warn
from ..passes.finding.weights import is_ensemble
from ..passes.state import ranks
from ..passes.state.tensors import refuse_freed

if TYPE_CHECKING:
    from .nm_layers import NMLayer

LOGITS, MASK, ORDER, TABLE, TAU = "nm_logits", "nm_mask", "nm_permutation", "nm_patterns", "nm_tau"
ATTRIBUTES = (MASK, ORDER, TABLE, TAU)


def tau_of(m: NMLayer) -> float | Tensor:
    """The temperature of the next draw: a scalar on the device where it moves, so that nothing recompiles."""
    tau = m.nm_tau
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
    tau = m.nm_tau
    if tau is not None and not tau.is_meta:
        with torch.inference_mode(False), torch.no_grad():
            tau.fill_(m._fxmask_nm.tau_at(m._fxmask_nm_step))


def move(m: NMLayer, device: torch.device) -> None:
    """The attributes follow the weight to another device, and no change of dtype. What the host knows is made anew; a mask does not come back from meta."""
    if device == m._fxmask_nm_device and device.type != "meta":
        return
    m._fxmask_nm_device = device
    with torch.inference_mode(False):
        table, config = m._fxmask_nm.table(), m._fxmask_nm
        m.nm_patterns = None if table is None else table.to(device)
        m.nm_tau = None if m.nm_tau is None else torch.full((), config.tau_at(m._fxmask_nm_step), dtype=m.nm_tau.dtype, device=device)
        for name in (MASK, ORDER):
            t = getattr(m, name)
            if t is not None:
                m._fxmask_nm_lost = m._fxmask_nm_lost or device.type == "meta"
                setattr(m, name, torch.zeros_like(t, device=device) if t.is_meta else t.to(device))


def check(m: NMLayer, weight: Tensor) -> None:
    """Raise StateError or UnsupportedError before a forward that would not do what it was asked for."""
    refuse_lost(m)
    ranks.refuse_shard(weight, "a layer with an N:M mask", type(m).__name__)
    if not torch.compiler.is_compiling():
        refuse_freed(type(m).__name__, weight)
    logits, held = m._parameters.get(LOGITS), m.nm_patterns if m.nm_mask is None else m.nm_mask
    if held is not None and held.device != weight.device:
        what = f"the N:M mask's tensors are on {held.device} and the weight on {weight.device}: expected one device."
        raise StateError(message(what, type(m).__name__, "move the whole model by model.to(device)."))
    _check_ranks(m, weight)
    if (m.nm_mask is not None or m.nm_permutation is not None) and not torch.compiler.is_compiling() and is_ensemble(weight):
        what = "vmap over the weights of a layer whose N:M mask or order rests would give all of them this model's: expected each weight to have its own."
        fix = "use a mask that each forward makes, by magnitude or learned, not frozen; or run the models one by one."
        raise UnsupportedError(message(what, type(m).__name__, fix))
    refuse_size(m, weight)
    if not m.training or m.nm_mask is not None or not isinstance(logits, nn.Parameter) or logits.requires_grad or not torch.is_grad_enabled():
        return
    what = "training would draw learned masks from logits that ask for no gradient, so that nothing is learned: expected requires_grad."
    fix = "call requires_grad_() on the layer's nm_logits; or use eval(), whose mask is the likeliest, or fxmask.freeze(model), which fixes it."
    raise StateError(message(what, type(m).__name__, fix))


def _check_ranks(m: NMLayer, weight: Tensor) -> None:
    """Once, where training begins in several processes: DDP puts rank 0's weights on all of them, and an order of columns stays each rank's own."""
    if not m._fxmask_nm_own or not m.training or torch.compiler.is_compiling() or not ranks.several():
        return
    m._fxmask_nm_own = False
    order = m.nm_permutation
    assert order is not None  # of its own
    if m._fxmask_nm_frozen or getattr(m, "_is_fsdp_managed_module", False) or torch.equal(m._fxmask_nm.permuted(weight)[1], order):
        return
    m._fxmask_nm_own = True
    what = "the permutation of this N:M mask was searched in other weights than the layer has now: expected weights that are the same on all ranks."
    fix = "load the weights on all ranks before fxmask.apply, or make the model under the same seed on all of them"
    more = "" if m._fxmask_nm.permute else "; or call fxmask.refresh(model) on all of them after DistributedDataParallel"
    raise StateError(message(what, type(m).__name__, f"{fix}{more}."))


def is_resized(m: NMLayer, weight: Tensor) -> bool:
    """Whether a mask, or its logits, are of another weight."""
    logits, size = m._parameters.get(LOGITS), weight.shape if m.nm_mask is None else m.nm_mask.shape
    return size != weight.shape or (logits is not None and logits.shape[0] * m._fxmask_nm.m != weight.numel())


def refuse_size(m: NMLayer, weight: Tensor) -> None:
    """Raise StateError where a mask, or its logits, are of another weight."""
    if not torch.jit.is_tracing() and is_resized(m, weight):  # sizes are tensors in a trace
        what = f"the weight has been replaced by one of another size, {tuple(weight.shape)}: expected that of its N:M mask."
        raise StateError(message(what, type(m).__name__, "call fxmask.restore(model) before it is replaced, and fxmask.apply after that."))


def refuse_lost(m: NMLayer) -> None:
    """Raise StateError where a mask, or the order that logits belong to, has no values."""
    if m._fxmask_nm_lost:
        what = "this N:M mask was lost on the meta device: expected its weights, and a frozen mask, to be loaded since."
        fix = "load them by model.load_state_dict, and a frozen mask by fxmask.load_state_dict; or, of a permuted mask, call fxmask.refresh(model)."
        raise StateError(message(what, type(m).__name__, fix))


def take_order(m: NMLayer, prefix: str, order: object, errors: list[str]) -> None:
    """The order of columns that saved logits belong to."""
    old = m.nm_permutation
    assert old is not None  # of a mask that is learned in an order
    if not is_order(order, len(old)):
        errors.append(f"{prefix}{ORDER}: expected a permutation of {len(old)} columns, int64.")
        return
    assert isinstance(order, Tensor)
    device = order.device if old.is_meta else old.device  # weights that a load assigns come from there, too
    m.nm_permutation, m._fxmask_nm_lost = order.detach().to(device, copy=True), m._fxmask_nm_frozen and m._fxmask_nm_lost
    m._fxmask_nm_own = False


def is_order(t: object, columns: int) -> bool:
    """Whether it is a permutation of so many columns."""
    if not isinstance(t, Tensor) or t.dtype != torch.int64 or tuple(t.shape) != (columns,):
        return False
    return t.is_meta or torch.equal(t.sort().values.cpu(), torch.arange(columns, device="cpu"))


def warn_scaled(w: Tensor) -> None:
    """Warn where the loss is likely scaled: the decay is added to the gradient as it is, and a GradScaler would divide it away."""
    kind = w.device.type
    if w.requires_grad and torch.is_grad_enabled() and torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.float16:
        what = "SR-STE's decay in float16 autocast is divided by a GradScaler's scale, and so lost."
        fix = "autocast to bfloat16, which needs no scaler; or decay=0 and weight decay of your own."
        warn(message(what, "NMMask(mode='sr-ste')", fix))
