"""Table II of Barley and Fröning: overhead of BSR over its ideal, in percent of the dense elements, by sparsity and block; 48 cells.

    python examples/thesis/barley_table_2.py --out examples/results/thesis

Formula: (values + column indices + row pointers - (1 - s) R C) / (R C), an index as wide as a value, R = 196 patches, C = 384 channels. Ours: the elements of
a real BSR tensor that PyTorch makes of pruned random activations.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # beside the other examples, from whatever folder it is started

import torch

from fxmask.analysis.barley import overhead_percent
from thesis.barley_model import DIM, PATCHES, bsr_parts, pruned_bsr
from thesis.side_by_side import Row, one_table, published, row


def cells() -> list[Row]:
    a, rows = torch.randn(PATCHES, DIM, generator=torch.Generator().manual_seed(0)), []
    for line in published("barley_table_2"):
        sparsity = Fraction(int(line.pop("sparsity_pct")), 100)
        for column, text in line.items():
            block = int(column.removeprefix("b"))
            held = sum(part.numel() for part in bsr_parts(pruned_bsr(a, block, sparsity)))
            ours = 100 * (held - (1 - sparsity) * a.numel()) / a.numel()
            keys = {"sparsity": f"{float(sparsity):.0%}", "block": f"1x{block}"}
            rows.append(row(keys, overhead_percent(PATCHES, DIM, block, float(sparsity)), ours, text, unit="% of the dense elements"))
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    return one_table(__doc__, argv, "barley_table_2", "Table II: overhead of BSR, % of the dense elements", cells, "to the printed digits")


if __name__ == "__main__":
    sys.exit(main())
