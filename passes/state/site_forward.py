"""What a forward asks of a site: its mask and lists. It refuses what would be wrong, and notes that it was there."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.fx import Proxy
from torch.fx._symbolic_trace import is_fx_symbolic_tracing
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from ...kernels import ops
from ...kernels.errors import ShapeError, StateError, UnsupportedError, message
from ..finding.weights import is_ensemble, is_wrapped, refuse_wrapped
from . import noted, ranks
from .site import Site, version
from .site_mask import check_agreed, current_mask, fits, mask_outside, refuse_layout, refuse_size
from .tensors import capturing, has_values, refuse_freed
from .uncounted import nobody_counts, uncounted, warn_of_steps


def forward_mask(site: Site, weight: Tensor) -> Tensor:
    """The mask, for a forward. StateError where training counts steps and nobody does; a warning where that leaves an evaluation dense."""
    if isinstance(weight, Proxy) or (is_fx_symbolic_tracing() and get_proxy_mode() is None):
        refuse_tracing(site)
    refuse_lost(site, weight)  # first, as it has nothing to be stale
    if uncounted(site):
        nobody_counts(site, weight)
    if site._fxmask_unguarded and site.training:
        what = "the state that was loaded had a guard, and this process has none: masked weights would move, and steps not count."
        raise StateError(message(what, site._fxmask_name, "call fxmask.guard(optimizer, model) again; without one on purpose: fxmask.step(model, 0)."))
    ranks.refuse_shard(weight, "a masked layer", site._fxmask_name)
    if is_wrapped(weight):  # PyTorch 2.11 guards on what a call is given: names would part layers that are alike
        refuse_wrapped(site._fxmask_name, weight)
    if torch.compiler.is_compiling():  # a write in the graph would be a side effect, which the body of a checkpoint must not have
        if site._fxmask_kind < 0:  # the compiler compares what is looked at; no assertion, which `python -O` would leave out
            raise AssertionError
        torch._dynamo.comptime.comptime(_note_traced, lambda: _note_exported(site, weight))
        return current_mask(site, weight)
    _refuse_ensemble(site, weight)
    refuse_freed(site._fxmask_name, weight)
    if site.training and not site._fxmask_called and not getattr(site, "_is_fsdp_managed_module", False):  # FSDP may gather in another dtype
        check_agreed(site, weight)
    site._fxmask_called, site._fxmask_seen = True, weight.dtype
    noted.note(site)
    mask = current_mask(site, weight)
    remember(site, weight, mask)
    return mask


def remember(site: Site, weight: Tensor, mask: Tensor) -> None:
    """Note what the one training forward since a step has built of a guarded weight, for the step that follows. After another forward of any kind nobody knows
    which of them the gradient is of: writes between them, as through `.data`, need not count.

    Not while a CUDA graph is captured, which computes nothing yet, nor what a transform of torch.func or a FakeTensorMode has made.
    """
    if site._fxmask_mask is not None or site._fxmask_policy is None:
        return
    plain = type(weight) is nn.Parameter and type(mask) is Tensor and not is_functorch_wrapped_tensor(mask) and has_values(mask)
    known = plain and site._fxmask_forward is None and site.training and torch.is_grad_enabled() and not capturing(mask)
    site.__dict__["_fxmask_forward"] = (mask, *_made_of(site, weight)) if known else ()


def _made_of(site: Site, weight: Tensor) -> tuple[object, ...]:
    """What a noted mask goes with. No weak reference, with which PyTorch would swap no parameters; the guard keeps the weight, so that its id is its own."""
    return id(weight), weight.data_ptr(), version(weight), site._fxmask_config, site._fxmask_written


def mask_of_step(site: Site, weight: Tensor) -> Tensor:
    """The mask that a gradient was made under, for the step that it is for: bool (NB, KB). Built anew where no forward is known to have built it.

    Compiled forwards note nothing, so that one of a layer like this may have come after the one that did.
    """
    last = site._fxmask_forward
    if last and last[1] == id(weight) and traced_alike(site) is None:
        mask, *made_of = last
        if tuple(made_of) == _made_of(site, weight) and not capturing(mask):  # a graph makes its own
            fits(site, weight)
            return mask
    return mask_outside(site, weight.detach())


def forward_lists(site: Site, mask: Tensor, impl: str) -> Tensor | None:
    """The lists of this forward's mask, cached or made now, for forward and backward; None where the implementation reads none."""
    if impl == "triton" and site._fxmask_mask is not None and site._fxmask_lists is not None:
        return site._fxmask_lists
    return ops.lists(mask, site._fxmask_config.block, impl)


def check_input(site: Site, x: Tensor, weight: Tensor) -> None:
    """Raise where an eager forward's weight has become another one's, or its input's last axis is not the layer's: ops know shapes, no names. The compiler
    shows the line of the model.
    """
    if torch.compiler.is_compiling():
        return
    if not isinstance(x, Tensor):
        raise TypeError(message(f"expected a Tensor, got {type(x).__name__}.", site._fxmask_name, "give the layer a tensor (..., in_features)."))
    if weight.layout is not torch.strided:
        refuse_layout(site._fxmask_name, weight)
    if x.is_nested:
        return
    if tuple(weight.shape) != site._fxmask_shape:  # before x is compared with it; the mask's own check takes (N, 1, K), too, as of a convolution
        refuse_size(site, weight)
    if x.device != weight.device:
        what = f"the input is on {x.device} and the weight on {weight.device}: expected one device."
        raise ShapeError(message(what, site._fxmask_name, "move the input, or the model by model.to(device); a model on meta wants its weights loaded first."))
    if x.shape[-1:] != weight.shape[-1:]:
        what = f"last axis of x: expected {weight.shape[-1]}, got shape {tuple(x.shape)}."
        raise ShapeError(message(what, site._fxmask_name, "give the layer what it took before it was masked, (..., in_features)."))


def _note_traced(frame: Any) -> None:
    """Note that a forward uses the mask, at the moment when the compiler traces it; an export is none. (Inside the trace torch 2.11 calls all of it export.)"""
    site = frame.get_local("site")._i_will_not_complain_if_bc_breaks_VariableTracker().realize().value
    dtype = frame.get_local("weight").as_fake().dtype
    _TRACED[_likeness(site)] = dtype
    if not torch.compiler.is_exporting():
        site._fxmask_called, site._fxmask_seen = True, dtype
        if uncounted(site) and not site.training:  # once for the compiled code: the step that it runs at may move
            warn_of_steps(site, site._parameters.get("weight"))


def _note_exported(site: Site, weight: Tensor) -> None:
    """The same for an export that runs the code as Python: what comes of it can train these weights."""
    _TRACED[_likeness(site)] = weight.dtype


_TRACED: dict[object, torch.dtype] = {}  # what was traced: layers that are alike share the compiler's code, and are not traced again; exports run elsewhere


def _likeness(site: Site) -> object:
    c = site._fxmask_config
    return site._fxmask_grid, c.block, c.backward, c.cached


def traced_alike(site: Site) -> torch.dtype | None:
    """The dtype of the weight in a layer like this one that was compiled or exported, by which this one may run, too; None where there was none."""
    return _TRACED.get(_likeness(site))


def _refuse_ensemble(site: Site, weight: Tensor) -> None:
    """A cached mask is of one weight; `torch.func.stack_module_state` brings those of many models."""
    still = site._fxmask_own is not None and not site._fxmask_given.needs_steps  # the mask that was asked for is of all of them
    if site._fxmask_mask is not None and not still and is_ensemble(weight):
        what = "vmap over the weights of a layer with a cached mask would give all of them this model's mask: expected each weight to have its own."
        raise UnsupportedError(message(what, site._fxmask_name, "use refresh=1, which builds a mask from each weight; or run the models one by one."))


def refuse_lost(site: Site, weight: Tensor | None = None) -> None:
    """Raise StateError where a cached mask has no values; `weight`: of a forward, which may bring one to a model on the meta device."""
    brought = weight is not None and not weight.is_meta and site._fxmask_mask is not None and site._fxmask_mask.is_meta
    if site._fxmask_lost or brought:
        what = "a cached mask was lost on the meta device: expected weights to be loaded or the mask to be rebuilt since."
        fix = "load the weights by model.load_state_dict, or call fxmask.refresh(model) after setting them; for torch.func.functional_call use refresh=1."
        raise StateError(message(what, site._fxmask_name, fix))


def refuse_tracing(site: Site) -> None:
    """Raise UnsupportedError: a symbolic trace of a masked model."""
    what = "fx.symbolic_trace of a masked model would freeze its masks: expected a dense model."
    raise UnsupportedError(message(what, site._fxmask_name, "trace the dense model first, then call fxmask.apply on the trace; or use torch.export."))
