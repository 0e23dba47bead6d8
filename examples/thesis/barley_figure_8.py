"""Figure 8 of Barley and Fröning: top-1 over block and sparsity of the pruned inputs; green at dense or above, orange down to 1.5 points below, red under that.

    python examples/thesis/barley_figure_8.py --root DIR --jobs 2 --out examples/results/thesis             # 8a: CIFAR-10, 46 runs a seed
    python examples/thesis/barley_figure_8.py --data folder --root DIR --out examples/results/thesis        # 8b: CIFAR-100 as images, one folder a class
    python examples/thesis/barley_figure_8.py --data digits --at-once 4 --out examples/results/thesis       # minutes on one core
    python examples/thesis/barley_figure_8.py --root DIR --table                                            # of the runs that have ended so far

Runs of examples/thesis/train.py; the same command goes on where it was stopped. A cell's difference is the mean over the seeds that dense has, too; how far
dense seeds lie apart says which differences mean something. Formula: MiB that a batch saves. Ours are the grid's blocks and sparsities, and what barley_runs.py
names.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # beside the other examples, from whatever folder it is started

import torch
from plots import new_figure
from tabulate import tabulate

from thesis.barley_runs import DATA, DENSE, NO_CIFAR, against_dense, arguments, cells, command, guarded, saved_mib, top1, train_all
from thesis.side_by_side import Row, published, save
from thesis.sweep_results import Ended

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "barley_figure_8"
COLOURS = {"green": "tab:green", "orange": "tab:orange", "red": "tab:red"}
GRIDS = {"digits": ((4, 8, 16, 32), (0.3, 0.5, 0.7, 0.8, 0.9)), "cifar10": ((4, 8, 16, 32, 64), tuple(i / 10 for i in range(1, 10)))}
Cells = dict[tuple[int, str], dict[int, Ended]]


def claims() -> dict[str, float]:
    """What is published of figure 8, by its name."""
    return {line["what"]: float(line["value"]) for line in published("barley_figures") if line["figure"] == "8"}


def colour(difference: float) -> str:
    """The figure's rule, of points above dense; what floats add up to beyond the sixth digit says nothing."""
    return "green" if round(difference, 6) >= 0 else "orange" if round(difference, 6) >= -claims()["orange down to"] else "red"


def percent(share: float) -> str:
    return f"{100 * share:g}%"


def rows_of(found: Cells, args: Namespace) -> list[Row]:
    """A row a cell; those whose runs have not ended are empty."""
    dense = found.get((args.batch, DENSE), {})
    rows = []
    for block in args.blocks:
        for sparsity in args.sparsities:
            pruned = f"{sparsity:g}:{block}"
            runs = found.get((args.batch, pruned), {})
            row = {"block": block, "sparsity": f"{sparsity:g}", "top1": "", "difference": "", "colour": "", "seeds": len(set(runs) & set(dense))}
            difference = against_dense(runs, dense)
            if difference is not None:
                row |= {"top1": f"{top1(runs):.2f}", "difference": f"{difference:+.2f}", "colour": colour(difference)}
            rows.append({**row, **saved_mib(args, args.batch, pruned)})
    return rows


def viable(rows: list[Row], block: int) -> float | None:
    """The highest sparsity of a block up to which no cell that has ended is red; None where the first one is."""
    best = None
    for r in (r for r in rows if r["block"] == block and r["colour"]):
        if r["colour"] == "red":
            break
        best = float(r["sparsity"])
    return best


def figure(rows: list[Row], title: str) -> Figure:
    """The grid: blocks up, sparsities right, a number and a colour a cell; what has not ended is white."""
    from matplotlib.colors import ListedColormap

    blocks, sparsities = list(dict.fromkeys(r["block"] for r in rows)), list(dict.fromkeys(r["sparsity"] for r in rows))
    names = list(COLOURS)
    values = [[float("nan")] * len(sparsities) for _ in blocks]
    drawn = new_figure(1.6 + 0.75 * len(sparsities), 1.4 + 0.45 * len(blocks))
    axes = drawn.subplots()
    for r in rows:
        if r["colour"]:
            y, x = blocks.index(r["block"]), sparsities.index(r["sparsity"])
            values[y][x] = names.index(r["colour"])
            axes.text(x, y, f"{float(r['top1']):.1f}", ha="center", va="center", fontsize=8)
    axes.imshow(values, aspect="auto", origin="lower", vmin=0, vmax=2, cmap=ListedColormap(list(COLOURS.values())), alpha=0.7)
    axes.set_xticks(range(len(sparsities)), [percent(float(s)) for s in sparsities])
    axes.set_yticks(range(len(blocks)), [f"1x{b}" for b in blocks])
    axes.set_xlabel("sparsity")
    axes.set_ylabel("block")
    axes.set_title(title, fontsize=8)
    return drawn


def work(args: Namespace) -> int:
    pruned = [f"{s:g}:{b}" for b in args.blocks for s in args.sparsities]
    runs, planned, failed = train_all(args, NAME, [args.batch], pruned)
    found, said = cells(runs), claims()
    rows, dense = rows_of(found, args), found.get((args.batch, DENSE), {})
    what = f"{DATA[args.data]}, {args.model}, mini-batch {args.batch}, {args.epochs} epochs, {len(args.seeds)} seeds"
    grid = [[f"1x{b}", *(f"{r['top1']} {r['colour']}" if r["colour"] else "-" for r in rows if r["block"] == b)] for b in args.blocks]
    print(f"Figure 8: top-1, % ({what})\n")
    print(tabulate(grid, ["block", *map(percent, args.sparsities)], disable_numparse=True))
    tops = [run.top1 for run in dense.values()]
    if tops:
        apart = f", seeds {max(tops) - min(tops):.2f} points apart (published: {said['seeds of dense differ by']:g})" if len(tops) > 1 else ""
        print(f"\ndense: {top1(dense):.2f} %{apart}")
    limits = f"published: {said['viable to at least']:.0f} to {said['viable to at most']:.0f} % from 1x16 on"
    reached = ", ".join(f"1x{b} " + ("-" if (to := viable(rows, b)) is None else percent(to)) for b in args.blocks)
    print(f"no red up to ({limits}): {reached}")
    if args.data == "digits":
        print(NO_CIFAR)
    suffix = "" if args.data == "cifar10" else f"_{args.data}"
    if runs:
        settings = {"data": args.data, "model": args.model, "mini_batch": args.batch, "epochs": args.epochs, "lr": args.lr, "torch": torch.__version__}
        title = f"{what}\ndense {f'{top1(dense):.2f} %' if tops else 'not yet'}; {len(runs)} of {planned} runs have ended"
        made = {"command": command(args, NAME, batch=args.batch, blocks=args.blocks, sparsities=args.sparsities)}
        save(args.out, NAME + suffix, [{**settings, **r, **made} for r in rows], lambda: figure(rows, title))
    counts = ", ".join(f"{sum(r['colour'] == name for r in rows)} {name}" for name in COLOURS)
    print(f"{len(runs)} of {planned} runs have ended; of {len(rows)} cells {counts}")
    return 1 if failed else 0


def main(argv: Sequence[str] | None = None) -> int:
    def add(p: ArgumentParser) -> None:
        p.add_argument("--batch", type=int, help="default: 128, for digits 32")
        p.add_argument("--blocks", type=int, nargs="+", help="default: 4, 8, 16, 32, 64; for digits up to 32")
        p.add_argument("--sparsities", type=float, nargs="+", help="default: 0.1 to 0.9; for digits 0.3, 0.5, 0.7, 0.8, 0.9")

    args = arguments(__doc__, argv, add)
    blocks, sparsities = GRIDS["digits" if args.data == "digits" else "cifar10"]
    args.batch = (32 if args.data == "digits" else 128) if args.batch is None else args.batch
    args.blocks, args.sparsities = args.blocks or list(blocks), sorted(args.sparsities or sparsities)  # as `viable` reads them
    return guarded(NAME, lambda: work(args))


if __name__ == "__main__":
    sys.exit(main())
