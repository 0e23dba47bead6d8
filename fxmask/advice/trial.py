"""A copy of the model whose whole steps are timed: dense, and as a plan would mask it."""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..bench.stopwatch import Stopwatch
from ..errors import UnsupportedError
from ..kernels.errors import message
from ..masking import apply
from ..steps import refresh as rebuild_all
from .plan import Plan
from .step import optimizer_of, page_faults, step_seconds, stepper, usage
from .unit import MakeOptimizer, guarded


def copied(model: nn.Module) -> nn.Module:
    """A copy that shares nothing with the model, in training; UnsupportedError where there can be none."""
    try:
        made = copy.deepcopy(model)
        own = {id(t) for t in (*model.parameters(), *model.buffers())}
        if made is model or any(id(t) in own for t in (*made.parameters(), *made.buffers())):
            raise TypeError("the copy shares parameters or buffers with the model")
        return made.train()
    except Exception as e:
        what = f"advise runs a copy of the model: expected one that can be copied, got {type(e).__name__}: {str(e)[:200]}"
        raise UnsupportedError(message(what, "", "copy.deepcopy(model) must work, with memory for a second model; give a shallower one.")) from e


@dataclasses.dataclass
class Trial:
    """The copy, and how it is trained."""

    model: nn.Module
    given: tuple[tuple[Any, ...], Mapping[str, Any]]
    loss: Callable[[Any], Tensor]
    make: MakeOptimizer | None
    refresh: int
    options: dict[str, Any]  # of masks, beside block and ratio
    device: torch.device

    def dense(self, seconds: float) -> float:
        """Seconds of a dense step."""
        step = self._stepper(self.model, optimizer_of(self.model, self.make))
        found = step_seconds({"dense": step}, self.device, seconds)["dense"]
        self.model.zero_grad(set_to_none=True)
        return found

    def _stepper(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Callable[[], None]:
        return stepper(model, *self.given, self.loss, optimizer)

    def of(self, plan: Plan, until: float, notes: list[str]) -> tuple[float, float] | None:
        """Seconds of the dense step and of the plan's, in turns; None where it was not tried."""
        left = until - time.perf_counter()
        if left < 10 * plan.step:
            notes.append("The advice was not tried: no time was left.")
            return None
        try:
            masked = apply(copied(self.model), **plan.arguments(0, self.options))
            optimizer = optimizer_of(masked, self.make)
            if optimizer is not None:
                guarded(optimizer, masked)
            steps = {"dense": self._stepper(self.model, optimizer_of(self.model, self.make)), "masked": self._stepper(masked, optimizer)}
            for step in steps.values():
                step()  # what it takes for the first time would count as page faults
            before = usage()
            took = step_seconds(steps, self.device, left / 2)
            if self.device.type == "cpu" and (said := page_faults(before, usage())):
                notes.append(said)
        except torch.OutOfMemoryError:
            notes.append("The advice was not tried: the device's memory does not hold the model three times.")
            return None
        again = Stopwatch(self.device)(lambda: rebuild_all(masked)) / self.refresh if self.refresh else 0.0
        return took["dense"], took["masked"] + again


def outcome(plan: Plan, tried: tuple[float, float], target: float) -> str:
    """What is said of a trial."""
    gain = tried[0] / tried[1]
    at = f" at {100 * plan.ratio:g} %: {gain:.2f} times as fast as dense ({1e3 * tried[0]:.3g} ms against {1e3 * tried[1]:.3g} ms)."
    if gain < 1:
        return f"Tried on a copy{at} That is slower than dense, though {plan.gain:.2f} were predicted: it is not advised."
    return f"Tried on a copy{at}" + (f" That is below the target of {target:g}." if gain < target else "")
