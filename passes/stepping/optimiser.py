"""What an optimiser's step does to masked weights: nothing (freeze), decay alone (decay), or whatever it does (free); for any torch.optim.Optimizer.

Two hooks around `optimizer.step`: the first keeps what the step may overwrite, the second writes the masked part back. So the optimiser's own arithmetic,
plain, foreach, fused or capturable, is never touched, and what is kept is bit-identical. There are three ways to keep it: under freeze what masked blocks
hold, of all weights at once where kernels run (`set_aside`), gathered of a large weight on a CPU (`gathered`); of all others copies of whole tensors.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ...kernels.grid import expand_mask
from ..state import ranks
from ..state.site_forward import mask_of_step
from ..state.site_mask import mask_outside
from ..state.tensors import has_values
from . import gathered, set_aside
from .guarded_weight import Guarded
from .held import find_wrapped, group_of, moves_by_grad
from .momenta import NO_MOMENTA, STEP_SIZE, momenta_of, start_anew, word


def _elements(mask: Tensor, g: Guarded, block: tuple[int, int]) -> Tensor:
    """A block mask as one of elements; of a sharded weight, of this process's part."""
    return ranks.part_like(expand_mask(mask, g.weight.shape, block), g.weight)


@torch.no_grad()
def before_step(optimizer: Optimizer, guarded: Iterable[Guarded], closure: bool = False) -> None:
    """Keep the weights, and under freeze their momenta, of what is about to step, and the mask that its gradient was made under.

    A closure makes the gradients inside the step, so that before it nothing says which weights will move.
    """
    taken: list[tuple[Guarded, dict[str, Tensor]]] = []
    by_grad = moves_by_grad(optimizer)
    find_wrapped(optimizer)  # one may have been put around another since
    for g in guarded:
        g.forget()
        g.had_gradient, g.by_grad = g.weight.grad is not None, by_grad
        if by_grad and not g.had_gradient and not (closure and g.weight.requires_grad):  # the optimiser leaves it alone
            continue
        if g.site._fxmask_softening:  # masked blocks still compute, and learn
            continue
        g.mask, g.block = mask_of_step(g.site, g.weight), g.site._fxmask_config.block
        if g.policy == "free":
            continue
        found = momenta_of(optimizer, g.weight) if g.policy == "freeze" else {}
        masked_alone = g.policy == "freeze" and not g.clear
        if masked_alone and set_aside.fits(g, found):
            taken.append((g, found))
        elif masked_alone and gathered.fits(g, found):
            gathered.gather(g, found)
        else:
            _clone(g, found)
    aside = set_aside.begin(taken) if taken else None
    for g, found in taken:
        if aside is None:
            _clone(g, found)
        else:
            g.aside, g.momenta = aside, found


def _clone(g: Guarded, found: dict[str, Tensor]) -> None:
    """Copies of the whole weight and its momenta."""
    assert g.mask is not None
    if g.site._fxmask_in_place:
        g.mask = g.mask.clone()  # a closure, or another hook, may rewrite it
    g.before = ranks.part(g.weight).clone()
    if g.clear and g.policy == "freeze":  # a step that looks at whole matrices: momenta and gradients of masked blocks would turn the kept ones
        out = ~_elements(g.mask, g, g.block)
        for k, t in found.items():
            if g.clears(k):
                start_anew(g, k, t, out, ranks.part(g.weight))
        _hide_gradient(g, out)
    g.momenta = {k: t.clone() for k, t in found.items() if not g.clears(k)}


def _hide_gradient(g: Guarded, out: Tensor) -> None:
    if g.weight.grad is not None:  # dense where regrowth wants it, and where something reads the weight past its mask
        grad = ranks.part(g.weight.grad)
        g.gradient = grad.clone()
        grad.masked_fill_(out, 0)


def _show_gradient(g: Guarded, out: Tensor) -> None:
    """Make a gradient whole again, unless it was written into since, as by a step that ends with zeros in it."""
    if g.gradient is not None and g.weight.grad is not None:
        grad = ranks.part(g.weight.grad)
        grad.copy_(torch.where(((grad == g.gradient) | out).all(), g.gradient, grad))


def hiding(closure: Any, guarded: Iterable[Guarded]) -> Any:
    """A step's closure that hides what it has given of masked blocks, as `before_step` has hidden what was there; it begins with whole gradients.

    Any other argument of a step as it is.
    """
    if not callable(closure):
        return closure
    found = [(g, ~_elements(g.mask, g, g.block)) for g in guarded if g.mask is not None and g.clear and g.policy == "freeze"]

    def hidden(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            for g, out in found:
                _show_gradient(g, out)
        made = closure(*args, **kwargs)
        with torch.no_grad():
            for g, out in found:
                _hide_gradient(g, out)
        return made

    return hidden if found else closure


@torch.no_grad()
def after_step(optimizer: Optimizer, guarded: Iterable[Guarded]) -> None:
    """Write the masked part back: as it was, or decayed by the group's lr * weight_decay. State that the step created begins anew there."""
    guarded = list(guarded)
    _put_back(optimizer, [g for g in guarded if g.aside is not None or g.gathered is not None])
    for g in guarded:
        if g.mask is not None and g.before is not None and g.moved:  # copies
            kept = _elements(g.mask, g, g.block)
            old = LEFT.get(g.policy, _frozen)(optimizer, g, kept, g.before)  # free by now: a state that a closure has loaded is of a later phase
            g.into.copy_(torch.where(kept, ranks.part(g.weight), old))
            _show_gradient(g, ~kept)
        g.forget()


def _put_back(optimizer: Optimizer, guarded: list[Guarded]) -> None:
    """What masked blocks held, set aside or gathered."""
    now = {id(g): momenta_of(optimizer, g.weight) for g in guarded}
    for group in {id(k): k for g in guarded for k in g.aside or ()}.values():
        group.put_back(now)
    for g in guarded:
        if g.gathered is not None and g.moved:
            g.gathered.put_back(g, now[id(g)])
        for k, t in now[id(g)].items():
            if g.mask is not None and k not in g.momenta and word(k) != STEP_SIZE:
                start_anew(g, k, t, ~_elements(g.mask, g, g.block), g.weight.detach())  # the weight is as it was by now


def _decayed(optimizer: Optimizer, g: Guarded, kept: Tensor, old: Tensor) -> Tensor:
    group = group_of(optimizer, g.weight) or {}
    decayed = old * (1 - group.get("lr", 0.0) * group.get("weight_decay", 0.0))
    stepped = (ranks.part(g.weight) != old).any()  # nothing else tells of all steps that are skipped, as under a GradScaler
    return torch.where(stepped, decayed, old)


def _frozen(optimizer: Optimizer, g: Guarded, kept: Tensor, old: Tensor) -> Tensor:
    for k, t in momenta_of(optimizer, g.weight).items():
        was = g.momenta.get(k)
        if was is not None:
            t.copy_(torch.where(kept, t, was.to(t.device)))
        elif word(k) != STEP_SIZE:
            start_anew(g, k, t, ~kept, old)
    return old


LEFT = {"freeze": _frozen, "decay": _decayed}  # policy: what a step leaves in masked elements, of what they held before it; one for each of KEPT


@torch.no_grad()
def note_masks(optimizer: Optimizer, guarded: Iterable[Guarded], zero: bool) -> None:
    """Before a step, and after `before_step`: note the masks that `reset_returned` compares; of all weights with `zero`, else where blocks regrow.

    A step that leaves a weight alone moves its mask all the same. Masked blocks of a soft mask learn, and keep their momenta unless growth starts them anew.
    """
    for g in guarded:
        regrows, g.last = g.site._fxmask_config.regrow is not None, None
        if regrows or (zero and not g.site._fxmask_softening and (g.mask is not None or momenta_of(optimizer, g.weight))):
            mask = mask_of_step(g.site, g.weight) if g.mask is None else g.mask
            g.last = mask.clone() if g.site._fxmask_in_place else mask, g.site._fxmask_config.block


@torch.no_grad()
def reset_returned(optimizer: Optimizer, guarded: Iterable[Guarded]) -> None:
    """Zero the momenta of blocks that the rebuilt mask keeps and the one that was noted did not."""
    for g in guarded:
        if g.last is None:
            continue
        (old, block), g.last = g.last, None
        now, blocks = mask_outside(g.site, g.weight.detach()), g.site._fxmask_config.block
        if block == blocks and _known_alike(old, now):
            continue
        elements = _elements(now, g, blocks) & ~_elements(old, g, block)  # in elements: a phase may have brought other blocks
        for k, t in momenta_of(optimizer, g.weight).items():
            if word(k) not in NO_MOMENTA:
                start_anew(g, k, t, elements, ranks.part(g.weight.detach()))


def _known_alike(old: Tensor, now: Tensor) -> bool:
    """Whether two block masks are known to be the same: they are one tensor, or lie where the host can look without a wait."""
    return now is old or (old.device.type == now.device.type == "cpu" and has_values(now) and torch.equal(old, now))
