"""`fxmask.allocate`: another ratio for every layer, within one budget for all."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from .asked import check_model
from .element_flop import element_flop
from .kernels.errors import ConfigError, UnsupportedError, first_of, message, warn
from .kernels.grid import clipped, grid_shape, keep_count, matrix_shape, ratio_keeping, ratio_units
from .passes.finding.choose import Decision, choose
from .passes.finding.conv import Kinds, find_layers, kinds_of
from .passes.finding.patterns import Patterns, matches
from .passes.settings.allocation import Item, budget_of, check_budget, erk_densities, mean_squares, proportional, ranked
from .passes.settings.checks import one_of
from .passes.settings.config import WeightMask
from .passes.settings.phases import changes_any
from .passes.state.tensors import has_values

METHODS = ("uniform", "erk", "global", "flop", "byte")
BY_SCORES = ("global", "flop", "byte")
STARVED = 0.1  # of the average density


class Allocation(dict[str, float]):
    """{layer: ratio}, with what was asked for and what came of it, in `unit` (blocks, weight elements, FLOP or bytes): `total` of the dense layers, `budget`,
    and `spent`, which is never more. `kept` and `blocks`: {layer: number}. `overrides`: as `fxmask.apply` takes it."""

    unit: str
    total: int
    budget: int
    spent: int
    kept: dict[str, int]
    blocks: dict[str, int]

    @property
    def overrides(self) -> dict[str, dict[str, float]]:
        """{layer's name: {"ratio": ratio}}, as `overrides=` of `fxmask.apply` takes it."""
        return {name: {"ratio": ratio} for name, ratio in self.items()}


def allocate(
    model: nn.Module,
    ratio: float,
    method: str = "uniform",
    block: tuple[int, int] = (16, 16),
    *,
    include: Patterns = None,
    exclude: Patterns = None,
    overrides: Mapping[Any, Mapping[str, Any] | bool] | None = None,
    inputs: Any = None,
    kwargs: Mapping[str, Any] | None = None,
    layers: Kinds = None,
) -> Allocation:
    """Ratios of a model's layers that together spend a budget of (1 - ratio), for `apply(model, ratio=ratio, block=block, overrides=found.overrides)`.

    | method | kept blocks | budget |
    | --- | --- | --- |
    | `uniform` | the same ratio in every layer, rounded up in each | that |
    | `erk` | density proportional to (out + in) / (out * in), at most 1, the rest shared out anew (Evci et al. 2020, arXiv:1911.11134) | blocks |
    | `global` | those with the highest mean square of all layers, by the keys of `criterion="fro"`: one threshold | blocks |
    | `flop` | those with the highest mean square for a FLOP: a layer that sees many tokens keeps fewer | FLOP of these layers' products with `inputs` |
    | `byte` | those with the highest mean square for a byte | bytes of these layers' weights |

    Every layer keeps at least a block. A budget in blocks is `ceil(blocks * (1 - ratio))`, as for one layer, and is spent to the block; blocks of several sizes
    count by their elements. A budget in FLOP or bytes is never exceeded, whatever blocks the masks choose later: blocks at ragged edges count as whole ones.
    What is left is less than any block that could have been kept costs (`.budget`, `.spent`).

    `global`, `flop` and `byte` see the weights as they are now. Of a model that has not been trained these are its initialiser's variances: at 50 % in 16x16
    ResMLP's second channel linears, of the widest rows, end at 98 %. Allocate once the model is trained, or take `erk`, which looks at shapes alone.
    A layer that keeps less than a tenth of the average is warned of.

    Args:
        model: as for `apply`; not masked yet. ratio: of the budget, in [0, 1). include, exclude, overrides: as for `apply`, whose `block` may differ by
            layer. A layer whose override names a ratio keeps it, and has no part in the budget.
        layers: as for `apply`: Linears, Conv2ds or both.
        inputs, kwargs: of the model's forward, for `flop` alone, as for `analyze`: only shapes are looked at.

    Returns: an `Allocation`, {layer's name: ratio}; layers that share a weight have one ratio.
    Raises: ConfigError (a budget that cannot be met, no inputs, a layer that they do not reach); UnsupportedError for meta weights where scores are needed, and
        for a model that `apply` does not take, compiled or wrapped: its names are others.
    Cost: one reading of the weights for `global`, `flop`, `byte`; for `flop` a forward on fake tensors, too.
    """
    check_model(model, "fxmask.allocate")
    one_of("allocation method", method, METHODS)
    decisions = choose(find_layers(model, kinds_of(layers)), WeightMask(ratio=ratio, block=block), include, exclude, overrides, model)
    return allocation_of(model, decisions, overrides, ratio, method, inputs, kwargs)


def allocated(model: nn.Module, decisions: list[Decision], overrides: Mapping[Any, Any] | None, ratio: float, method: str) -> list[Decision]:
    """What `apply(allocation=method)` does to its decisions."""
    one_of("allocation method", method, METHODS)
    if method == "flop":
        fix = "found = fxmask.allocate(model, ratio, 'flop', inputs=x), then fxmask.apply(..., overrides=found.overrides)."
        raise ConfigError(message("apply(allocation='flop') has no inputs to count tokens with.", fix=fix))
    found = allocation_of(model, decisions, overrides, ratio, method)
    masked = [d.candidate.name for d in decisions if d.config is not None and d.candidate.weight.numel()]
    if masked and not found:
        what = f"apply(allocation={method!r}) has nothing to share out: overrides= names the ratio of each of {len(masked)} layers; expected one without."
        raise ConfigError(message(what, masked[0], "leave the ratios out of overrides, or leave the allocation out."))
    moving = [d.candidate.name for d in decisions if d.config is not None and changes_any(d.config, ("block",))]
    if moving:
        what = f"apply(allocation={method!r}) spends its budget in blocks of one size, and phases change the block of {', '.join(moving[:3])}."
        raise ConfigError(message(what, moving[0], "leave the block out of phases, or give ratios by overrides=."))
    return [_with_ratio(d, found) for d in decisions]


def _with_ratio(d: Decision, found: Allocation) -> Decision:
    ratio = found.get(d.candidate.name)
    return d if d.config is None or ratio is None else dataclasses.replace(d, config=dataclasses.replace(d.config, ratio=ratio))


def allocation_of(
    model: nn.Module, decisions: list[Decision], overrides: Mapping[Any, Any] | None, ratio: float, method: str, inputs: Any = None, kwargs: Any = None
) -> Allocation:
    """The allocation over what was chosen; see `allocate`."""
    changes = list((overrides or {}).items())[::-1]
    groups: dict[int, list[Decision]] = {}
    for d in decisions:
        if d.config is not None and d.candidate.weight.numel():
            groups.setdefault(id(d.candidate.weight), []).append(d)
    layers = [g for g in groups.values() if not any(_is_pinned(d, changes) for d in g)]
    found = Allocation()
    found.unit, found.total, found.budget, found.spent, found.kept, found.blocks = "blocks", 0, 0, 0, {}, {}
    if not layers:
        return found
    weights, blocks = [g[0].candidate.weight for g in layers], [d.config.block for d, *_ in layers if d.config is not None]
    uses = element_flop(model, layers, inputs, kwargs) if method == "flop" else [w.element_size() if method == "byte" else 1 for w in weights]
    items, found.unit = _items([matrix_shape(w.shape) for w in weights], blocks, uses, method)
    found.total = sum(i.whole for i in items)
    if method == "uniform":
        kept = [keep_count(i.blocks, ratio) for i in items]
        found.budget = _spent(items, kept)
    else:
        found.budget = budget_of(found.total, ratio_units(ratio), up=method in ("erk", "global"))
        check_budget(items, found.budget, ratio, found.unit)
        if method == "erk":
            kept = proportional(items, erk_densities([tuple(w.shape) for w in weights]), found.budget)
        else:
            scores = [mean_squares(_values(w, g), b) / u for w, g, b, u in zip(weights, layers, blocks, uses, strict=True)]
            kept = ranked(items, scores, found.budget)
    found.spent = _spent(items, kept)
    for group, item, k in zip(layers, items, kept, strict=True):
        for d in group:
            name = d.candidate.name
            found[name] = ratio if method == "uniform" else ratio_keeping(k, item.blocks)
            found.kept[name], found.blocks[name] = k, item.blocks
    if method in BY_SCORES:
        _warn_of_starved(found, ratio, method)
    return found


def _is_pinned(d: Decision, changes: Sequence[tuple[Any, Any]]) -> bool:
    """Whether the override of a layer, the first of these that matches, names its ratio."""
    return next(("ratio" in change for pattern, change in changes if matches(pattern, d.candidate)), False)


def _warn_of_starved(found: Allocation, ratio: float, method: str) -> None:
    """FxMaskWarning where a layer of some size is nearly cut out: fresh weights say by their variance how wide a layer is, and no more."""
    starved = [f"{name} ({k} of {found.blocks[name]} blocks)" for name, k in found.kept.items() if k < STARVED * (1 - ratio) * found.blocks[name]]
    if starved:
        what = f"allocation by {method!r} nearly cuts layers out: expected each to keep at least a tenth of what ratio={ratio} leaves on average."
        fix = "of a model that is not trained yet the scores are its initialiser's variances: take 'erk', or allocate once it is trained;"
        warn(message(what, first_of(starved), f"{fix} overrides={{layer: dict(ratio=...)}} pins one."))


def _items(shapes: list[tuple[int, int]], blocks: list[tuple[int, int]], uses: list[int], method: str) -> tuple[list[Item], str]:
    """The layers as what they cost, and its unit. uses: what a weight element of each costs in FLOP or bytes."""
    counts = [math.prod(grid_shape(s, b)) for s, b in zip(shapes, blocks, strict=True)]
    if method in ("flop", "byte"):
        each = [math.prod(clipped(b, s)) * u for s, b, u in zip(shapes, blocks, uses, strict=True)]
        items = [Item(n, e, math.prod(s) * u) for n, e, s, u in zip(counts, each, shapes, uses, strict=True)]
        return items, "FLOP" if method == "flop" else "bytes"
    areas = [math.prod(b) for b in blocks]
    size = math.gcd(*areas)  # one block, where all have one size
    unit = "blocks" if len(set(areas)) == 1 else f"times {size} elements" if size > 1 else "elements"
    return [Item(n, a // size, n * (a // size)) for n, a in zip(counts, areas, strict=True)], unit


def _spent(items: list[Item], kept: list[int]) -> int:
    return sum(i.spent(k) for i, k in zip(items, kept, strict=True))


def _values(weight: Tensor, group: list[Decision]) -> Tensor:
    if not has_values(weight):
        what = f"allocation by scores needs the weights' values: expected real memory, got a {'meta' if weight.is_meta else 'fake'} tensor."
        raise UnsupportedError(message(what, group[0].candidate.name, "materialise the model first, or use method='erk' (of fxmask.apply: allocation='erk')."))
    return weight.detach()
