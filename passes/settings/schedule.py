"""How the ratio moves over optimiser steps: plain numbers on the host. A forward reads a scalar that `passes.state.tensors` fills, so nothing recompiles."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from ...kernels.errors import ConfigError
from ...kernels.grid import ratio_units
from .checks import at_least, one_of

RAMPS: dict[str, Callable[[float], float]] = {  # how far it still is to the target, of 1, by how much of the ramp is left
    "linear": lambda left: left,
    "cubic": lambda left: left**3,
    "cosine": lambda left: (1 - math.cos(math.pi * left)) / 2,
}
SCHEDULES = ("constant", *RAMPS, "exponential", "cyclic")


@dataclasses.dataclass(frozen=True)
class Schedule:
    """How the ratio moves from `initial` to its target over `steps` optimiser steps, counted from the config's `start`.

    The first `warmup` steps stay at `initial`, the last `cooldown` steps are spent at the target, and from `steps` on the ratio is exactly the target. On the
    ramp in between t goes from 0 to 1:

    | kind | ratio | |
    | --- | --- | --- |
    | `constant` | target, at once | |
    | `linear` | target + (initial - target) (1 - t) | |
    | `cubic` | target + (initial - target) (1 - t)^3 | Zhu and Gupta 2017 (arXiv:1710.01878), eq. 1 |
    | `cosine` | target + (initial - target) (1 + cos(pi t)) / 2 | Loshchilov and Hutter 2017 (arXiv:1608.03983), eq. 5, for a ratio |
    | `exponential` | 1 - (1 - initial)^(1 - t) (1 - target)^t: what is kept shrinks by one factor a step | de Jorge et al. 2021 (arXiv:2006.09081) |
    | `cyclic` | `cubic`, `cycles` times, each from `initial` again: masked blocks come back | periodic as in Srinivas et al. 2022 (arXiv:2202.01290) |

    All but `cyclic` are monotone, and none leaves the range between `initial` and the target.

    Args:
        kind: one of the table. steps: length in optimiser steps with warm-up and cool-down, at least 1. initial: the ratio at the first step, in [0, 1).
        cycles: of `cyclic`, at least 1, and each at least a step long. warmup, cooldown: optimiser steps; together fewer than `steps`.

    Raises: ConfigError.
    """

    kind: str = "cubic"
    steps: int = 1000
    initial: float = 0.0
    cycles: int = 1
    warmup: int = 0
    cooldown: int = 0

    def __post_init__(self) -> None:
        one_of("schedule", self.kind, SCHEDULES)
        for name, low in (("steps", 1), ("warmup", 0), ("cooldown", 0)):
            object.__setattr__(self, name, at_least(f"Schedule.{name}", getattr(self, name), low))
        try:
            ratio_units(self.initial)
        except ConfigError as e:
            raise ConfigError(f"Schedule.initial: {e}") from None
        object.__setattr__(self, "initial", float(self.initial))  # numpy's numbers could not be saved
        if self.warmup + self.cooldown >= self.steps:
            got = f"warmup={self.warmup} + cooldown={self.cooldown} of steps={self.steps}"
            raise ConfigError(f"a schedule without a ramp: expected warmup + cooldown below steps, got {got}; raise steps, which counts all three.")
        object.__setattr__(self, "cycles", at_least("Schedule.cycles", self.cycles, 1, "the ramps of a cyclic schedule"))
        if self.cycles > self.ramp:
            raise ConfigError(f"Schedule.cycles: expected at most one for each of the {self.ramp} steps of the ramp, got {self.cycles}; raise steps.")
        if self.cycles > 1 and self.kind != "cyclic":
            raise ConfigError(f"cycles={self.cycles} is for kind='cyclic': expected cycles=1 with kind={self.kind!r}.")
        if self.kind == "constant" and (self.warmup or self.cooldown):
            got = f"warmup={self.warmup}, cooldown={self.cooldown}"
            raise ConfigError(f"kind='constant' has no ramp: expected no warmup and no cooldown, got {got}; start= of the mask delays its first step.")

    @property
    def ramp(self) -> int:
        """Optimiser steps between warm-up and cool-down, at least 1."""
        return self.steps - self.warmup - self.cooldown

    @property
    def moves(self) -> bool:
        """Whether the ratio depends on the step."""
        return self.kind != "constant" or type(self).ratio_at is not Schedule.ratio_at  # a class of a user's own

    def ratio_at(self, step: int, target: float) -> float:
        """The ratio `step` steps after the start, in [0, 1); exactly `initial` through the warm-up, exactly `target` from `steps - cooldown` on.

        Raises: ConfigError for a target outside of [0, 1).
        """
        try:
            ratio_units(target)
        except ConfigError as e:
            raise ConfigError(f"a schedule cannot end at a ratio of {target!r}, where nothing is kept; {e}") from None
        done = step - self.warmup
        if self.kind == "constant" or done >= self.ramp:
            return target
        if self.kind == "cyclic":  # in integers, so that every cycle has the same bits
            done = max(done, 0) * self.cycles % self.ramp
        if done <= 0:
            return self.initial
        ratio = self._between(done, target)
        return min(max(ratio, min(self.initial, target)), max(self.initial, target))  # a rounding may overshoot by a bit

    def _between(self, done: int, target: float) -> float:
        """The ratio `done` ramp-ths of the way, 0 < done < ramp."""
        left = 1 - done / self.ramp
        if self.kind == "exponential":
            return 1 - (1 - target) * ((1 - self.initial) / (1 - target)) ** left
        return target + (self.initial - target) * RAMPS["cubic" if self.kind == "cyclic" else self.kind](left)
