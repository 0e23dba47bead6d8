"""What `advise` returns: a table of layers, what each ratio gives, and the call that does it."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from ..bench.provenance import provenance, utc
from ..report import Report
from .layers import Layer
from .plan import Plan, best_block, expected, holding, part_of_step
from .search import Cell, Timed


class Advice(Report):
    """What `advise` found. `plans`: one a ratio; `plan`: the one that is advised, None where nothing pays; `arguments`: of `fxmask.apply` for it, None too.

    `gain`: times as fast as dense that the step is expected to be, 1 without a plan: by the layers' times, or the geometric mean of that and the trial.
    """

    plans: list[Plan]
    plan: Plan | None
    arguments: dict[str, Any] | None
    gain: float
    tried: float | None  # by the trial alone

    def to_dict(self) -> dict[str, Any]:
        """As `Report.to_dict`, with the plans' numbers and the arguments of `apply`."""
        numbers = [{"ratio": p.ratio, "step_s": p.step, "gain": p.gain, "blocks": {n: list(b) for n, b in p.blocks.items()}} for p in self.plans]
        return super().to_dict() | {"plans": numbers, "apply": self.arguments, "gain": self.gain}


def advice_of(
    model: nn.Module, layers: list[Layer], found: list[Timed], made: list[Plan], plan: Plan | None, dense: float, target: float, refresh: int,
    options: dict[str, Any], device: torch.device, loads: tuple[float | None, float | None], cells: list[Cell], notes: list[str], took: float,
    narrowed: bool, steps: bool, trials: dict[float, float],
) -> Advice:  # fmt: skip
    where = {layer.name: t for t in found for layer in t.layers}
    part = part_of_step(found, dense)
    rows = [_row(layer, where.get(layer.name), [p.ratio for p in made], dense / part) for layer in layers]
    at = provenance(device)
    linears = sum(1 + len(layer.others) for layer in layers)
    summary: dict[str, Any] = {"dense step": f"{1e3 * dense:.4g} ms"}
    summary |= {f"at {100 * p.ratio:g} %": _words(p, found, cells, linears) for p in made}
    if plan is None:
        best = max(holding(made, trials), key=lambda p: expected(p, trials), default=None)
        most = f"; the most is {expected(best, trials):.2f}, at {100 * best.ratio:g} %" if best else "" if trials else ": no layer is faster masked"
        summary["advice"] = f"leave it dense: nothing reaches {float(target):g} times as fast{most}"
        if not any(t.cells for t in found) and any(t.left_out for t in found):
            summary["advice"] = "none: nothing was timed in that time"
    else:
        kept = all(t.kept_step for t in found if any(layer.name in plan.blocks for layer in t.layers))
        summary["advice"] = _call(plan, refresh, options, None if narrowed else linears, kept, steps)
        if plan.ratio in trials:
            summary["advice"] += f", {trials[plan.ratio]:.2f} when tried: {expected(plan, trials):.2f} expected"
    high = max((v for v in loads if v is not None), default=0.0)
    if device.type == "cpu" and high > (os.cpu_count() or 1):
        notes.append(f"The machine was busy: load {high:.1f} on {os.cpu_count()} cores; ask again when it is idle.")
    left = _left(found)
    if left:
        notes.append(f"{left} of {len(cells) * len(found)} combinations of layer, block and ratio were not timed: the time was spent; seconds= gives more.")
    if part < 1:
        what = f"One by one and from cold caches the layers took {1 / part:.2f} times as long as the whole step, so that dense_ms are higher than in the step"
        notes.append(f"{what}: shares of the step, and what is saved of it, are of dense_ms times {part:.2f}.")
    if any(p.blocks for p in made):
        notes.append("Times are of eager steps. What a ratio costs in accuracy is another matter: docs/accuracy.md.")
    title = f"fxmask.advise: {type(model).__name__} on {at['device']}" + (f", {at['threads']} threads" if at["threads"] else "") + f", {utc()}, {took:.0f} s"
    out = Advice(title, rows, notes, summary)
    out.plans, out.plan, out.arguments = made, plan, None if plan is None else plan.arguments(refresh, options)
    out.tried = None if plan is None else trials.get(plan.ratio)
    out.gain = 1.0 if plan is None else expected(plan, trials)
    return out


def _left(found: list[Timed]) -> int:
    return sum(t.left_out for t in found)


def _words(plan: Plan, found: list[Timed], cells: list[Cell], linears: int) -> str:
    """A plan in a line; with how many linears the time did not reach at its ratio, of which nothing is known."""
    missed = sum(1 + len(layer.others) for t in found if t.missed(plan.ratio, cells) for layer in t.layers)
    if missed and all(ratio != plan.ratio for t in found for _, ratio in t.cells):
        return "not timed"
    return plan.words(linears) + (f"; {missed} of {linears} linears were not timed" if missed else "")


def _row(layer: Layer, timed: Timed | None, ratios: list[float], dense: float) -> dict[str, Any]:
    n, k = layer.weight.shape
    row: dict[str, Any] = {"layer": layer.name, "out x in": f"{n}x{k}", "tokens": layer.tokens or None}
    if timed is None or timed.why:
        return row | {"why": layer.why or (timed.why if timed else "")}
    alone = timed.alone
    row |= {"dense_ms": 1e3 * alone, "share_of_step": alone / dense}
    for ratio in ratios:
        block, gain = best_block(timed, ratio)
        row[f"{100 * ratio:g} %"] = f"{block[0]}x{block[1]} {gain:.2f}" if block is not None and gain is not None else None
    return row | {"why": "" if any(timed.cells) else "no block fits" if not timed.left_out else "the time was spent"}


def _call(plan: Plan, refresh: int, options: dict[str, Any], linears: int | None, kept_step: bool, steps: bool) -> str:
    """The calls that do it, with many names cut short. `linears`: how many apply would mask by default, None where the caller chose."""
    given = plan.arguments(refresh, {k: v for k, v in options.items() if v not in ("masked", "auto")})
    if len(plan.blocks) == linears:
        given.pop("include")
    elif len(given["include"]) > 4:
        given["include"] = f"<{len(plan.blocks)} linears, see .arguments>"
    if len(given.get("overrides", {})) > 4:
        given["overrides"] = f"<{len(given['overrides'])} linears, see .arguments>"
    call = ", ".join(f"{k}={v}" if isinstance(v, str) and v.startswith("<") else f"{k}={v!r}" for k, v in given.items())
    guard = f"; fxmask.guard(optimizer, model{', masked_step=True' if kept_step else ''})" if steps else ""
    return f"fxmask.apply(model, {call}){guard}: {plan.gain:.2f} times as fast predicted"
