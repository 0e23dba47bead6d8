"""Table I of Barley and Fröning: memory of training ResMLP-S12 at batch 32 on 224x224 images, in MiB.

    python examples/thesis/barley_table_1.py --out examples/results/thesis

Formula: closed forms. Ours: the bytes of real tensors of that shape: images and soft labels, parameters, AdamW's state after a step, storages that autograd
saves. Derived: that one hidden and one token gradient, alive in the backward pass, stand among the activations; with them the sum fits the table.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # beside the other examples, from whatever folder it is started

import torch

from fxmask.analysis.barley import resmlp_activations
from fxmask.analysis.model_shapes import ModelShapes
from thesis.barley_model import BATCH, CLASSES, DIM, MIB, PATCHES, S12, inputs, saved_by_autograd
from thesis.side_by_side import Row, one_table, published, row

WITHIN = 0.1  # percent


def measured() -> dict[str, float]:
    """MiB of the parts, from tensors without values: bytes are those of a real step."""
    with torch.device("meta"):
        model = S12()
    images, labels = inputs(BATCH, "meta")
    saved = saved_by_autograd(model, images, labels)
    optimiser = torch.optim.AdamW(model.parameters(), foreach=False)
    for p in model.parameters():
        p.grad = torch.empty_like(p)
    optimiser.step()
    gradients = BATCH * PATCHES * (4 * DIM + DIM) * 4
    parts = {
        "input": images.nbytes + labels.nbytes,
        "model": sum(p.nbytes for p in model.parameters()),
        "optimizer": sum(t.nbytes for state in optimiser.state.values() for t in state.values()),
        "activations": saved + gradients,
    }
    return {name: n / MIB for name, n in {**parts, "total": sum(parts.values()), "saved": saved, "gradients": gradients}.items()}


def closed() -> dict[str, float]:
    n = ModelShapes.resmlp(image=224, patch=16, dim=DIM, depth=12, classes=CLASSES).parameters
    saved, gradients = resmlp_activations()
    parts = {"input": BATCH * (3 * 224**2 + CLASSES), "model": n, "optimizer": 2 * n, "activations": saved + gradients}
    return {name: 4 * n / MIB for name, n in {**parts, "total": sum(parts.values()), "saved": saved, "gradients": gradients}.items()}


def cells() -> list[Row]:
    table, formula, ours = published("barley_table_1"), closed(), measured()
    notes = {
        "input": "images, soft labels",
        "model": "15,350,872 parameters; what else is counted is not said",
        "optimizer": "two moments; what else is counted is not said",
        "activations": f"{ours['saved']:.2f} saved + {ours['gradients']:.2f} gradients (derived)",
        "total": "sum of the parts",
    }
    rows = []
    for line in table:
        part = line["part"]
        cell = row({"part": part}, formula[part], ours[part], line["published_mib"], unit="MiB", within_percent=WITHIN)
        if line["published_percent"]:
            cell |= {"published_share_pct": line["published_percent"], "ours_share_pct": f"{100 * ours[part] / ours['total']:.1f}"}
        rows.append({**cell, "note": notes[part]})
    return rows


def doubts(rows: list[Row]) -> list[str]:
    """What does not add up: against us, and within the published table."""
    value = {r["part"]: float(r["published"]) for r in rows}
    found = [f"unexplained: {r['part']}, {float(r['published']) - float(r['ours']):+.2f} MiB more than ours" for r in rows if r["status"] == "differs"]
    for r in rows:
        share = f"{100 * value[r['part']] / value['total']:.1f}"
        if r.get("published_share_pct") and share != r["published_share_pct"]:
            found.append(f"within the table: {r['part']} is {share} % of the total, printed {r['published_share_pct']}")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    return one_table(__doc__, argv, "barley_table_1", "Table I: memory, MiB (2^20 bytes)", cells, f"within {WITHIN} %", doubts)


if __name__ == "__main__":
    sys.exit(main())
