"""Which blocks and ratios to time, in which order, until the time is spent.

A larger block and a higher ratio are never slower by more than noise, so what loses by more than that settles all smaller blocks and lower ratios of the layer.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any

import torch

from ..errors import ConfigError
from ..kernels.errors import message
from ..kernels.grid import keep_count, plain_int
from ..passes.settings.config import WeightMask
from .layers import Layer
from .unit import MakeOptimizer, Times, Unit, flusher

LOSES = 0.95  # a gain below this is no noise
ROUNDS, REPEATED = 9, 0.5  # rounds over all cells, so that none rests on one moment of the machine: the first may use all of the time, more of them half of it
Cell = tuple[tuple[int, int], float]  # block, ratio


@dataclasses.dataclass
class Timed:
    """A signature: its layers, their dense times, and (dense, masked) times of every cell that was timed."""

    layers: list[Layer]
    dense: Times
    cells: dict[Cell, tuple[Times, Times]]
    refresh: int
    left_out: int = 0  # cells that the time did not reach
    why: str = ""  # nothing was timed, because
    kept_step: bool = False  # the guard could take a masked step
    rounds: dict[Cell, list[tuple[Times, Times]]] = dataclasses.field(default_factory=dict)  # of which `cells` has the medians

    def add(self, cell: Cell, times: tuple[Times, Times]) -> None:
        """One more round's times of a cell."""
        rounds = self.rounds.setdefault(cell, [])
        rounds.append(times)
        dense, masked = (Times(*map(statistics.median, zip(*of, strict=True))) for of in zip(*rounds, strict=True))
        self.cells[cell] = dense, masked

    @property
    def alone(self) -> float:
        """Seconds of one dense layer's step: the median of what it took beside each cell."""
        return statistics.median([dense.seconds(0) for dense, _ in self.cells.values()] or [self.dense.seconds(0)])

    def gain(self, cell: Cell) -> float | None:
        """Times as fast as dense, of one layer's step; None where it was not timed."""
        if cell not in self.cells:
            return None
        dense, masked = self.cells[cell]
        return dense.seconds(0) / masked.seconds(self.refresh)

    def settled(self, cell: Cell) -> bool:
        """Whether a larger block at no lower a ratio, or the same one at a higher ratio, already loses."""
        (b, r) = cell
        return any(o[0] >= b[0] and o[1] >= b[1] and q >= r and (self.gain((o, q)) or 1.0) < LOSES for o, q in self.cells)

    def missed(self, ratio: float, cells: Iterable[Cell]) -> bool:
        """Whether the time reached no cell of this ratio, though one could be faster than dense."""
        own = [c for c in cells if c[1] == ratio]
        untimed = self.left_out > 0 and not any(c in self.cells for c in own)
        return untimed and any(not self.settled(c) and not whole(self.layers[0], c) for c in own)


def order_of(blocks: Iterable[tuple[int, int]], ratios: Iterable[float]) -> list[Cell]:
    """The largest block first, the highest ratio first within it."""
    return [(b, r) for b in sorted(set(blocks), key=lambda b: -b[0] * b[1]) for r in sorted(set(ratios), reverse=True)]


def search(
    layers: Sequence[Layer], cells: Sequence[Cell], options: dict[str, Any], make: MakeOptimizer | None, refresh: int, until: float
) -> list[Timed]:
    """Time every signature's cells, cell by cell over all signatures, those with the most work first, in up to ROUNDS rounds. `until`: of time.perf_counter."""
    begin = time.perf_counter()
    enough = begin + REPEATED * (until - begin)
    groups: dict[tuple[Any, ...], list[Layer]] = {}
    for layer in layers:
        if not layer.why:
            groups.setdefault(layer.signature, []).append(layer)
    found: list[Timed] = []
    units: list[tuple[Timed, Unit]] = []
    flush_of = functools.cache(flusher)
    for group in sorted(groups.values(), key=lambda g: -len(g) * g[0].tokens * g[0].weight.numel()):
        if time.perf_counter() < until:
            made = Unit(group[0], make, flush_of(group[0].weight.device))
            found.append(Timed(group, made.dense_times, {}, refresh))
            units.append((found[-1], made))
        else:
            found.append(Timed(group, Times(0.0, 0.0), {}, refresh, len(cells), "the time was spent"))

    def measure(timed: Timed, unit: Unit, cell: Cell) -> None:
        timed.add(cell, unit.masked(WeightMask(ratio=cell[1], block=cell[0], refresh=0, **options)))
        timed.kept_step = unit.kept_step

    for cell, (timed, unit) in product(cells, units):
        if timed.settled(cell) or whole(timed.layers[0], cell):
            continue
        if time.perf_counter() < until:
            measure(timed, unit, cell)
        else:
            timed.left_out += 1
    for _, cell, (timed, unit) in product(range(1, ROUNDS), cells, units):
        if cell in timed.cells and time.perf_counter() < enough:
            measure(timed, unit, cell)
    return found


def whole(layer: Layer, cell: Cell) -> bool:
    """Whether the block is as large as the weight, or so large that no block would be masked."""
    (b, r), (n, k) = cell, layer.weight.shape
    blocks = -(-n // b[0]) * -(-k // b[1])
    return keep_count(blocks, r) == blocks


def check_cells(blocks: Sequence[Any], ratios: Sequence[Any]) -> list[Cell]:
    """Blocks and ratios as the caller gave them, as cells. ConfigError for what WeightMask refuses, and for a ratio of 0."""
    if any(isinstance(s, str) or not isinstance(s, Iterable) or getattr(s, "ndim", 1) == 0 or not list(s) for s in (blocks, ratios)):
        raise ConfigError(f"advise: expected blocks and ratios as sequences with at least one each, got blocks={blocks!r}, ratios={ratios!r}.")
    for r in ratios:
        if WeightMask(ratio=r).ratio == 0:
            raise ConfigError(f"advise: expected ratios above 0, got {r!r}: nothing would be masked.")
    return order_of([WeightMask(block=_sides(b)).block for b in blocks], [float(r) for r in ratios])


def _sides(block: Any) -> Any:
    """One number is both sides; what is no block is left to WeightMask."""
    n = plain_int(block)
    return (n, n) if n is not None else tuple(block) if isinstance(block, list) else block


def device_of(model: torch.nn.Module, inputs: Sequence[torch.Tensor]) -> torch.device:
    """The one device of the model and its inputs. ConfigError where there is none or more than one."""
    named = [(name, p.device) for name, p in model.named_parameters()] + [(f"input {i}", t.device) for i, t in enumerate(inputs)]
    devices = dict.fromkeys(d for _, d in named)
    if len(devices) != 1:
        first = {d: next(n for n, at in named if at == d) for d in devices}
        got = ", ".join(f"{n} on {d}" for d, n in first.items()) or "no parameter and no tensor"
        fix = "inputs.to(device), model.to(device)."
        raise ConfigError(message(f"advise times the model where it is: expected model and inputs on one device, got {got}.", "", fix))
    device = next(iter(devices))
    if device.type not in ("cpu", "cuda"):
        fix = "materialise the model there (to_empty, or build it again)."
        raise ConfigError(message(f"advise times real layers: expected device cpu or cuda, got {device}.", "", fix))
    return device
