"""A ratio that is driven by what is measured: the rules, in plain numbers on the host. `passes.settings.looks` measures and tells the masks."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, NamedTuple

from ...kernels.errors import ConfigError
from ...kernels.grid import RATIO_UNIT, keep_count, plain_int, ratio_units
from .checks import at_least, is_number, one_of

if TYPE_CHECKING:
    from .config import WeightMask

MEASURES = ("loss", "flip_rate", "bytes")


@dataclasses.dataclass(frozen=True)
class Feedback:
    """A schedule whose ratio is driven by a measured quantity: it begins at `initial` and moves by `change`, never above the mask's ratio or below `initial`.

    | measure | the ratio | every |
    | --- | --- | --- |
    | `loss` | rises while the mean of the reported losses is at most `goal + tolerance * abs(goal)`, falls otherwise | reports |
    | `flip_rate` | rises while the share of a layer's blocks that changed place since the last look is below `goal`, never falls | optimiser steps |
    | `bytes` | rises until the kept blocks of all layers of one `fxmask.apply` are at most `goal` bytes, and rests there | optimiser steps |

    `loss`: `fxmask.feedback(model, loss)` reports it; all ranks do, the same number. Without a goal the best mean so far is one. The change comes with the
    optimiser's next step, so that no mask changes between a forward and its step. Reports before the mask's `start`, of the dense model, count nothing.
    `flip_rate`: of each layer by itself; blocks that a change of the ratio alone moves are not counted; the first look only remembers. `bytes`: of the weights
    in the dtype that they have at `apply`; blocks at ragged edges count as whole ones, so the budget holds for any blocks that are kept, in all phases. The
    last change is cut: of the ratios that meet the budget it ends at the lowest.

    The ratio stays a tensor: nothing recompiles. A cached mask follows when it is built next. All of it is saved by `fxmask.state_dict`.

    Args:
        measure: one of the table. every: reports (`loss`) or optimiser steps from one decision to the next, at least 1.
        goal: `loss`: a loss, or None; `flip_rate`: a share of blocks in (0, 1]; `bytes`: bytes, an int.
        initial: the first ratio, in [0, 1), at most the mask's. change: of the ratio, in (0, 1). tolerance: of `loss`, relative, at least 0.
        stop: of `bytes`, the ratio that meets the budget; `fxmask.apply` finds it.

    Raises: ConfigError; from `apply` also where the budget cannot be met at the mask's ratio.
    Cost: `loss`: none (where there are several ranks, a gather of one number a report). `flip_rate`: every `every` steps a mask a layer that is not cached, and
    one host sync for all layers that an optimiser holds. `bytes`: none.
    Source: the flip rate is that of Hu et al. 2024 (arXiv:2404.01847), of blocks; the rules are ours.
    """

    measure: str
    every: int
    goal: float | None = None
    initial: float = 0.0
    change: float = 0.05
    tolerance: float = 0.0
    stop: float | None = None

    def __post_init__(self) -> None:
        one_of("measure", self.measure, MEASURES)
        counts = "reports of the loss" if self.measure == "loss" else "optimiser steps"
        object.__setattr__(self, "every", at_least("Feedback.every", self.every, 1, counts))
        for name in ("initial", "change", *(["stop"] if self.stop is not None else [])):
            try:
                ratio_units(getattr(self, name))
            except ConfigError as e:
                raise ConfigError(f"Feedback.{name}: {e}") from None
            object.__setattr__(self, name, float(getattr(self, name)))  # numpy's numbers could not be saved
        if not ratio_units(self.change):
            raise ConfigError(f"Feedback.change: expected a change of the ratio above 0 (and of at least 1e-9), got {self.change!r}.")
        self._check_goal()
        for name, unused, measure in (("tolerance", 0.0, "loss"), ("stop", None, "bytes")):
            given = getattr(self, name)
            if self.measure != measure and not (given is unused or (is_number(given) and given == unused)):
                raise ConfigError(f"Feedback.{name} is for measure={measure!r}: expected {unused} with {self.measure!r}, got {given!r}.")
        if not is_number(self.tolerance) or self.tolerance < 0:
            raise ConfigError(f"Feedback.tolerance is a share of the loss: expected a finite number of at least 0, got {self.tolerance!r}.")
        object.__setattr__(self, "tolerance", float(self.tolerance))

    def _check_goal(self) -> None:
        goal = self.goal
        if self.measure == "bytes":
            budget = plain_int(goal)
            if budget is None or budget < 1:
                raise ConfigError(f"Feedback.goal of 'bytes' is a budget: expected a number of bytes, an int of at least 1, got {goal!r}.")
            object.__setattr__(self, "goal", budget)
            return
        if self.measure == "flip_rate" and (not is_number(goal) or not 0 < goal <= 1):
            raise ConfigError(f"Feedback.goal of 'flip_rate' is a share of the blocks: expected a number in (0, 1], got {goal!r}.")
        if goal is not None and not is_number(goal):
            raise ConfigError(f"Feedback.goal of 'loss' is a loss: expected a finite number, or None for the best so far, got {goal!r}.")
        object.__setattr__(self, "goal", None if goal is None else float(goal))

    def check_mask(self, target: float, refresh: int) -> None:
        """Raise ConfigError where the ratio would begin above its end, or a look could find a mask that nobody has rebuilt."""
        if self.measure == "flip_rate" and self.every < refresh:
            what = f"Feedback('flip_rate') looks every {self.every} steps at masks that are built every {refresh}: expected every of at least refresh"
            raise ConfigError(f"{what}, got every={self.every} with refresh={refresh}; a mask that was not built anew has no flips.")
        if ratio_units(self.initial) > ratio_units(target):
            raise ConfigError(f"a feedback that begins above its end: expected initial of at most the mask's ratio {target!r}, got initial={self.initial!r}.")

    @property
    def moves(self) -> bool:
        """As `Schedule.moves`: always."""
        return True

    @property
    def remembers(self) -> bool:
        """Whether the ratio depends on what was measured, and not on the step alone."""
        return self.measure != "bytes"

    def levels(self, target: float) -> int:
        """How many changes lead from `initial` to the target."""
        return -(-(ratio_units(target) - ratio_units(self.initial)) // ratio_units(self.change))

    def ratio_of(self, level: int, target: float) -> float:
        """The ratio after so many changes: exactly `initial` at 0, exactly the target at `levels(target)` and beyond."""
        units = ratio_units(self.initial) + max(level, 0) * ratio_units(self.change)
        return target if units >= ratio_units(target) else self.initial if level <= 0 else units / RATIO_UNIT

    def ratio_at(self, step: int, target: float) -> float:
        """The ratio of `bytes`, `step` steps after the start; of the others, whose masks know it, the highest that it can come to."""
        if self.remembers:
            return target
        return self.ratio_of(step // self.every, target if self.stop is None else min(self.stop, target))

    def rises(self, loss: float, best: float | None) -> bool:
        """What a mean loss says: True for up, False for down."""
        goal = best if self.goal is None else self.goal
        return goal is None or loss <= goal + self.tolerance * abs(goal)


class Progress(NamedTuple):
    """How far a mask's feedback has come. Immutable, because copies of a model share it."""

    level: int = 0  # changes in force
    next: int = 0  # those of the optimiser's next step
    best: float | None = None  # the lowest mean loss, or share of flips; None before the first
    total: float = 0.0  # of the losses since the last decision
    told: int = 0  # of these


def begin(config: WeightMask) -> Progress | None:
    """The progress of a mask at its beginning; None where nothing has to be remembered."""
    return Progress() if isinstance(config.schedule, Feedback) and config.schedule.remembers else None


def held(config: WeightMask, given: WeightMask, progress: Progress | None) -> WeightMask:
    """A config with the ratio that its feedback has come to, which no step moves."""
    if progress is None or not isinstance(given.schedule, Feedback):
        return config
    return dataclasses.replace(config, ratio=given.schedule.ratio_of(progress.level, given.ratio), schedule=None)


def bounds(config: WeightMask, step: int, blocks: int) -> tuple[int, int]:
    """The least and the most blocks that a mask of this step can have been built with."""
    if begin(config) is None or step < config.start:
        return config.keep_at(step, blocks), config.keep_at(step, blocks)
    assert isinstance(config.schedule, Feedback)
    return keep_count(blocks, config.ratio), keep_count(blocks, config.schedule.initial)
