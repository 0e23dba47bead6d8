"""Figure 6.7 of the thesis: FLOP of the CIFAR-10 model against the ratio, as dense / adjusted / saved.

    python examples/thesis/flops.py --out examples/results/thesis

The source's closed form, 23,987,456 - 23,592,960 r, is one forward of one *sample* by the target ratio; it calls that "per epoch", and multiplies by
200 epochs. Formula: the closed form by the blocks that are kept. Ours: what `fxmask.analyze` counts on the real masked model. The figure has no numbers, so
every cell is derived; the text says "about 5x" fewer at 80 %.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # beside the other examples, from whatever folder it is started

import torch
from plots import new_figure

import fxmask
from fxmask.analysis.model_shapes import ModelShapes
from fxmask.analysis.thesis import flop, flop_kept
from thesis.real_models import cifar_model, masked
from thesis.side_by_side import Row, exit_code, options, row, save, show, tally

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BLOCKS = ((2, 2), (32, 32), (64, 64))
RATIOS = [n / 10 for n in range(1, 10)]
CLAIM = "5"  # "about 5x" fewer FLOP at 80 %


def counted(model: torch.nn.Module) -> int:
    """FLOP of one sample's forward: useful ones, two a multiplication by a kept weight."""
    report = fxmask.analyze(model, torch.zeros(1, 3, 32, 32), phases=("fwd",), device="a30", optimizer=None)
    return report.to_dict()["summary"]["flop"]["fwd"]


def cells(ratios: Sequence[float] = RATIOS) -> list[Row]:
    model, shapes, rows = cifar_model(), ModelShapes.resmlp(), []
    dense = counted(model)
    for block in BLOCKS:
        for ratio in ratios:
            with masked(model, block, ratio) as m:
                ours = counted(m)
            adjusted = flop(shapes, ratio)
            keys = {
                "block": f"{block[0]}x{block[1]}",
                "ratio": f"{ratio:.0%}",
                "dense": dense,
                "adjusted_target": adjusted,
                "saved_target": dense - adjusted,
            }
            cell = row(keys, flop_kept(shapes, block, ratio), ours, digits=0, unit="FLOP")
            rows.append({**cell, "saved_ours": dense - ours, "fewer_target": f"{dense / adjusted:.2f}", "fewer_ours": f"{dense / ours:.2f}"})
    return rows


def draw(rows: list[Row], epochs: int) -> Figure:
    figure = new_figure(6.4, 4.0)
    axes = figure.subplots()
    first = [r for r in rows if r["block"] == rows[0]["block"]]
    percent = [int(r["ratio"].rstrip("%")) for r in first]
    for key, colour in (("dense", "tab:gray"), ("adjusted_target", "tab:blue"), ("saved_target", "tab:green")):
        axes.plot(percent, [r[key] * epochs / 1e9 for r in first], color=colour, label=key.replace("_", ", "))
    for block, colour in zip(dict.fromkeys(r["block"] for r in rows), ("tab:cyan", "tab:orange", "tab:red"), strict=True):
        line = [int(r["ours"]) * epochs / 1e9 for r in rows if r["block"] == block]
        axes.plot(percent, line, marker=".", linestyle=":", color=colour, label=f"adjusted, {block} as kept")
    axes.set_xlabel("ratio (%)")
    axes.set_ylabel(f"GFLOP, one sample's forward x {epochs} epochs")
    axes.legend(fontsize=8)
    return figure


def main(argv: Sequence[str] | None = None) -> int:
    args = options(__doc__, argv, ("--epochs", dict(type=int, default=200, help="what the figure multiplies a sample's forward with")))
    return exit_code("flops.py", lambda: run(args))


def run(args: argparse.Namespace) -> None:
    """Show and write."""
    rows = cells()
    at_80 = {r["block"]: r["fewer_ours"] for r in rows if r["ratio"] == "80%"}
    target = next(r["fewer_target"] for r in rows if r["ratio"] == "80%")
    dense = rows[0]["dense"]
    notes = [
        f"dense: {dense:,} FLOP a sample, {dense * args.epochs:,} times {args.epochs} epochs; a training has 50,000 samples an epoch, and a backward pass",
        f"80 %: published about {CLAIM}x fewer, target {target}x, as kept {', '.join(f'{block} {x}x' for block, x in at_80.items())}",
    ]
    show("Figure 6.7: FLOP of one sample's forward, linears only, 2 a multiplication", rows, notes)
    save(args.out, "flops", [{**r, "epochs": args.epochs} for r in rows], lambda: draw(rows, args.epochs))
    print(tally(rows))


if __name__ == "__main__":
    sys.exit(main())
