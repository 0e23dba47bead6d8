"""What `advise` returns: a table of layers, what each ratio gives, and the call that does it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..bench.provenance import provenance, utc
from ..report import Report
from .layers import Layer
from .plan import Plan, best_block, expected, holding, part_of_step
from .search import Cell, Timed
from .trial import Trial


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


@dataclass(frozen=True)
class Known:
    """What was timed, and what comes of it. `dense`: seconds of a dense step; `trials`: gain by ratio of the plans that were tried."""

    layers: list[Layer]
    timed: list[Timed]
    cells: list[Cell]
    plans: list[Plan]
    plan: Plan | None  # that is advised
    dense: float
    trials: dict[float, float]

    @property
    def linears(self) -> int:
        """How many there are that could be masked."""
        return sum(1 + len(layer.others) for layer in self.layers)


def advice_of(
    trial: Trial, known: Known, target: float, narrowed: bool, notes: list[str], loads: tuple[float | None, float | None], took: float
) -> Advice:
    """What is returned. narrowed: the caller chose the layers; loads: of the machine, before and after; took: seconds."""
    where = {layer.name: t for t in known.timed for layer in t.layers}
    part, plan = part_of_step(known.timed, known.dense), known.plan
    rows = [_row(layer, where.get(layer.name), [p.ratio for p in known.plans], known.dense / part) for layer in known.layers]
    summary: dict[str, Any] = {"dense step": f"{1e3 * known.dense:.4g} ms"}
    summary |= {f"at {100 * p.ratio:g} %": _words(p, known) for p in known.plans}
    summary["advice"] = _left_dense(known, target) if plan is None else _call(plan, trial, known, narrowed)
    at = provenance(trial.device)
    threads = f", {at['threads']} thread{'s' * (at['threads'] != '1')}" if at["threads"] else ""
    title = f"fxmask.advise: {type(trial.model).__name__} on {at['device']}{threads}, {utc()}, {took:.0f} s"
    out = Advice(title, rows, [*notes, *_notes(trial, known, part, loads)], summary)
    out.plans, out.plan, out.arguments = known.plans, plan, None if plan is None else plan.arguments(trial.refresh, trial.options)
    out.tried = None if plan is None else known.trials.get(plan.ratio)
    out.gain = 1.0 if plan is None else expected(plan, known.trials)
    return out


def _notes(trial: Trial, known: Known, part: float, loads: tuple[float | None, float | None]) -> Iterator[str]:
    high = max((v for v in loads if v is not None), default=0.0)
    if trial.device.type == "cpu" and high > (os.cpu_count() or 1):
        yield f"The machine was busy: load {high:.1f} on {os.cpu_count()} cores; ask again when it is idle."
    if left := sum(t.left_out for t in known.timed):
        every = len(known.cells) * len(known.timed)
        yield f"{left} of {every} combinations of layer, block and ratio were not timed: the time was spent; seconds= gives more."
    if part < 1:
        what = f"One by one and from cold caches the layers took {1 / part:.2f} times as long as the whole step, so that dense_ms are higher than in the step"
        yield f"{what}: shares of the step, and what is saved of it, are of dense_ms times {part:.2f}."
    if any(p.blocks for p in known.plans):
        yield "Times are of eager steps. What a ratio costs in accuracy is another matter: docs/accuracy.md."


def _left_dense(known: Known, target: float) -> str:
    """Why nothing is advised."""
    if not any(t.cells for t in known.timed) and any(t.left_out for t in known.timed):
        return "none: nothing was timed in that time"
    said = f"leave it dense: nothing reaches {float(target):g} times as fast"
    if best := max(holding(known.plans, known.trials), key=lambda p: expected(p, known.trials), default=None):
        return f"{said}; the most is {expected(best, known.trials):.2f}, at {100 * best.ratio:g} %"
    return said if known.trials else f"{said}: no layer is faster masked"


def _words(plan: Plan, known: Known) -> str:
    """A plan in a line; with how many linears the time did not reach at its ratio, of which nothing is known."""
    missed = sum(1 + len(layer.others) for t in known.timed if t.missed(plan.ratio, known.cells) for layer in t.layers)
    if missed and all(ratio != plan.ratio for t in known.timed for _, ratio in t.cells):
        return "not timed"
    return plan.words(known.linears) + (f"; {missed} of {known.linears} linears were not timed" if missed else "")


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


def _call(plan: Plan, trial: Trial, known: Known, narrowed: bool) -> str:
    """The calls that do it, with many names cut short, and what they gain."""
    given = plan.arguments(trial.refresh, {k: v for k, v in trial.options.items() if v not in ("masked", "auto")})
    if len(plan.blocks) == known.linears and not narrowed:  # all that apply would mask by default
        given.pop("include")
    elif len(given["include"]) > 4:
        given["include"] = f"<{len(plan.blocks)} linears, see .arguments>"
    if len(given.get("overrides", {})) > 4:
        given["overrides"] = f"<{len(given['overrides'])} linears, see .arguments>"
    call = ", ".join(f"{k}={v}" if isinstance(v, str) and v.startswith("<") else f"{k}={v!r}" for k, v in given.items())
    kept_step = all(t.kept_step for t in known.timed if any(layer.name in plan.blocks for layer in t.layers))
    guard = f"; fxmask.guard(optimizer, model{', masked_step=True' if kept_step else ''})" if trial.make is not None else ""
    said = f"fxmask.apply(model, {call}){guard}: {plan.gain:.2f} times as fast predicted"
    return f"{said}, {known.trials[plan.ratio]:.2f} when tried: {expected(plan, known.trials):.2f} expected" if plan.ratio in known.trials else said
