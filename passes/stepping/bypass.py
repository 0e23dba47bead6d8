"""Finding weights that a model uses past their masks: a masked layer that gets a gradient and never runs, or one whose masked blocks get a gradient."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from ...kernels.errors import first_of, message, warn
from ...kernels.grid import expand_mask, to_blocks
from ..finding.readers import OF_TORCH, calls, weight_readers
from ..state import ranks
from ..state.site import Site
from ..state.site_forward import traced_alike
from ..state.tensors import capturing, has_values
from .guarded_weight import Guarded

BASE = "base_layer"  # what PEFT calls the layer that an adapter is put around
Found = Iterable[tuple[str, Site, Tensor | None]]


def warn_of_dense_readers(found: Found) -> None:
    """FxMaskWarning, once a layer, where a weight has a gradient though its masked forward has never run: whoever made the gradient read `.weight`."""
    bypassed = [(name, site) for name, site, grad in _suspects(found) if not site._fxmask_told and not _ran_unseen(site, grad)]
    if bypassed:
        for _, site in bypassed:
            site._fxmask_told = True
        what = "a masked layer trains and its masked forward has never run: something reads its .weight directly, and is dense."
        fix = "fxmask.apply(..., overrides={layer: {'read': 'weight'}}) if a module that holds the layer reads it in its forward; or exclude it."
        fix += " Where a copy of the model has made the gradients, they are as the copy is."
        if ranks.several():
            fix += " This is what this process saw: a layer that ran on another rank alone is masked there."
        warn(message(what, first_of([name for name, _ in bypassed]), fix))


def never_run(found: Found) -> list[str]:
    """Weights with a gradient whose masked forward has not run; that gradient may be older than the masks. Notes nothing, so that a step still warns."""
    unseen = [(name, site, grad) for name, site, grad in _suspects(found) if not _readable(grad) or bool(grad.any())]  # one of zeros nothing has written to
    return [name for name, site, grad in unseen if traced_alike(site) is None or (_tells(site, grad) and _as_masked(site, grad) is False)]


def read_by_adapters(model: nn.Module) -> list[str]:
    """Frozen masked layers that have never run, though the adapter around them trains: PEFT's HRA and SHiRA compute with the base weight as it is.

    An adapter is what calls the layer so, or says in its forward's source that it reads the weight, as PEFT's others do to merge it. Compiled code notes
    nothing of a layer that it runs: there an adapter is believed that reads the weight and does not call the layer.
    """
    readers, found = weight_readers(model, nn.Module), []
    bases = {id(base): owner for owner in model.modules() if (base := owner._modules.get(BASE)) is not None}
    for name, m in model.named_modules():
        if not isinstance(m, Site) or m._fxmask_called or any(p.requires_grad for p in m.parameters()):
            continue
        owners = [o for o in readers.get(id(m), ()) if not _is_known(o, m)]
        if traced_alike(m) is None:
            owners += [bases[id(m)]] if id(m) in bases else []
        else:
            owners = [o for o in owners if not calls(o, m)]
        if any(p.grad is not None for owner in owners for p in owner.parameters()):
            found.append(name)
    return found


def _is_known(owner: nn.Module, layer: nn.Module) -> bool:
    """Whether `fxmask.apply` knew of the owner: its reads are masked; or it is PyTorch's, of which `fxmask.sites.read_dense` tells."""
    return isinstance(owner, OF_TORCH) or bool(getattr(owner, "_fxmask_reads", False) and getattr(layer, "_fxmask_reads", False))


def warn_of_adapters(model: nn.Module) -> None:
    """FxMaskWarning where `read_by_adapters` finds some."""
    if found := read_by_adapters(model):
        what = "a frozen masked layer never runs, though the adapter around it trains: it computes with the layer's weight as it is, which is dense."
        fix = "fxmask.finalize(model) before the adapter is put around it writes the zeros into the weight; or exclude these layers from fxmask.apply. An"
        fix += " adapter of your own that reads self.<layer>.weight in its forward is masked, too, where fxmask.apply comes after it."
        warn(message(what, first_of(found), fix))


def _suspects(found: Found) -> list[tuple[str, Site, Tensor]]:
    """The gradients of trained weights whose layers have not run their masked forward."""
    known = [(name, site, w) for name, site, w in found if w is not None]
    ran = {id(w) for _, site, w in known if site._fxmask_called}
    return [(name, site, w.grad) for name, site, w in known if id(w) not in ran and w.is_leaf and w.requires_grad and w.grad is not None]


def _readable(grad: Tensor) -> bool:
    """Whether the device may be asked for the gradient's values, and this rank has them all."""
    return _readable_here(grad) and not ranks.is_shard(grad)


def _readable_here(grad: Tensor) -> bool:
    """Whether the device may be asked for the values that this rank has."""
    return has_values(grad) and grad.layout == torch.strided and not capturing(grad)


def _ran_unseen(site: Site, grad: Tensor) -> bool:
    """Whether code that the compiler traced for a layer like this one has run it, by which nothing is noted: the gradient tells, where the mode lets it.

    Reads the device, once for such a layer.
    """
    dtype = traced_alike(site)
    if dtype is None:
        return False
    site._fxmask_seen = dtype
    masked = _as_masked(site, grad) if _tells(site, grad) else True
    if masked is None:  # a later step will tell
        return True
    site._fxmask_called = masked
    return masked


def _tells(site: Site, grad: Tensor) -> bool:
    """Whether a gradient may be looked at, and shows by its blocks if a masked forward made it."""
    c = site._fxmask_config
    return c.backward == "masked" and c.ties == "lowest" and _readable(grad)


def _as_masked(site: Site, grad: Tensor) -> bool | None:
    """Whether no more blocks have a gradient than the mask keeps, or kept at the last rebuild when the gradient may have been made; None where that is all, or
    where the gradient has broken."""
    c, blocks, step = site._fxmask_config, site._fxmask_blocks, site._fxmask_step
    keep = c.keep_at(step, blocks) if site._fxmask_mask is None else int(site._fxmask_mask.sum())
    keep = max(keep, c.keep_at(max(0, step - max(1, c.refresh)), blocks))
    return None if keep == blocks or has_broken(grad) else int((to_blocks(grad, c.block) != 0).any(2).sum()) <= keep


def gradient_of(g: Guarded) -> Tensor | None:
    """The whole one, of which a step may show its optimiser a part."""
    return g.weight.grad if g.gradient is None else g.gradient


def has_broken(grad: Tensor) -> bool:
    """Whether a gradient has elements that are not finite: it says nothing of masks then, since clipping multiplies all of it by NaN, zeros included. That is
    how the first steps of a GradScaler begin, and fused optimisers skip such a step by themselves. False where it may not be looked at."""
    return _readable_here(grad) and not bool(ranks.part(grad).isfinite().all())


def warn_of_dense_gradients(guarded: Iterable[Guarded]) -> None:
    """FxMaskWarning where masked blocks have a gradient and the backward mode gives them none. Reads the device: for a layer's first masked step alone."""
    found = []
    for g in guarded:
        grad, config = gradient_of(g), g.site._fxmask_config
        if config.backward != "masked" or g.mask is None or grad is None or not _readable_here(grad):
            continue
        masked = ~ranks.part_like(expand_mask(g.mask, g.weight.shape, config.block), g.weight)
        if bool((masked & (ranks.part(grad) != 0)).any()):
            found.append(g)
    if found:
        what = f"masked blocks of {first_of([g.name for g in found])} have a gradient, which backward='masked' gives them none of."
        why = "Something uses the weight past its mask (a second reader, a tied layer, a penalty on weights), the backward ran inside fxmask.dense, or"
        why += " the gradient is of before fxmask.apply: optimizer.zero_grad() clears it. Or the weights were others in the forward (SAM, extragradient) and"
        why += " their masks, too, which refresh=2 and more would hold; or something has written into .grad."
        if ranks.several():
            why += " Or another rank, whose gradients are averaged with these, has other masks: give all ranks the same settings, weights and steps."
        why += " Under masked_weights='free' the step moves them." if all(g.policy == "free" for g in found) else " The step drops it."
        warn(f"{what} {why}")
