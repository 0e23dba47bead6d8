"""Who wins from which ratio on: for each op, shape and block, the lowest ratio from which fxmask is faster than both baselines. Losing rows are shown too."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..analysis.plots import available, save
from .table import Row, number

GROUP = ("op", "M", "K", "N", "dtype", "mask", "block_n")


def crossovers(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """One dict a provider of fxmask, op, shape, dtype, kind of mask and block.

    `wins_from` is the lowest ratio from which every higher one measured wins, None where the highest loses; `x` maps each ratio to its factor over the faster
    of dense and masked-dense (warm cache).
    """
    groups: dict[tuple[str, ...], dict[float, float]] = defaultdict(dict)
    for row in rows:
        factor, ratio = number(row, "x_best"), number(row, "ratio")
        if row["provider"].startswith("fxmask") and row["gate"] == "pass" and factor is not None and ratio is not None:
            names = (row["provider"], *(row[c] for c in GROUP))
            groups[names][ratio] = factor
    found = []
    for names, x in sorted(groups.items()):
        wins = None
        for ratio in sorted(x, reverse=True):
            if x[ratio] <= 1:
                break
            wins = ratio
        found.append({**dict(zip(("provider", *GROUP), names, strict=True)), "wins_from": wins, "x": dict(sorted(x.items()))})
    return found


def crossover_lines(rows: list[Row]) -> list[str]:
    """The table as text, warm cache."""
    found = crossovers(rows)
    if not found:
        return ["crossover: no row can be compared with dense and masked-dense yet"]
    out = ["crossover: times faster than the faster of dense and masked-dense (warm), by ratio of masked blocks"]
    for c in found:
        shape = f"{c['M']}x{c['K']}->{c['N']}"
        values = "  ".join(f"{r:g}: {v:.2f}" for r, v in c["x"].items())
        wins = "never" if c["wins_from"] is None else f"from {c['wins_from']:g}"
        out.append(f"  {c['provider']:16} {c['op']:8} {shape:18} {c['dtype']} {c['mask']:6} b{c['block_n']:4} {wins:10} {values}")
    return out


def plot(rows: list[Row], path: Path) -> Path:
    """The factor over the ratio, a panel an op and shape, a line a block, of rows that have crossovers. Raises UnsupportedError without matplotlib."""
    plt = available()
    panels: dict[tuple[str, ...], list[dict[str, Any]]] = defaultdict(list)
    for c in crossovers(rows):
        panels[(c["provider"], c["op"], f"{c['M']}x{c['K']}→{c['N']}", c["dtype"])].append(c)
    columns = min(4, len(panels))
    lines = -(-len(panels) // columns)
    figure, axes = plt.subplots(lines, columns, figsize=(4 * columns, 3 * lines), squeeze=False)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for axis, (names, members) in zip(axes.flat, panels.items(), strict=False):
        for c in members:
            style = "-" if c["mask"] == "random" else "--"
            axis.plot(list(c["x"]), list(c["x"].values()), style, marker="o", label=f"b{c['block_n']} {c['mask']}")
        axis.axhline(1, color="black", linewidth=0.8)
        axis.set_title(" ".join(names), fontsize=8)
        axis.set_xlabel("ratio of masked blocks")
        axis.set_ylabel("times the faster baseline")
        axis.legend(fontsize=6)
    figure.tight_layout()
    return save(figure, plt, path, dpi=100)
