"""The bar chart of `train_step.py --plot CSV`: milliseconds by contender, an axis a group, p10 and p90 as lines; a png beside the csv."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import plots
from thesis.csv_files import numbers

from benchmarks.step_contenders import NAMES
from benchmarks.step_group import COLUMNS
from fxmask.bench.table import Row, key, read
from fxmask.errors import ConfigError
from fxmask.kernels.errors import message

COLOURS = {"dense": "tab:gray", "masked": "tab:orange", "fxmask": "tab:blue"}


def groups(rows: Sequence[Row]) -> dict[tuple[str, ...], list[Row]]:
    """Rows by group; of what was measured twice the later one."""
    found: dict[tuple[str, ...], list[Row]] = {}
    for row in {key(r, NAMES): r for r in rows}.values():
        found.setdefault((row["device"], *(row[c] for c in NAMES[:-2])), []).append(row)
    return found


def plot(csv: Path) -> Path:
    """Draw; returns the png. ConfigError where there is no row."""
    rows = [r for r in read(csv, COLUMNS) if r["ms_p50"]] if csv.is_file() else []
    if not rows:
        raise ConfigError(message(f"--plot: expected a csv with rows, got {csv}.", fix="measure first: python examples/benchmarks/train_step.py --csv FILE."))
    numbers(csv, rows, "ms_p50", "ms_p10", "ms_p90", "ratio")
    numbers(csv, [r for r in rows if r["x_dense"]], "x_dense")
    found = groups(rows)
    figure = plots.new_figure(8.0, sum(0.9 + 0.25 * len(g) for g in found.values()))
    axes = figure.subplots(len(found), squeeze=False, height_ratios=[2 + len(g) for g in found.values()])
    for axis, group in zip(axes[:, 0], found.values(), strict=True):
        names = [f"{r['contender']}, every {r['refresh']}" if r["refresh"] else r["contender"] for r in group]
        ms, low, high = ([float(r[c]) for r in group] for c in ("ms_p50", "ms_p10", "ms_p90"))
        around = [[max(0.0, m - at) for m, at in zip(ms, low, strict=True)], [max(0.0, at - m) for m, at in zip(ms, high, strict=True)]]
        axis.barh(names, ms, xerr=around, color=[COLOURS[r["contender"].partition("_")[0]] for r in group], error_kw={"linewidth": 0.8})
        for y, (r, at) in enumerate(zip(group, high, strict=True)):
            axis.annotate(f" {float(r['x_dense']):.2f}x" if r["x_dense"] else "", (at, y), va="center", fontsize=8)
        axis.invert_yaxis()
        axis.margins(x=0.12)
        axis.tick_params(labelsize=8)
        axis.set_xlabel("ms a step; x: the faster dense step over this one", fontsize=8)
        r = group[0]
        size = f" ({r['size']})" if r["size"] else ""
        where = f"{r['device']}, {r['threads']} threads" if r["clock"] != "events" else r["device"]
        busy = ", busy" if any(row["busy"] == "1" for row in group) else ""
        what = f"{r['model']}{size}, batch {r['batch']}, {r['dtype']}, {r['block']}x{r['block']} at {100 * float(r['ratio']):g} %"
        axis.set_title(f"{what}\n{where}{busy}", fontsize=9)
    return plots.save(figure, csv.with_suffix(".png"))
