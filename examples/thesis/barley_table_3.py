"""Table III of Barley and Fröning: activations of ResMLP-S12 at batch 32 when the inputs of 36 linears are pruned and saved as BSR, in MiB.

    python examples/thesis/barley_table_3.py --out examples/results/thesis

Formula: table I's 1,599.2 MiB, less the dense inputs (661.5), plus values and int64 indices. Ours: what autograd saves of a real model, with real BSR tensors
of its real inputs in their place, and the two gradients of table I's count; and, as fxmask_holds, what autograd really saves under ActivationPruning. Savings
are a share of a base, of which there are two that must not be mixed: the table's 1,599.2 MiB, and what autograd holds (1,552.98).

Not in the source is a second table: what autograd holds at 80 % in 1x64 when the inputs of products with parameters are pruned, too. Formula: values and 16-bit
numbers of the kept blocks in the place of the dense inputs. All samples are alike; `--batch 32` measures as many at once (in 6 GiB) instead of one.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # beside the other examples, from whatever folder it is started

import torch
from torch import nn

import fxmask
from fxmask.analysis.barley import kept_blocks, resmlp_activations, resmlp_inputs, saved_bytes
from thesis.barley_model import BATCH, MIB, S12, block_inputs, bsr_parts, inputs, pruned_bsr, saved_by_autograd
from thesis.side_by_side import Row, exit_code, options, published, row, save, show, tally

WITHIN = 0.7  # percent, of the column of activations
TOKENS = (196, 384)  # (patches, channels) of a token activation
AFFINES, GAINS = 25, 24  # products with parameters: Affine modules, and gains that the blocks' own forward multiplies by
LAYOUT = "ours holds more: behind the convolution token mixing's input has its tokens inside, 196 of them in 4 blocks of 64, the last one padded"
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


def products(sparsity: float = 0.8, block: int = 64, batch: int = 1) -> list[Row]:
    """What autograd holds when products with parameters are pruned beside the linears, MiB of a whole batch; `batch` samples are measured at once."""
    torch.manual_seed(0)
    images, labels = inputs(batch, "cpu")
    images.normal_()
    scale = BATCH / batch / MIB
    rows, held = [], saved_by_autograd(S12(), images, labels) * scale
    layers: dict[str, tuple[nn.Module, bool, str | None, int]] = {
        "linears": (S12(), False, None, 0),
        "linears, affines": (S12(), True, "*.gain*", AFFINES),
        "linears, affines, gains (a trace)": (torch.fx.symbolic_trace(S12()), True, None, AFFINES + GAINS),
    }
    for what, (model, affine, left, count) in layers.items():
        fxmask.apply(model, fxmask.ActivationPruning(sparsity, block, affine=affine), include=["blocks.*", "norm.*"][: 1 + affine], exclude=left)
        pruned = [*resmlp_inputs(), *[TOKENS] * count]
        dense = sum(4 * r * c for r, c in pruned) * BATCH / MIB
        kept = sum(kept_blocks(*shape, block, sparsity) * (4 * block + 2) for shape in pruned) * BATCH / MIB
        ours = saved_by_autograd(model, images, labels) * scale
        cell = row({"pruned": what, "inputs": len(pruned)}, held - dense + kept, ours, unit="MiB")
        rows.append({**cell, "dense": f"{held:.2f}", "saves_pct": f"{100 * (1 - ours / held):.2f}", "ideal_saves_pct": f"{100 * sparsity * dense / held:.2f}"})
    return rows


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
    args = options(__doc__, argv, ("--batch", {"type": int, "default": 1, "metavar": "N", "help": "samples measured at once for the second table"}))
    return exit_code("barley_table_3.py", lambda: run(args))


def run(args: argparse.Namespace) -> None:
    """Show and write both tables."""
    rows, measured_base = cells()
    show("Table III: activations, MiB (2^20 bytes)", rows, doubts(rows, measured_base))
    save(args.out, "barley_table_3", rows)
    more = products(batch=args.batch)
    show("Products with parameters pruned, too, 80% 1x64: what autograd holds, MiB (ours: not in the source)", more, [LAYOUT])
    save(args.out, "barley_table_3_products", more)
    print(tally(more))
    print(tally(rows, f"the column of activations, within {WITHIN} %"))


if __name__ == "__main__":
    sys.exit(main())
