"""The rows of one group of `train_step.py`: measured, compared, printed."""

from __future__ import annotations

import argparse
import gc
import os
import time
from typing import Any

import torch
from tabulate import tabulate

from benchmarks import step_measure as measuring
from benchmarks import step_models
from benchmarks.step_contenders import CONTENDERS, NAMES, Setting, instances, planned, runner
from benchmarks.step_measure import Runner, Watch, amortised
from fxmask.bench import clock
from fxmask.bench.provenance import clocks, utc
from fxmask.bench.stopwatch import Stopwatch
from fxmask.bench.table import WHERE, Row, number, text

STATE = (
    "power_limit_w", "sm_clock_mhz", "sm_clock_mhz_after", "temperature_c", "temperature_c_after", "load", "load_after", "cpu_share", "busy", "throttled",
    "verdict",
)  # fmt: skip
TIMES = ("params", "clock", "in_turns", "turns", "ms_p50", "ms_p10", "ms_p90", "ms_plain", "ms_rebuild", "first_step_s")
COSTS = (
    "held_bytes", "peak_bytes", "saved_bytes", "j_per_step", "energy_warnings", "flop_measured", "flop_predicted", "flop_issued", "bytes_min", "bytes_req",
    "bytes_dram_est", "bytes_measured", "loss", "gate", "x_dense", "x_masked_dense",
)  # fmt: skip
COLUMNS = (*(c for c in WHERE if c != "threads"), *STATE, *NAMES, *TIMES, *COSTS)
WRONG = {"fp32": (1e-4, 1e-3), "bf16": (2e-2, 2e-2)}  # relative, of the first loss and of the last before the turns


def _prepared(r: Runner, a: argparse.Namespace) -> dict[str, Any]:
    """Warm a contender up; its costs, which need no quiet machine."""
    begin = time.perf_counter()
    losses = [float(r.step())]
    found: dict[str, Any] = {"first_step_s": time.perf_counter() - begin}
    losses += [float(r.step()) for _ in range(a.warm_up - 1)]
    while r.graphed is not None and r.batch[0].is_cuda and not r.graphed.replays:  # some steps run as they are before one is captured
        r.step()
    found |= {"losses": (losses[0], losses[-1]), "loss": losses[0], "params": sum(p.numel() for p in r.model.parameters())}
    found |= {"saved_bytes": measuring.saved_bytes(r), "peak_bytes": measuring.peak_bytes(r), "held_bytes": measuring.held_bytes(r)}
    return found | {"flop_measured": measuring.flop_measured(r)} | measuring.predicted(r) | measuring.energy(r, a.energy)


def measure(s: Setting, a: argparse.Namespace, shared: Row) -> list[Row]:
    """Measure a group: all contenders in turns, or one after another."""
    batch, watch, before, load = step_models.data(s.spec), Watch(s.spec.device), clocks(s.spec.device), clock.load_average()
    names = instances(a.contenders, a.refresh)
    found: dict[tuple[str, int | None], dict[str, Any]] = {}
    shares: list[float] = []
    for together in [[n] for n in names] if a.one_at_a_time else [names]:
        torch._dynamo.reset()  # its limit of recompiles counts all models of one class
        runners = [runner(s, *n, batch) for n in together]
        costs = [_prepared(r, a) for r in runners]
        timed, share = measuring.in_turns(runners, Stopwatch(s.spec.device), a.repeats, a.seconds, a.seed, watch)
        found |= {n: {**c, "times": t} for n, c, t in zip(together, costs, timed, strict=True)}
        shares.append(share)
        del runners
        gc.collect()
        if s.spec.device.type == "cuda":
            torch.cuda.empty_cache()
    state = state_of(s.spec.device, watch, load, min(shares)) | before | {f"{k}_after": v for k, v in clocks(s.spec.device).items() if k != "power_limit_w"}
    common = {**shared, **state, "utc": utc(), "clock": Stopwatch(s.spec.device).name, "in_turns": str(int(not a.one_at_a_time))}
    rows = [{**common, **row, **_times(row, found)} for row in planned(s, a.contenders, a.refresh)]
    for row in rows:
        row |= gate(row, found, s.dtype)
    against(rows)
    return rows


def _instance(row: Row) -> tuple[str, int | None]:
    return row["contender"], min(int(row["refresh"]), 2) if row["refresh"] else None


def _times(row: Row, found: dict[tuple[str, int | None], dict[str, Any]]) -> Row:
    measured = found[_instance(row)]
    plain, rebuild = (clock.percentiles(measured["times"][kind]) if measured["times"][kind] else None for kind in (False, True))
    assert plain is not None
    ms = plain if rebuild is None else tuple(amortised(p, r, int(row["refresh"])) for p, r in zip(plain, rebuild, strict=True))
    cells = {"ms_p10": ms[0], "ms_p50": ms[1], "ms_p90": ms[2], "turns": len(measured["times"][False])}
    cells |= {} if rebuild is None else {"ms_plain": plain[1], "ms_rebuild": rebuild[1]}
    return {k: text(v) for k, v in {**measured, **cells}.items() if k in COLUMNS}


def gate(row: Row, found: dict[tuple[str, int | None], dict[str, Any]], dtype: str) -> Row:
    """Whether the losses are those of the eager contender of the same kind: dense, or masked-dense by the same scores. Nothing where that is not among them."""
    name, n = _instance(row)
    base = found.get(("dense_eager" if n is None else "taylor_masked_dense" if CONTENDERS[name].scores else "masked_dense", n))
    if base is None:
        return {}
    pairs = list(zip(found[name, n]["losses"], base["losses"], WRONG[dtype], strict=True))
    wrong = [f"{got:.6g} for {want:.6g}" for got, want, most in pairs if not abs(got - want) <= most * abs(want)]
    return {"gate": "fail", "verdict": f"none: wrong loss, {wrong[0]}"} if wrong else {"gate": "pass"}


def state_of(device: torch.device, watch: Watch, before: float | None, share: float) -> Row:
    """How busy the machine was. On a GPU other processes there count, and not how much of a CPU this one had, which waits."""
    after, cores = clock.load_average(), os.cpu_count() or 1
    load = max((v for v in (before, after) if v is not None), default=0.0)
    why = [f"load {load:.1f} on {cores} cores"] if load > cores else []
    why += watch.shared() if device.type == "cuda" else [f"{share:.2f} of a core"] if share < 0.8 else []
    throttled = watch.throttled()
    said = [f"busy: {', '.join(why)}"] * bool(why) + [f"throttled: {throttled}"] * (throttled not in ("", "no"))
    values = {"load": before, "load_after": after, "cpu_share": share, "busy": int(bool(why)), "throttled": throttled, "verdict": "; ".join(said) or "ok"}
    return {k: text(v) for k, v in values.items()}


def against(rows: list[Row]) -> None:
    """x_dense and x_masked_dense of every row whose losses are right, in place."""
    ms = {(r["contender"], r["refresh"]): float(r["ms_p50"]) for r in rows if r.get("gate") != "fail"}
    dense = min((t for (name, _), t in ms.items() if name.startswith("dense")), default=None)
    for row in rows:
        if row.get("gate") != "fail":
            own, masked = float(row["ms_p50"]), ms.get(("masked_dense", row["refresh"]))
            row |= {"x_dense": text(dense / own if dense else None), "x_masked_dense": text(masked / own if masked else None)}


def said(s: Setting, rows: list[Row]) -> str:
    """A group as it is printed, losing rows included."""
    columns = {"contender": "contender", "refresh": "refresh", "ms_p50": "ms", "ms_p10": "p10", "ms_p90": "p90", "x_dense": "x dense"}
    columns |= {"x_masked_dense": "x masked-dense", "saved_bytes": "saved MB", "peak_bytes": "peak MB", "flop_measured": "GFLOP"}
    columns |= {"first_step_s": "first step s"}
    unit = {"saved_bytes": 1e6, "peak_bytes": 1e6, "flop_measured": 1e9}

    def shown(row: Row, column: str) -> str:
        value = number(row, column)
        return row.get(column, "") if value is None or column == "refresh" else f"{value / unit.get(column, 1):.3g}"

    table = tabulate([[shown(r, c) for c in columns] for r in rows], list(columns.values()), disable_numparse=True)
    verdicts = "; ".join(dict.fromkeys(r["verdict"] for r in rows))
    return f"\n{s.title}; {rows[0]['turns']} turns, {rows[0]['clock']} time; {verdicts}\n{table}"


def the_best(rows: list[Row]) -> str:
    """The last line: the fastest row of fxmask, against dense."""
    ours = [r for r in rows if r["contender"].startswith("fxmask") and r.get("x_dense")]
    if not ours:
        return "best: nothing to compare, as it takes a dense and an fxmask contender"
    r = max(ours, key=lambda r: float(r["x_dense"]))
    what = f"{r['contender']} on {r['model']}, {r['block']}x{r['block']} at {100 * float(r['ratio']):g} %, refresh {r['refresh']}"
    masked = f", {float(r['x_masked_dense']):.2f} of masked-dense's" if r.get("x_masked_dense") else ""
    return f"best: {what}: {float(r['x_dense']):.2f} of the faster dense step's speed{masked}"
