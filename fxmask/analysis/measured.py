"""Measured columns beside predicted ones: times, traffic and hit rates of Nsight Compute, energy."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from pathlib import Path
from typing import Any

from ..kernels.errors import ConfigError, first_of
from . import ncu

Tables = dict[str, list[dict[str, Any]]]  # of an `Analysis`


def attach(tables: Tables, ncu_csv: str | Path | None, timings: Mapping[str, Any] | None, energy: Mapping[str, Any] | None) -> list[str]:
    """Add rows and columns in place, to those of earlier measurements; return notes. ConfigError where no name is known.

    A name is a node, `node/phase`, or a module, whose figures are summed.
    """
    _check(timings, energy)
    found = {} if ncu_csv is None else ncu.sum_by_range(ncu.read_ncu_csv(ncu_csv))
    outside = found.pop("", {}).get("launches", 0)  # of kernels in no range; in `timings` that is the name of the model itself
    for name, seconds in (timings or {}).items():
        found.setdefault(name, {})["time_us"] = 1e6 * seconds
    rows = tables["roofline"]
    matched = {name: group for name in found if (group := rows_of(rows, name))}
    if (found or outside) and not matched:
        names, such = first_of(list(found)) or "by no NVTX range", f", such as {rows[0]['node']!r} or {rows[0]['module']!r}" if rows else ", which has none"
        raise ConfigError(f"measurements are named {names}: expected nodes or modules of this analysis{such}.")
    measured = {name: _row(name, found[name], group, tables["traffic"]) for name, group in matched.items()}
    known = {row["name"]: row for row in tables.get("measured", [])}
    for name, row in measured.items():
        known[name] = known.get(name, {}) | row
        if len(matched[name]) == 1:  # one node and phase: its own row can carry it
            matched[name][0].update({k: v for k, v in row.items() if k not in ("name", "rows", "t_min_us", "bytes_min")})
    if known:
        tables["measured"] = list(known.values())
    if energy is not None:
        tables["energy"] = [dict(energy)]
    left = [name for name in found if name not in matched]
    notes = [f"{len(left)} measured ranges are no node or module of this analysis: {first_of(left)}."] if left else []
    return [*notes, f"Kernels of the csv outside of any NVTX range, which are in no row: {outside}."] if outside else notes


def _check(timings: Any, energy: Any) -> None:
    """ConfigError before any table has changed."""
    if energy is not None and not isinstance(energy, Mapping):
        raise ConfigError(f"energy: expected a row, as fxmask.analysis.energy.measure_energy gives one, got {energy!r}.")
    if timings is not None and not isinstance(timings, Mapping):
        raise ConfigError(f"timings: expected a dict of seconds by node or module, got {timings!r}.")
    for name, seconds in (timings or {}).items():
        if not isinstance(seconds, Real) or not float(seconds) > 0:
            raise ConfigError(f"timings: expected seconds above 0, got {seconds!r} for {name!r}.")


def rows_of(rows: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """The rows that a name means."""
    exact = [r for r in rows if name in (f"{r['node']}/{r['phase']}", f"{r['module']}/{r['phase']}")]
    return exact or [r for r in rows if r["node"] == name] or [r for r in rows if r["module"] == name or r["module"].startswith(f"{name}.")]


def _row(name: str, got: dict[str, Any], group: list[dict[str, Any]], traffic: list[dict[str, Any]]) -> dict[str, Any]:
    keys = {(r["node"], r["phase"], r["op"]) for r in group}
    moved = [r for r in traffic if (r["node"], r["phase"], r["op"]) in keys]
    flop, low = sum(r["flop"] for r in group), sum(r["bytes_min"] for r in moved)
    least = sum(r["t_min_us"] for r in group)
    row: dict[str, Any] = {"name": name, "rows": len(group), "flop": flop, "bytes_min": low, "t_min_us": least}
    t = got.get("time_us")
    if t:
        row |= {"t_meas_us": t, "roof_pct": 100 * least / t, "pred_err": (least - t) / t, "tflops_meas": flop / t / 1e6, "gbps_min_meas": low / t / 1e3}
    dram = [got[k] for k in ("dram_read_bytes", "dram_write_bytes") if got.get(k) is not None]
    if len(dram) == 2:
        row["bytes_meas"] = sum(dram)
        row["bytes_dram_est"] = sum(r["bytes_dram_est"] for r in moved)
    copied = ("l2_bytes", "l1_hit_rate", "l2_hit_rate", "gbps_meas", "launches")
    return row | {k: got[k] for k in copied if got.get(k) is not None}
