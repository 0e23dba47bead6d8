"""Table III of Barley and Fröning: activations of ResMLP-S12 at batch 32 when the inputs of 36 linears are pruned and saved as BSR, in MiB.

    python examples/thesis/barley_table_3.py --out examples/results/thesis

Formula: table I's 1,599.2 MiB, less the dense inputs (661.5), plus values and int64 indices. Ours: what autograd saves of a real model, with real BSR tensors
of its real inputs in their place, and the two gradients of table I's count; and, as fxmask_holds, what autograd really saves under ActivationPruning. Savings
are a share of a base, of which there are two that must not be mixed: the table's 1,599.2 MiB, and what autograd holds (1,552.98).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # beside the other examples, from whatever folder it is started

import fxmask
from fxmask.analysis.barley import resmlp_activations, resmlp_inputs, saved_bytes
from thesis.barley_model import BATCH, MIB, S12, block_inputs, bsr_parts, inputs, pruned_bsr, saved_by_autograd
from thesis.side_by_side import Row, options, published, row, save, show, tally

WITHIN = 0.7  # percent, of the column of activations
INDICES = {"int64": 8, "int32": 4, "int16": 2, "values alone": 0}


def base() -> float:
    """Dense activations as table I prints them, MiB."""
    return next(float(line["published_mib"]) for line in published("barley_table_1") if line["part"] == "activations")


def cells() -> tuple[list[Row], float]:
    """The rows, and the base that ours stand on: all activations by table I's count, measured."""
    per_sample, found = block_inputs()
    dense_inputs, held = sum(a.nbytes for a in found) * BATCH / MIB, per_sample * BATCH / MIB
    own_base = held + 4 * resmlp_activations()[1] / MIB
    rows = []
    for line in published("barley_table_3"):
        sparsity, block = Fraction(int(line["sparsity_pct"]), 100), int(line["block"])
        dense, kept = saved_bytes(resmlp_inputs(), BATCH, block, float(sparsity))
        bsr = sum(part.nbytes for a in found for part in bsr_parts(pruned_bsr(a, block, sparsity))) * BATCH / MIB
        keys = {"sparsity": f"{float(sparsity):.0%}", "block": f"1x{block}"}
        cell = row(keys, base() - (dense - kept) / MIB, own_base - dense_inputs + bsr, line["activations_mib"], unit="MiB", within_percent=WITHIN)
        cell |= {"published_delta": line["delta_mib"], "published_delta_pct": line["delta_pct"]}
        cell |= {f"ours_delta_pct_of_{of}": f"{100 * (bsr - dense_inputs) / whole:.1f}" for of, whole in (("table_1", base()), ("autograd", held))}
        pruned = library_holds(float(sparsity), block)
        cell |= {"autograd_holds": f"{held - dense_inputs + bsr:.2f}", "fxmask_holds": f"{pruned:.2f}", "fxmask_saves_pct": f"{100 * (1 - pruned / held):.2f}"}
        rows.append({**cell, "ideal_saves_pct": f"{100 * float(sparsity) * dense_inputs / held:.2f}"})
    return rows, own_base


def library_holds(sparsity: float, block: int) -> float:
    """MiB that autograd holds of a batch when `fxmask.ActivationPruning` saves the inputs of the 36 linears: values, and 16-bit numbers of the kept blocks."""
    model = fxmask.apply(S12(), fxmask.ActivationPruning(sparsity, block), include="blocks.*")
    images, labels = inputs(1, "cpu")
    return saved_by_autograd(model, images.normal_(), labels) * BATCH / MIB


def doubts(rows: list[Row], measured_base: float) -> list[str]:
    """What does not add up within the published table, and which indices would."""
    found = []
    for r in rows:
        delta, share = float(r["published"]) - base(), f"{100 * float(r['published_delta']) / base():.1f}"
        if abs(delta - float(r["published_delta"])) > 0.05:
            found.append(f"within the table: {r['sparsity']} {r['block']}: {r['published']} - {base()} = {delta:.1f}, printed {r['published_delta']}")
        if share != r["published_delta_pct"]:
            found.append(f"within the table: {r['sparsity']} {r['block']}: {r['published_delta']} of {base()} is {share} %, printed {r['published_delta_pct']}")
    widths = {name: saved_bytes(resmlp_inputs(), BATCH, 64, 0.8, index_bytes=n) for name, n in INDICES.items()}
    shares = ", ".join(f"{name} {100 * (kept - dense) / MIB / base():.2f}" for name, (dense, kept) in widths.items())
    found.append(f"formula and ours stand on two bases: {base()} MiB as printed, and what table I's count measures, {measured_base:.2f}")
    return [*found, f"80% 1x64 in % of {base()} by the width of an index, closed form: {shares}"]


def main(argv: Sequence[str] | None = None) -> int:
    args = options(__doc__, argv)
    rows, measured_base = cells()
    show("Table III: activations, MiB (2^20 bytes)", rows, doubts(rows, measured_base))
    save(args.out, "barley_table_3", rows)
    print(tally(rows, f"the column of activations, within {WITHIN} %"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
