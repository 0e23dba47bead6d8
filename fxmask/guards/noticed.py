"""What a guard notices before a step, and warns of: layers masked without it, a step that broke off, layers replaced, weights used past their masks."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ..decided import decided_by_apply, times_applied
from ..kernels.errors import first_of, message, warn
from ..passes.state.pruning_schedule import is_announced
from ..passes.state.site_mask import masks_any
from ..passes.stepping.bypass import gradient_of, has_broken, warn_of_adapters, warn_of_dense_gradients
from ..passes.stepping.guarded_weight import Guarded
from ..passes.stepping.held import group_of
from ..sites import sites
from .guarded import Held
from .lost_state import stepped_with, warn_of_lost_state
from .replaced import warn_of_replaced


class Noticed:
    """What a guard has seen so far, so that it says each thing once."""

    def __init__(self, model: nn.Module) -> None:
        self.model = weakref.ref(model)  # the optimiser must not keep it
        self._parts = [weakref.ref(m) for m in model.modules()]  # a list that was made for the guard goes before its models
        self.looked_at: set[int] = set()  # ids of sites whose first masked step has been looked at
        self._missed: set[int] = set()  # ids of sites that a step had no gradient for
        self._applied = times_applied()
        self._new: set[int] = set()  # ids of modules whose masks, or schedules of pruned inputs, begin with the guard

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "model": gone, "_parts": []}

    def alive(self) -> list[nn.Module]:
        """What the guard was given, as far as it is still there."""
        return [m for part in self._parts if (m := part()) is not None]

    def begin(self, optimizer: Optimizer, held: Held) -> None:
        """Before the guard tells them of its steps."""
        new = [m for m in stepped_with(held) if not m[1]._fxmask_announced]
        pruned = [(name, m) for name, m in held.countable(optimizer) if not is_announced(m)]
        self._new = {*(id(site) for _, site, _ in new), *(id(m) for _, m in pruned)} - warn_of_lost_state(optimizer, new, pruned)

    def look_at_the_start(self, optimizer: Optimizer, held: Held) -> None:
        """Before the first step: an optimiser's state may be loaded after the guard, and adapters may come."""
        new = [m for m in stepped_with(held) if id(m[1]) in self._new]
        warn_of_lost_state(optimizer, new, [(name, m) for name, m in held.counted() if id(m) in self._new])
        self._new = set()
        if (model := self.model()) is not None:
            warn_of_adapters(model)

    def warn_of_new_masks(self, optimizer: Optimizer, held: Held, awaited: Iterable[Tensor]) -> None:
        """FxMaskWarning, once, where layers were masked after the guard, for the first time or again, and nobody guards them.

        `awaited`: weights that guards of this optimiser take up as they come.
        """
        if self._applied == times_applied():
            return
        self._applied, model = times_applied(), self.model()
        again = any(decided_by_apply(w) for _, _, w in held.lost)
        found = held.lost if model is None else sites(model)
        free = [(n, s, w) for n, s, w in found if s.__dict__.get("_fxmask_policy", "") is None and isinstance(w, nn.Parameter)]
        left = [(n, w) for n, s, w in free if not s._fxmask_announced or s._fxmask_unguarded]  # others are told by hand
        taken = set(map(id, awaited))
        bare = [n for n, w in left if group_of(optimizer, w) is not None and id(w) not in taken]
        held.lost = [] if again else held.lost
        if bare:
            what = "layers were masked after fxmask.guard, which does not hold them"
            fix = "call remove() on its handle, then fxmask.guard(optimizer, model) again."
            if again:
                what = "a guard ended with fxmask.restore, and its model is masked anew"
                fix = "call fxmask.guard(optimizer, model) again; or remove() on the handle of the old guard, if that is meant."
            warn(message(f"{what}: expected a new guard, got none. Masked weights move, steps do not count.", first_of(bare), fix))

    def look_for_replaced(self, guarded: Sequence[Guarded]) -> None:
        """FxMaskWarning where a layer is gone from the model. Once for each: those of a branch that does not always run have no gradient, either."""
        missing = [g for g in guarded if g.weight.grad is None and g.weight.requires_grad]  # all that a step sees of a layer that is gone
        suspects = [g for g in missing if id(g.site) not in self._missed]
        self._missed.update(id(g.site) for g in suspects)
        if suspects and (model := self.model()) is not None:
            warn_of_replaced(model, suspects)

    def look_at_gradients(self, guarded: Sequence[Guarded]) -> None:
        """Once for each layer, at its first step with masked blocks and numbers: these have a gradient where the weight is read past its mask."""
        if len(self.looked_at) < len(guarded):
            new = [g for g in guarded if id(g.site) not in self.looked_at and g.weight.grad is not None]
            masked = [g for g in new if g.mask is not None and masks_any(g.site) and (grad := gradient_of(g)) is not None and not has_broken(grad)]
            self.looked_at.update(id(g.site) for g in masked)
            warn_of_dense_gradients(masked)


def warn_of_broken_step(guarded: Sequence[Guarded]) -> None:
    """FxMaskWarning where the last step raised, so that no hook of ours came after it, unless weights were loaded since. Nothing is put back: whoever caught
    the error may have written weights by now."""
    broken = [g.name for g in guarded if g.copied and not g.site._fxmask_loaded_since_step]
    if broken:
        what = "the last optimizer.step() raised half-way: masked weights and momenta that it had moved by then were not put back."
        fix = "go on from a saved state; fxmask.guard(optimizer, model, masked_step=True) makes steps that leave all of them as they were when they raise."
        warn(message(what, first_of(broken), fix))
    for g in guarded:
        g.site.__dict__["_fxmask_loaded_since_step"] = False


def gone() -> None:
    """A weak reference whose object is gone, that can be pickled."""
