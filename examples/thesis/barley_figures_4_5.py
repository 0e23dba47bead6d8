"""Figures 4 and 5 of Barley and Fröning: one linear with a pruned input, its time over block and sparsity, and its rate at 1x64, dense beside it.

    python examples/thesis/barley_figures_4_5.py --out examples/results/thesis                          # input (64, 196, 384), to D = 384 and 1536
    python examples/thesis/barley_figures_4_5.py --samples 4 --threads 1 --repeats 5 --out DIR          # a CPU, in minutes

| part | |
| --- | --- |
| dW | the gradient of the weight alone, from what was saved: the operator of the figures |
| forward | the linear, and of the pruned one the choice of its blocks and their copy |
| both | their sum: what a training step pays or gains, as dX is the same dense product either way |

Dense and all sparsities of a block take turns, in an order that changes; medians, of process time on one CPU thread, of wall time on more, of CUDA events on a
GPU. GFLOP/s count the dense products, so that what is skipped shows as speed; the peak is a GPU's by its datasheet, of a CPU what a product of 1,024 cubed
reaches. Formula: dense over pruned is 1 / (kept share), if time were multiplications alone. Before its time counts, a dW is compared with float64 of the pruned
input. Losing rows are in the table as winning ones. Rows of a block are written together to the csv; the same command goes on after them, and a row of a
machine with more load than cores says `busy`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # beside the other examples, from whatever folder it is started

import torch
from benchmarks.pruned_linear import COLUMNS, NAMES, PARTS, group, named, peak_gflops
from benchmarks.resumed import measured, opened, place
from checked_arguments import check_numbers
from plots import new_figure
from tabulate import tabulate

from fxmask.analysis.barley import kept_blocks
from fxmask.bench.table import Row
from fxmask.errors import ConfigError
from thesis.side_by_side import GOES_ON, exit_code, picture, published

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAME, FIGURE_5_BLOCK = "barley_figures_4_5", 64
SHOWN = {"ms_p50": "ms", "gflops_dense_equivalent": "GFLOP/s", "formula_x_dense": "formula x dense", "x_dense": "ours x dense"}


def wins_from(rows: Sequence[Row], out: int, block: int, part: str) -> float | None:
    """The lowest sparsity from which on every row is faster than dense; None where the highest is not."""
    best = None
    for r in sorted((r for r in rows if is_of(r, out, block, part) and float(r["sparsity"])), key=lambda r: -float(r["sparsity"])):
        if float(r["x_dense"]) <= 1:
            break
        best = float(r["sparsity"])
    return best


def is_of(r: Row, out: int, block: int, part: str) -> bool:
    return (r["D"], r["block"], r["part"]) == (str(out), str(block), part)


def summary(rows: Sequence[Row], a: argparse.Namespace) -> list[str]:
    """Published / formula / ours, a line each."""
    said = {(line["what"], line["where"]): line["value"] for line in published("barley_figures")}
    lines = []
    for out in a.widths:
        where = ("faster than dense from", "D = 384" if out == 384 else "in general")
        for part in PARTS:
            if part != "forward":  # that one has more to do than dense, always
                ours = ", ".join(f"1x{b} " + ("nowhere" if (w := wins_from(rows, out, b, part)) is None else f"{100 * w:g} %") for b in a.blocks)
                lines.append(f"D = {out}, {part} faster than dense from: published {said[where]} % (A30), by formula any sparsity, ours {ours}")
        best = [r for r in rows if is_of(r, out, FIGURE_5_BLOCK, "dW") and r["sparsity"] == "0.9" and r["of_peak_pct"]]
        for r in best:
            peak = f"{float(r['peak_gflops']):.0f} GFLOP/s" + (" (a dense product of 1,024 cubed)" if a.device == "cpu" else "")
            rate, known = f"{float(r['of_peak_pct']):.0f} % of {peak}", said["rate at 90 % sparsity in dense FLOP", "A30"]
            most = f"{100 * float(r['formula_x_dense']):.0f}"
            what = f"D = {out}, dW at 90 %, 1x{FIGURE_5_BLOCK}, in dense FLOP"
            lines.append(f"{what}: published {known} % of the fp32 peak (A30), by formula up to {most} %, ours {rate}")
    return lines


def figure_4(axes: Axes, rows: Sequence[Row], a: argparse.Namespace, out: int, part: str) -> None:
    """Milliseconds of a part over the sparsity, a line a block."""
    for block in a.blocks:
        line = [r for r in rows if is_of(r, out, block, part) and float(r["sparsity"])]
        axes.plot([100 * float(r["sparsity"]) for r in line], [float(r["ms_p50"]) for r in line], marker=".", label=f"1x{block}")
    dense = sorted(float(r["ms_p50"]) for r in rows if r["D"] == str(out) and r["part"] == part and not float(r["sparsity"]))
    axes.axhspan(dense[0], dense[-1], color="tab:gray", alpha=0.5, label="dense")
    axes.set_title(f"D = {out}: {'dW' if part == 'dW' else 'forward and dW'}", fontsize=9)
    axes.set_ylabel("ms")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=7, ncols=2)


def figure_5(axes: Axes, rows: Sequence[Row], a: argparse.Namespace) -> None:
    """GFLOP/s of dW at 1x64 over the sparsity."""
    points = [(100 * float(r["sparsity"]), float(r["gflops_dense_equivalent"])) for r in rows]
    for _, rate in [p for p in points if not p[0]][:1]:
        axes.axhline(rate, color="tab:gray", label="dense")
    axes.plot([s for s, _ in points if s], [rate for s, rate in points if s], color="tab:blue", marker=".", label=f"pruned, 1x{FIGURE_5_BLOCK}")
    if rows and rows[0]["peak_gflops"]:
        axes.axhline(float(rows[0]["peak_gflops"]), color="black", ls=":", label="dense, 1,024 cubed" if a.device == "cpu" else "peak")
    axes.set_xlabel("sparsity (%)")
    axes.set_ylabel("GFLOP/s of dense products")
    axes.set_ylim(bottom=0)
    if rows:
        axes.legend(fontsize=7)


def figure(rows: Sequence[Row], a: argparse.Namespace) -> Figure:
    """A column a D: figure 4 of dW, figure 4 of both parts, figure 5."""
    drawn = new_figure(4.4 * len(a.widths) + 0.6, 9.0)
    for (upper, middle, lower), out in zip(drawn.subplots(3, len(a.widths), squeeze=False).T, a.widths, strict=True):
        figure_4(upper, rows, a, out, "dW")
        figure_4(middle, rows, a, out, "both")
        figure_5(lower, [r for r in rows if is_of(r, out, FIGURE_5_BLOCK, "dW")], a)
    drawn.suptitle(f"input ({a.samples}, {a.tokens}, {a.features}), {a.dtype}, {place(rows, a.device)}", fontsize=9)
    return drawn


def check(a: argparse.Namespace) -> None:
    """ConfigError for what cannot be measured."""
    if not all(0 < s < 1 for s in a.sparsities):
        raise ConfigError(f"--sparsities: expected numbers between 0 and 1, as dense is measured anyway, got {a.sparsities}.")
    if min(a.widths) < 16:
        raise ConfigError(f"--widths: expected 16 or more, as narrower layers stay dense, got {min(a.widths)}.")
    for block in a.blocks:
        kept_blocks(a.tokens, a.features, block, 0.5)  # raises where it is no divisor


def run(a: argparse.Namespace) -> list[Row]:
    """Measure what the csv lacks; the rows of this command's cells."""
    check(a)
    shared, table = opened(a, NAME, COLUMNS, NAMES)
    peak, all_rows = peak_gflops(a), []
    for out in a.widths:
        for block in a.blocks:
            wanted = [{**shared, **named(a, out, block, s, part)} for s in (0.0, *a.sparsities) for part in PARTS]
            rows = measured(table, wanted, a.again)
            if rows is not None:
                print(f"D = {out}, 1x{block}: measured already", flush=True)
            else:
                rows = [{**shared, **row} for row in group(a, out, block, peak)]
                if table is not None:
                    table.extend(rows)
            all_rows += rows
            print(f"\nD = {out}, 1x{block}; {rows[0]['verdict']}")
            cells = [[r["sparsity"], r["part"], *(f"{float(r[c]):.3g}" for c in SHOWN)] for r in rows]
            print(tabulate(cells, ["sparsity", "part", *SHOWN.values()]), flush=True)
    print("\n" + "\n".join(summary(all_rows, a)))
    if table is not None:
        print(table.path)
        picture(table.path.with_suffix(".png"), lambda: figure(all_rows, a))
    against = [float(r["x_dense"]) for r in all_rows if r["part"] != "forward" and float(r["sparsity"])]
    print(f"dense is faster in {sum(x <= 1 for x in against)} of {len(against)} cells (dW, and forward and dW)")
    return all_rows


def main(argv: Sequence[str] | None = None) -> int:
    """0, or 2 for a use that cannot be measured."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--samples", type=int, default=64)
    p.add_argument("--tokens", type=int, default=196, help="of a sample")
    p.add_argument("--features", type=int, default=384)
    p.add_argument("--widths", type=int, nargs="+", default=[384, 1536], metavar="D", help="out_features")
    p.add_argument("--blocks", type=int, nargs="+", default=[8, 16, 32, 64, 128, 384])
    p.add_argument("--sparsities", type=float, nargs="+", default=[i / 10 for i in range(1, 10)])
    p.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    p.add_argument("--repeats", type=int, default=15)
    p.add_argument("--threads", type=int)
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--out", type=Path, metavar="DIR", help="append to a csv there, and draw a png")
    p.add_argument("--again", action="store_true", help="measure anew what a busy machine measured")
    args = p.parse_args(argv)
    check_numbers(p, args)
    return exit_code("barley_figures_4_5.py", lambda: run(args), GOES_ON)


if __name__ == "__main__":
    sys.exit(main())
