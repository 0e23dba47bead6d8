"""Table 6.2 of the thesis: weights loaded in 200 epochs, in billions, by block and ratio; 171 cells.

    python examples/thesis/table_6_2.py --out examples/results/thesis

Formula: kept blocks of each masked layer, times their elements, times 391 batches, times 200 epochs. Ours: the same elements in the masks that `fxmask.apply`
makes of the real model. Every batch loads every kept weight once; what is loaded of layers without masks is not counted.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # beside the other examples, from whatever folder it is started

from fxmask.analysis.model_shapes import ModelShapes
from fxmask.analysis.thesis import loaded_elements
from thesis.real_models import cifar_masks, cifar_shapes
from thesis.side_by_side import Row, block_of, one_table, published, row

BATCHES = 391 * 200


def cells() -> list[Row]:
    closed, real, rows = ModelShapes.resmlp(), cifar_shapes(), []
    for line in published("table_6_2"):
        block = block_of(line.pop("block"))
        for column, text in line.items():
            ratio = int(column.rstrip("%")) / 100
            formula = sum(loaded_elements(m, block, ratio) for m in closed.linears if m.masked)
            masks = cifar_masks(block, ratio)
            ours = sum(loaded_elements(m, block, mask=masks[m.name]) for m in real.linears if m.masked)
            keys = {"block": f"{block[0]}x{block[1]}", "ratio": column}
            rows.append(row(keys, Fraction(formula * BATCHES, 10**9), Fraction(ours * BATCHES, 10**9), text, unit="10^9 elements"))
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    title = "Table 6.2: loaded weights, 10^9 elements in 200 epochs of 391 batches"
    return one_table(__doc__, argv, "table_6_2", title, cells, "to the printed digits")


if __name__ == "__main__":
    sys.exit(main())
