"""One step of a guarded optimiser: what is kept before it, the arguments that it is given, and what is put back after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from ..kernels.errors import UnsupportedError, message
from ..passes.state.saliency import observe
from ..passes.state.site import Site
from ..passes.stepping import masked_step as kept_alone
from ..passes.stepping.guarded_weight import Guarded
from ..passes.stepping.held import moves_by_grad, state_of
from ..passes.stepping.optimiser import after_step, before_step, hiding, note_masks


class GuardedStep:
    """A step under way. `masked_step`: on kept blocks alone, as the guard was asked for it."""

    def __init__(self, optimizer: Optimizer, guarded: list[Guarded], masked_step: bool | str, returning: str, closure: bool) -> None:
        _observe(optimizer, guarded, closure)
        self._guarded, self._closure = guarded, closure
        self._compact = kept_alone.begin(optimizer, guarded, masked_step == "elementwise") if masked_step else None
        self._whole = guarded  # weights that the optimiser steps as they are
        if masked_step:  # those without a gradient: nothing of them is gathered, and an optimiser of somebody's own may move them all the same
            self._whole = [] if moves_by_grad(optimizer) else [g for g in guarded if g.weight.grad is None]
        before_step(optimizer, self._whole, closure)
        note_masks(optimizer, guarded, zero=returning == "zero")

    def arguments(self, args: Any, kwargs: Any) -> Any:
        """What the step is given in place of its arguments; None where these stay."""
        if self._compact is not None:
            return (self._compact.stand_in, *args[1:]), kwargs
        if not self._closure:
            return None
        return (args[0], *(hiding(a, self._guarded) for a in args[1:])), {k: hiding(a, self._guarded) for k, a in kwargs.items()}

    def finish(self, optimizer: Optimizer, is_ours: Callable[[Site], bool]) -> None:
        """Put back what the step was not to move, of weights that are guarded still."""
        if self._compact is not None:
            kept_alone.finish(optimizer, self._compact)
        after_step(optimizer, [g for g in self._whole if is_ours(g.site)])


def _observe(optimizer: Optimizer, guarded: list[Guarded], closure: bool) -> None:
    """Show gradients and momenta to the scores that take them in."""
    blind = next((g for g in guarded if closure and g.site._fxmask_config.needs_grad), None)
    if blind is not None:
        what = "a step with a closure makes its gradients inside, where no score can see them: expected optimizer.step() without one."
        raise UnsupportedError(message(what, blind.name, "use a criterion of the weight alone, without regrow by gradient."))
    scale, skipped = (getattr(optimizer, name, None) for name in ("grad_scale", "found_inf"))  # a GradScaler's, of fused steps
    for g in guarded:
        observe(g.site, g.weight, state_of(optimizer, g.weight), g.stateless, scale, skipped)
