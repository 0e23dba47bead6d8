"""Budgets of bytes: the lowest ratio at which the kept blocks of all layers that share a `Feedback('bytes')` fit. Arithmetic in integers, on shapes alone."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from ...kernels.errors import ConfigError, message, warn
from ...kernels.grid import RATIO_UNIT, grid_shape, keep_count, matrix_shape, ratio_units
from ..finding.choose import Decision
from .allocation import Item
from .config import WeightMask
from .feedback import Feedback
from .phases import in_turn

Layer = tuple[int, list[Item]]  # its ratio in units, and its blocks in each phase


def with_budgets(decisions: Sequence[Decision]) -> list[Decision]:
    """Decisions whose byte budgets know the ratio that meets them. Raises: ConfigError for a budget that cannot be met, or of ties='keep'."""
    groups: dict[Feedback, list[tuple[Decision, WeightMask]]] = {}
    for d in decisions:
        if d.config is not None and isinstance(d.config.schedule, Feedback) and d.config.schedule.measure == "bytes":
            groups.setdefault(dataclasses.replace(d.config.schedule, stop=None), []).append((d, d.config))
    found: dict[int, WeightMask] = {}
    for f, members in groups.items():
        stop = stop_of(f, _layers(members), members[0][0].candidate.name)
        found.update({id(d): dataclasses.replace(c, schedule=dataclasses.replace(f, stop=stop)) for d, c in members})
    return [dataclasses.replace(d, config=found.get(id(d), d.config)) for d in decisions]


def _layers(members: Sequence[tuple[Decision, WeightMask]]) -> list[Layer]:
    layers: dict[int, Layer] = {}  # a weight that several layers share counts once
    for d, c in members:
        w = d.candidate.weight
        (n, k), size, items = matrix_shape(w.shape), w.element_size(), []
        for p in in_turn(c):
            if p.ties == "keep":
                what = "Feedback('bytes') with ties='keep', which keeps as many blocks as there are ties: expected ties='lowest', which keeps to a budget."
                raise ConfigError(message(what, d.candidate.name, "leave ties out."))
            items.append(Item(math.prod(grid_shape((n, k), p.block)), min(p.block[0], n) * min(p.block[1], k) * size, n * k * size))
        layers[id(w)] = (ratio_units(c.ratio), items)
    return list(layers.values())


def spent(layers: Sequence[Layer], units: int) -> int:
    """Bytes of the kept blocks, at most, at a ratio in units of 1e-9 that no layer follows beyond its own."""
    return sum(max(i.spent(keep_count(i.blocks, min(units, most) / RATIO_UNIT)) for i in items) for most, items in layers)


def stop_of(f: Feedback, layers: Sequence[Layer], where: str) -> float:
    """The lowest ratio from `initial` on that meets the budget. Raises: ConfigError."""
    goal, low, high = int(f.goal or 0), ratio_units(f.initial), max(most for most, _ in layers)
    least = spent(layers, high)
    if least > goal:
        whole = sum(items[0].whole for _, items in layers)
        what = f"a budget that cannot be met: expected at most {goal:,} bytes of kept blocks, got {least:,} of {whole:,} at ratio {high / RATIO_UNIT:g}"
        raise ConfigError(message(f"{what}, in {len(layers)} layers.", where, f"a higher ratio, smaller blocks, fewer layers (exclude=), or goal={least}."))
    if spent(layers, low) <= goal:
        if not low:
            what = f"a budget that masks nothing: expected fewer than the {spent(layers, 0):,} bytes of these {len(layers)} layers, got goal={goal:,}."
            warn(message(what, where, "a smaller goal; these layers stay dense."))
        return f.initial
    while high - low > 1:  # too much at low, enough at high
        middle = (low + high) // 2
        low, high = (low, middle) if spent(layers, middle) <= goal else (middle, high)
    return high / RATIO_UNIT
