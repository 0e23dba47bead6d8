"""From the layers' times to the step's: at each ratio the fastest block of each layer that pays, the others dense."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from .search import Timed

PAYS = 1.03  # a layer's gain below this may be noise


@dataclass(frozen=True)
class Plan:
    """What to mask at one ratio, and the step that comes of it in seconds."""

    ratio: float
    blocks: dict[str, tuple[int, int]]  # by layer; the others stay dense
    step: float
    gain: float  # dense step over this one

    @property
    def block(self) -> tuple[int, int] | None:
        """The block of most layers."""
        return Counter(self.blocks.values()).most_common(1)[0][0] if self.blocks else None

    def arguments(self, refresh: int, options: dict[str, Any]) -> dict[str, Any]:
        """Keyword arguments of `fxmask.apply`."""
        given: dict[str, Any] = {"ratio": self.ratio, "block": self.block, "refresh": refresh, **options, "include": list(self.blocks)}
        others = {name: {"block": b} for name, b in self.blocks.items() if b != self.block}
        return given | ({"overrides": others} if others else {})

    def words(self, linears: int) -> str:
        """The plan in a line; `linears`: how many there are that could be masked."""
        if not self.blocks:
            return "no layer pays"
        what = ", ".join(f"{b[0]}x{b[1]} in {n}" for b, n in Counter(self.blocks.values()).most_common())
        return f"{what} of {linears} linears: {1e3 * self.step:.3g} ms a step predicted, {self.gain:.2f} times as fast as dense"


def best_block(timed: Timed, ratio: float) -> tuple[tuple[int, int] | None, float | None]:
    """(the fastest block at a ratio, its gain); (None, None) where nothing was timed at it."""
    found = {b: timed.gain((b, r)) for b, r in timed.cells if r == ratio}
    best = max(found, key=lambda b: found[b] or 0.0, default=None)
    return (None, None) if best is None else (best, found[best])


def part_of_step(found: list[Timed], dense_step: float) -> float:
    """What the layers' times are multiplied by to be shares of the step: 1, or less where alone they took more than all of it.

    A layer that runs alone is flushed out of the caches before, and pays for its calls by itself: with small layers that is most of its time.
    """
    alone = sum(len(t.layers) * t.alone for t in found)
    return min(1.0, dense_step / alone) if alone else 1.0


def plans(found: list[Timed], ratios: list[float], dense_step: float) -> list[Plan]:
    """A plan for each ratio, lowest first.

    The layers' share of the step is what they took alone, at most all of it.
    """
    scale, made = part_of_step(found, dense_step), []
    for ratio in sorted(ratios):
        blocks: dict[str, tuple[int, int]] = {}
        saved = 0.0
        for t in found:
            block, gain = best_block(t, ratio)
            if block is not None and gain is not None and gain >= PAYS:
                blocks |= {name: block for layer in t.layers for name in (layer.name, *layer.others)}
                saved += len(t.layers) * t.alone * (1 - 1 / gain)
        step = dense_step - scale * saved
        made.append(Plan(ratio, blocks, step, dense_step / step if step > 0 else float("inf")))
    return made


def expected(plan: Plan, trials: dict[float, float]) -> float:
    """A plan's gain, with that of its trial where there was one: two estimates, each of a moment of its own, whose geometric mean is off by less."""
    return (plan.gain * trials[plan.ratio]) ** 0.5 if plan.ratio in trials else plan.gain


def holding(made: list[Plan], trials: dict[float, float]) -> list[Plan]:
    """The plans that mask something and did not lose when they were tried. `trials`: gain by ratio."""
    return [p for p in made if p.blocks and trials.get(p.ratio, 1.0) >= 1]


def chosen(made: list[Plan], target: float, trials: dict[float, float]) -> Plan | None:
    """The plan of the lowest ratio that is expected to reach the target; None where none is."""
    return next((p for p in holding(made, trials) if expected(p, trials) >= target), None)
