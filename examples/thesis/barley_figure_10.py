"""Figure 10 of Barley and Fröning: time of an epoch against the mini-batch, dense and with pruned inputs, and the mini-batches that memory allows.

    python examples/thesis/barley_figure_10.py --out examples/results/thesis                                        # a GPU: ResMLP-S12 at 224
    python examples/thesis/barley_figure_10.py --model cifar --batches 8 32 128 --threads 1 --repeats 5 --out DIR   # a CPU, a minute

Measured is a training step (forward, loss, backward, AdamW) on a batch that lies there; an epoch is as many of them as its images take, without data loading
and tests. Contenders of a mini-batch take turns. Memory is what a step holds at its peak: ours measured (by the allocator on CUDA, by the profiler's record of
allocations on a CPU), formula `fxmask.analyze`'s footprint. The largest mini-batch in `--memory` is the formula's; its epoch's time is that of the largest
mini-batch which was measured, per image, and so is marked `scaled`. No published number is at hand. Losing rows are printed as winning ones; rows of
a mini-batch are written together to the csv, and the same command goes on after them.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # beside the other examples, from whatever folder it is started

import torch
from benchmarks.pruned_step import COLUMNS, DENSE, IMAGES, NAMES, footprint, group, named
from benchmarks.resumed import measured, opened, place
from checked_arguments import check_numbers
from plots import new_figure
from tabulate import tabulate

from fxmask.bench.table import Row, number
from thesis.side_by_side import GOES_ON, exit_code, picture

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME, A30_GIB = "barley_figure_10", 24


def largest_batch(a: argparse.Namespace, activations: str) -> int:
    """Samples whose step takes `--memory` by the formula: a line, but for the largest single tensor, so that it is drawn once more where it ends."""
    n = 1
    for _ in range(2):
        few, many = (footprint(a, activations, max(1, n) + more)["total"] for more in (0, 8))
        n = max(0, max(1, n) + int((a.memory * 2**30 - few) // ((many - few) / 8)))
    return n


def at_the_limit(rows: Sequence[Row], a: argparse.Namespace) -> list[dict[str, str]]:
    """Of each contender the largest mini-batch in memory, and its epoch's time, scaled by the largest mini-batch that was measured."""
    found = []
    for activations in (DENSE, *a.activations):
        mine = [r for r in rows if r["activations"] == activations]
        if mine:
            last, n = max(mine, key=lambda r: int(r["batch"])), largest_batch(a, activations)
            seconds = f"{IMAGES[a.model] / float(last['images_per_s']):.4g} scaled"
            found.append({"activations": activations, f"largest mini-batch in {a.memory:g} GiB (formula)": str(n), "epoch, s": seconds})
    return found


def figure(rows: Sequence[Row], a: argparse.Namespace) -> Figure:
    """Seconds of an epoch over the mini-batch, and MiB of a step, a line a contender."""
    drawn = new_figure(9.0, 3.6)
    left, right = drawn.subplots(1, 2)
    for activations in (DENSE, *a.activations):
        mine = sorted((r for r in rows if r["activations"] == activations), key=lambda r: int(r["batch"]))
        batches, label = [int(r["batch"]) for r in mine], DENSE if activations == DENSE else f"pruned {activations}"
        (line,) = left.plot(batches, [float(r["epoch_s"]) for r in mine], marker=".", label=label)
        right.plot(batches, [float(r["formula_step_mib"]) for r in mine], color=line.get_color(), ls=":", label=f"{label}, formula")
        measured = [r for r in mine if r["ours_step_mib"]]
        right.plot([int(r["batch"]) for r in measured], [float(r["ours_step_mib"]) for r in measured], color=line.get_color(), marker=".", label=label)
    for axes, what in ((left, "seconds an epoch"), (right, "MiB at a step's peak")):
        axes.set_xscale("log", base=2)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("mini-batch")
        axes.set_ylabel(what)
        axes.legend(fontsize=7)
    drawn.suptitle(f"{a.model}, {a.dtype}, {place(rows, a.device)}", fontsize=9)
    return drawn


def run(a: argparse.Namespace) -> list[Row]:
    """Measure what the csv lacks; the rows of this command's mini-batches."""
    (shared, table), rows = opened(a, NAME, COLUMNS, NAMES), []
    for batch in sorted(set(a.batches)):
        wanted = [{**shared, **named(a, batch, activations)} for activations in (DENSE, *a.activations)]
        known = measured(table, wanted, a.again)
        if known is not None:
            rows += known
            print(f"mini-batch {batch}: measured already", flush=True)
            continue
        try:
            found = group(a, batch, shared)
        except torch.OutOfMemoryError as error:
            print(f"mini-batch {batch}: no rows, memory ran out: {str(error).splitlines()[0]}", flush=True)
            continue
        if table is not None:
            table.extend(found)
        rows += found
        print(f"mini-batch {batch}: {found[0]['verdict']}", flush=True)
    shown = ("batch", "activations", "ms_p50", "epoch_s", "x_dense", "formula_saved_mib", "ours_saved_mib", "formula_step_mib", "ours_step_mib")
    print(f"\nFigure 10: {a.model}, {IMAGES[a.model]:,} images an epoch; published: no number at hand\n")
    print(tabulate([[f"{v:.4g}" if (v := number(r, c)) is not None else r[c] for c in shown] for r in rows], shown, disable_numparse=True))
    print("\n" + tabulate(at_the_limit(rows, a), headers="keys", disable_numparse=True))
    if table is not None and rows:
        print(table.path)
        picture(table.path.with_suffix(".png"), lambda: figure(rows, a))
    against = [float(r["x_dense"]) for r in rows if r["activations"] != DENSE]
    print(f"dense is faster in {sum(x <= 1 for x in against)} of {len(against)} rows")
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """0, or 2 for a use that cannot be measured."""
    cuda = torch.cuda.is_available()
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", choices=tuple(IMAGES), default="resmlp-s12" if cuda else "cifar")
    p.add_argument("--batches", type=int, nargs="+", default=[16, 32, 64, 128])
    p.add_argument("--activations", nargs="+", default=["0.6:16", "0.7:16", "0.8:16"], metavar="RATIO:BLOCK")
    p.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32", help="bf16: autocast")
    p.add_argument("--memory", type=float, default=A30_GIB, metavar="GIB", help="for the largest mini-batch; default: that of the source's A30")
    p.add_argument("--repeats", type=int, default=15, help="turns")
    p.add_argument("--seconds", type=float, default=120.0, help="limit of a mini-batch's turns, of which there are at least 3")
    p.add_argument("--threads", type=int)
    p.add_argument("--device", default="cuda" if cuda else "cpu")
    p.add_argument("--out", type=Path, metavar="DIR", help="append to a csv there, and draw a png")
    p.add_argument("--again", action="store_true", help="measure anew what a busy machine measured")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler, which is asked for memory, says when it starts and stops
    args = p.parse_args(argv)
    check_numbers(p, args)
    return exit_code("barley_figure_10.py", lambda: run(args), GOES_ON)


if __name__ == "__main__":
    sys.exit(main())
