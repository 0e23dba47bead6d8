"""Figure 6.3 of the thesis: masked weight elements of the CIFAR-10 model against the ratio, for 2x2, 32x32 and 64x64 blocks.

    python examples/thesis/masked_elements.py --out examples/results/thesis

Formula: all elements of the masked layers, less kept blocks times their size. Ours: counted in the masks of the real model. The figure has no numbers, so
every cell is derived. Large blocks fall behind the target: a fifth of 16 blocks is rounded up to 4 that are kept, and a layer of one block is never masked.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # beside the other examples, from whatever folder it is started

from plots import new_figure

from fxmask.analysis.model_shapes import ModelShapes
from fxmask.analysis.thesis import loaded_elements
from thesis.flops import BLOCKS, RATIOS
from thesis.real_models import cifar_masks, cifar_shapes
from thesis.side_by_side import Row, one_table, row

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def cells() -> list[Row]:
    closed, real, rows = ModelShapes.resmlp(), cifar_shapes(), []
    for block in BLOCKS:
        for ratio in RATIOS:
            formula = closed.maskable - sum(loaded_elements(m, block, ratio) for m in closed.linears if m.masked)
            masks = cifar_masks(block, ratio)
            ours = real.maskable - sum(loaded_elements(m, block, mask=masks[m.name]) for m in real.linears if m.masked)
            keys = {"block": f"{block[0]}x{block[1]}", "ratio": f"{ratio:.0%}", "target": f"{ratio * closed.maskable:.0f}"}
            rows.append({**row(keys, formula, ours, digits=0, unit="elements"), "achieved": f"{ours / real.maskable:.1%}"})
    return rows


def draw(rows: list[Row]) -> Figure:
    figure = new_figure(6.0, 3.8)
    axes = figure.subplots()
    for block in dict.fromkeys(r["block"] for r in rows):
        line = [r for r in rows if r["block"] == block]
        axes.plot([int(r["ratio"].rstrip("%")) for r in line], [int(r["ours"]) for r in line], marker=".", label=block)
    target = [r for r in rows if r["block"] == rows[0]["block"]]
    axes.plot([int(r["ratio"].rstrip("%")) for r in target], [int(r["target"]) for r in target], color="gray", linestyle=":", label="target")
    axes.set_xlabel("ratio (%)")
    axes.set_ylabel("masked weight elements")
    axes.legend()
    return figure


def main(argv: Sequence[str] | None = None) -> int:
    title = f"Figure 6.3: masked elements, of {ModelShapes.resmlp().maskable:,} in masked layers"
    return one_table(__doc__, argv, "masked_elements", title, cells, draw=draw)


if __name__ == "__main__":
    sys.exit(main())
