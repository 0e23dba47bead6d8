"""What an optimiser's step does to masked weights: nothing (freeze), decay alone (decay), or whatever it does (free); for any torch.optim.Optimizer.

Two hooks around `optimizer.step`: the first keeps what the step may overwrite, the second writes the masked part back. So the optimiser's own arithmetic,
plain, foreach, fused or capturable, is never touched, and what is kept is bit-identical.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ...kernels.errors import UnsupportedError, message
from ...kernels.grid import expand_mask
from ..settings.config import WeightMask
from ..state import ranks
from ..state.site import Site, has_values
from ..state.site_forward import mask_of_step
from ..state.site_mask import mask_outside
from . import gathered, set_aside
from .held import find_wrapped, moves_by_grad, states_of

POLICIES = ("auto", "freeze", "decay", "free")
RETURNING = ("keep", "zero")
EVERY = "*"
STEP_SIZE, AVERAGE = "step_size", "ax"  # of Rprop, which begins at the lr, and of ASGD, at the weight
NO_MOMENTA = (STEP_SIZE, AVERAGE)


def policy_of(config: WeightMask, policy: str) -> str:
    """What `auto` means: freeze where masked weights get no gradient or start anew when they return, free where the mode lives on it."""
    if policy != "auto":
        return policy
    return "freeze" if may_freeze(config) else "free"


def may_freeze(config: WeightMask) -> bool:
    """Whether frozen masked weights leave the mode its sense: not where it waits for them to move."""
    return config.backward == "masked" or (config.backward == "rigl" and config.regrow is not None)


@dataclass
class Guarded:
    """One masked weight in an optimiser, and what its step must not overwrite."""

    name: str
    site: Site
    weight: Tensor
    choice: str  # what the guard was asked for
    clear: str = ""  # under freeze: which state is zero while masked, instead of keeping its bits: one key, or EVERY
    mask: Tensor | None = None
    block: tuple[int, int] = (1, 1)  # of that mask
    before: Tensor | None = None
    momenta: dict[str, Tensor] = field(default_factory=dict)
    aside: list[set_aside.Kept] | None = None  # where that was done by kernels, of all weights; `momenta` has the names then, and the tensors themselves
    gathered: gathered.Gathered | None = None  # in place of `before`: what masked blocks held, as `momenta` is then, too
    gradient: Tensor | None = None  # whole, where the step was given that of kept blocks alone
    last: tuple[Tensor, tuple[int, int]] | None = None  # mask and block before the step, where blocks that return have no momenta
    had_gradient: bool = False  # before the step, which may take it away
    by_grad: bool = True  # whether the optimiser surely moves it by its gradient alone
    stateless: bool = False  # the last step moved the weight, and the optimiser has no state for it; known of a mask by momenta
    by_momenta: bool = False  # it is one, in some phase
    found: tuple[Tensor, Any, Any] | None = None  # of what gathers blocks: a cached mask, as it was, and where they lie

    def clears(self, key: str) -> bool:
        """Whether this state is zero while masked."""
        return _word(key) == self.clear or (self.clear == EVERY and _word(key) not in NO_MOMENTA)

    def forget(self) -> None:
        """Let go of what the step was not to overwrite."""
        self.mask = self.before = self.gradient = self.aside = self.gathered = None
        self.momenta = {}

    @property
    def moved(self) -> bool:
        """After a step: whether it may have moved, by a gradient, which a closure makes inside and some steps take away, or without."""
        return not self.by_grad or self.had_gradient or self.weight.grad is not None

    @property
    def into(self) -> Tensor:
        """The weight, or this process's part, to write back into.

        One without a gradient may not have moved, and keeps its version: who still needs it for a backward must not take it for another one.
        """
        part = ranks.part(self.weight)
        return part if self.had_gradient or self.weight.grad is not None else part.data

    @property
    def policy(self) -> str:
        """Of the step that is next: `auto` follows the backward mode from phase to phase."""
        return policy_of(self.site._fxmask_config, self.choice)


def group_of(optimizer: Optimizer, weight: Tensor) -> dict[str, Any] | None:
    """The parameter group that holds a weight, by identity; None where none does."""
    return next((g for g in optimizer.param_groups if any(p is weight for p in g["params"])), None)


def _momenta(optimizer: Optimizer, weight: Tensor) -> dict[str, Tensor]:
    """Tensors of the optimiser's state that have an element for each of the weight's; of a sharded weight, for each of this process's part.

    Integers are codes of values (8-bit optimisers), of which nobody here knows the scale: they are the optimiser's.
    """
    every = ((f"{i}:{k}" if i else k, t) for i, state in enumerate(states_of(optimizer, weight)) for k, t in state.items())  # a wrapped one's with a number
    found = {k: t for k, t in every if isinstance(t, Tensor) and t.ndim == weight.ndim and t.is_floating_point()}
    if not ranks.is_shard(weight):
        return {k: t for k, t in found.items() if t.shape == weight.shape}
    shape, parts = ranks.part(weight).shape, {}
    for k, t in found.items():
        if ranks.is_shard(t) and t.shape == weight.shape and t.placements == weight.placements:  # type: ignore[attr-defined]
            parts[k] = ranks.part(t)
        elif not ranks.is_shard(t) and t.shape == shape:  # an optimiser that works on its own part
            parts[k] = t
        elif t.shape == weight.shape:
            what = f"the optimiser's {k!r} lies otherwise than its weight: expected it sharded as the weight is ({weight.placements})."  # type: ignore[attr-defined]
            raise UnsupportedError(message(what, type(optimizer).__name__, "use an optimiser that shards its state, or masked_weights='free'."))
    return parts


def _word(key: Any) -> Any:
    """What the optimiser that has a state calls it."""
    return key.rpartition(":")[2] if isinstance(key, str) else key  # some number their states


def is_copy(key: Any, t: Tensor, w: Tensor) -> Tensor:
    """Whether a state is a copy of the weight (an average, slow weights, Schedule-Free's z), 0-d bool: ASGD's by its name, others by their values."""
    return ((t - w).norm() < 0.5 * w.norm()) | (_word(key) == AVERAGE)


def _start_anew(g: Guarded, key: Any, t: Tensor, where: Tensor, weight: Tensor) -> None:
    """Let elements of a state begin: at zero; at the weight where the state is a copy of it.

    No momentum of such elements is near the weight: their gradient was zero, a decay is a small part of it. What is named to be cleared is known to be one.
    """
    if _word(key) == g.clear:
        t.masked_fill_(where, 0)
        return
    w = weight.to(t)
    copies = is_copy(key, torch.where(where, t, 0), torch.where(where, w, 0))
    t.copy_(torch.where(where, torch.where(copies, w, 0), t))


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
        found = _momenta(optimizer, g.weight) if g.policy == "freeze" else {}
        parts = g.policy == "freeze" and not g.clear  # what is masked alone will do
        if parts and set_aside.fits(g, found):
            taken.append((g, found))
        elif parts and gathered.fits(g, found):
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
    if g.mask is not None and g.site._fxmask_in_place:
        g.mask = g.mask.clone()  # a closure, or another hook, may rewrite it
    g.before = ranks.part(g.weight.detach()).clone()
    if g.clear and g.policy == "freeze":
        _hide_masked(g, found)
    g.momenta = {k: t.detach().clone() for k, t in found.items() if not g.clears(k)}


def _hide_masked(g: Guarded, state: dict[str, Tensor]) -> None:
    """Before a step that looks at whole matrices: neither momenta nor gradients of masked blocks, which would turn the kept ones."""
    assert g.mask is not None
    out = ~_elements(g.mask, g, g.block)
    for k, t in state.items():
        if g.clears(k):
            _start_anew(g, k, t, out, ranks.part(g.weight.detach()))
    if g.site._fxmask_config.backward != "masked" and g.weight.grad is not None:  # a dense gradient, that regrowth is for
        grad = ranks.part(g.weight.grad)
        g.gradient = grad.clone()
        grad.masked_fill_(out, 0)


@torch.no_grad()
def after_step(optimizer: Optimizer, guarded: Iterable[Guarded]) -> None:
    """Write the masked part back: as it was, or decayed by the group's lr * weight_decay. State that the step created begins anew there."""
    guarded = list(guarded)
    in_parts = [g for g in guarded if g.aside is not None or g.gathered is not None]
    now = {id(g): _momenta(optimizer, g.weight) for g in in_parts}
    for group in {id(k): k for g in in_parts for k in g.aside or ()}.values():
        group.put_back(now)
    for g in in_parts:
        if g.gathered is not None and g.moved:
            g.gathered.put_back(g, now[id(g)])
        for k, t in now[id(g)].items():
            if g.mask is not None and g.moved and k not in g.momenta and _word(k) != STEP_SIZE:
                _start_anew(g, k, t, ~_elements(g.mask, g, g.block), g.weight.detach())  # the weight is as it was by now
    for g in guarded:
        if g.mask is not None and g.before is not None and g.moved:
            kept, old = _elements(g.mask, g, g.block), g.before
            if g.policy == "decay":
                old = _decayed(optimizer, g, old)
            else:
                _rest_momenta(optimizer, g, kept, old)
            g.into.copy_(torch.where(kept, ranks.part(g.weight), old))
            if g.gradient is not None and g.weight.grad is not None:
                ranks.part(g.weight.grad).copy_(g.gradient)
        g.forget()


def _decayed(optimizer: Optimizer, g: Guarded, old: Tensor) -> Tensor:
    group = group_of(optimizer, g.weight) or {}
    decayed = old * (1 - group.get("lr", 0.0) * group.get("weight_decay", 0.0))
    if not g.by_grad and not g.had_gradient and g.weight.grad is None:  # only the weight can tell whether it was stepped
        decayed = torch.where((ranks.part(g.weight) != old).any(), decayed, old)
    skipped = getattr(optimizer, "found_inf", None)  # GradScaler lets a fused step run, and it moves nothing
    return decayed if skipped is None else torch.where(skipped.to(old.device) != 0, old, decayed)


def _rest_momenta(optimizer: Optimizer, g: Guarded, kept: Tensor, old: Tensor) -> None:
    for k, t in _momenta(optimizer, g.weight).items():
        was = g.momenta.get(k)
        if was is not None:
            t.copy_(torch.where(kept, t, was.to(t.device)))
        elif _word(k) != STEP_SIZE:
            _start_anew(g, k, t, ~kept, old)


@torch.no_grad()
def note_masks(optimizer: Optimizer, guarded: Iterable[Guarded], zero: bool) -> None:
    """Before a step, and after `before_step`: note the masks that `reset_returned` compares; of all weights with `zero`, else where blocks regrow.

    A step that leaves a weight alone moves its mask all the same. Masked blocks of a soft mask learn, and keep their momenta unless growth starts them anew.
    """
    for g in guarded:
        regrows, g.last = g.site._fxmask_config.regrow is not None, None
        if regrows or (zero and not g.site._fxmask_softening and (g.mask is not None or _momenta(optimizer, g.weight))):
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
        for k, t in _momenta(optimizer, g.weight).items():
            if _word(k) not in NO_MOMENTA:
                _start_anew(g, k, t, elements, ranks.part(g.weight.detach()))


def _known_alike(old: Tensor, now: Tensor) -> bool:
    """Whether two block masks are known to be the same: they are one tensor, or lie where the host can look without a wait."""
    return now is old or (old.device.type == now.device.type == "cpu" and has_values(now) and torch.equal(old, now))
