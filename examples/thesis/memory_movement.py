"""Figures 6.1 and 6.2 of the thesis: memory that the forwards of a training move, by block and ratio.

    python examples/thesis/memory_movement.py --out examples/results/thesis [--accuracy masked_accuracy.csv]

GiB in 200 epochs at batch 128, in 128-byte lines; the source says GB. Every cell is derived: the text gives two figures, "approximately 318" dense and
"approx. 277" for 32x32 at 80 %, and neither the lines that a kept block takes (variant A, C, D or K, see fxmask/analysis/thesis.py) nor the number of batches
an epoch, 391 or 50,000 / 128 = 390.625. Formula: closed form. Ours: the shapes of the real model, and the masks that `fxmask.apply` makes of it. Cells
that would move more than the dense model are capped at it. Accuracies are shown only from a csv of runs: columns block, ratio (0.8), mode (masked or
unmasked) or backward, top1; of several rows for a cell, such as seeds, the mean. sweep.py writes one.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # beside the other examples, from whatever folder it is started

from plots import new_figure
from tabulate import tabulate

from fxmask.analysis.model_shapes import ModelShapes
from fxmask.analysis.thesis import VARIANTS, movement
from fxmask.errors import ConfigError
from thesis.csv_files import numbers, read
from thesis.real_models import cifar_masks, cifar_shapes
from thesis.side_by_side import Row, blocks_and_ratios, exit_code, options, row, save, show, tally

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EPOCHS, BATCHES = 200, (391, 390.625)
MOVED = "GiB moved in 200 epochs, capped at the dense model's"
TEXT = {"dense": "318", "32x32": "277"}  # the source's "approximately 318" and "approx. 277"


def cells() -> list[Row]:
    """Variant A at 391 batches as formula and ours; 390.625 batches, the other variants, and activations of every token in columns beside."""
    closed, real, rows = ModelShapes.resmlp(), cifar_shapes(), []
    for block, ratio in blocks_and_ratios():
        masks = cifar_masks(block, ratio)
        keys = {"block": f"{block[0]}x{block[1]}", "ratio": f"{ratio:.0%}"}
        a, b = ({v: movement(m, block, r, masks=k, variant=v) for v in VARIANTS} for m, r, k in ((closed, ratio, None), (real, None, masks)))
        tokens = movement(real, block, masks=masks, memory_model="tokens")
        more = {f"at_{batches}_batches": f"{b['A'].gib(batches * EPOCHS):.2f}" for batches in BATCHES[1:]}
        more |= {f"variant_{v}": f"{b[v].gib(BATCHES[0] * EPOCHS):.2f}" for v in VARIANTS if v != "A"}
        rows.append({**row(keys, *(m["A"].gib(BATCHES[0] * EPOCHS) for m in (a, b)), unit="GiB"), **more, "tokens": f"{tokens.gib(BATCHES[0] * EPOCHS):.2f}"})
    return rows


def text_cells() -> list[Row]:
    """The two figures of the source's text against all candidates, at both numbers of batches."""
    closed, real, rows = ModelShapes.resmlp(), cifar_shapes(), []
    masks = cifar_masks((32, 32), 0.8)
    for batches in BATCHES:
        dense = [movement(m, (32, 32), 0.8).dense_gib(batches * EPOCHS) for m in (closed, real)]
        rows.append(row({"what": "dense", "batches": batches, "variant": "-"}, *dense, TEXT["dense"], unit="GiB"))
        for v in VARIANTS:
            pair = [movement(m, (32, 32), r, masks=k, variant=v).gib(batches * EPOCHS) for m, r, k in ((closed, 0.8, None), (real, None, masks))]
            rows.append(row({"what": "32x32 at 80%", "batches": batches, "variant": v}, *pair, TEXT["32x32"], unit="GiB"))
    return rows


def grid(rows: list[Row], column: str, accuracy: dict[tuple[str, str], float] | None = None) -> str:
    """Rows block, columns ratio, cells GiB, with accuracy in front where it was measured."""
    ratios = list(dict.fromkeys(r["ratio"] for r in rows))
    lines: dict[str, list[str]] = {}
    for r in rows:
        top1 = (accuracy or {}).get((r["block"], r["ratio"]))
        lines.setdefault(r["block"], []).append(r[column] if top1 is None else f"{top1:.1f}% {r[column]}")
    return tabulate([[block, *cells] for block, cells in lines.items()], headers=["block", *ratios], disable_numparse=True)


def draw(rows: list[Row], accuracy: dict[tuple[str, str], float] | None = None) -> Figure:
    """A heat map: colour is accuracy where it was measured, else GiB; the number in a cell is GiB."""
    blocks, ratios = (list(dict.fromkeys(r[key] for r in rows)) for key in ("block", "ratio"))
    gib = {(r["block"], r["ratio"]): r["ours"] for r in rows}
    colour = accuracy if accuracy is not None else {key: float(value) for key, value in gib.items()}
    figure = new_figure(8.0, 8.0)
    axes = figure.subplots()
    values = [[colour.get((b, r), float("nan")) for r in ratios] for b in blocks]
    image = axes.imshow(values, aspect="auto", cmap="viridis")
    for i, b in enumerate(blocks):
        for j, r in enumerate(ratios):
            axes.text(j, i, gib[b, r], ha="center", va="center", fontsize=7, color="white", bbox=dict(facecolor="black", alpha=0.35, lw=0, pad=1))
    axes.set_xticks(range(len(ratios)), ratios)
    axes.set_yticks(range(len(blocks)), blocks)
    axes.set_xlabel("ratio")
    axes.set_ylabel("block")
    figure.colorbar(image, label=MOVED if accuracy is None else f"top-1 accuracy (%); numbers: {MOVED}")
    return figure


def accuracies(path: Path) -> dict[str, dict[tuple[str, str], float]]:
    """Top-1 by mode, then by (block, ratio)."""
    found: dict[str, dict[tuple[str, str], list[float]]] = {}
    mode = "backward" if any("backward" in r for r in read(path, cut_off=True)) else "mode"
    rows = [r for r in read(path, ("block", "ratio", mode, "top1")) if r["block"]]  # a sweep's runs without a cell, such as dense ones, are left out
    for r in numbers(path, rows, "ratio", "top1"):
        found.setdefault(r[mode], {}).setdefault((r["block"], f"{float(r['ratio']):.0%}"), []).append(float(r["top1"]))
    if not found:
        raise ConfigError(f"--accuracy: expected rows of runs that have a block, got {f'none in {path}' if path.exists() else f'no file {path}'}.")
    return {mode: {cell: fmean(values) for cell, values in cells.items()} for mode, cells in found.items()}


def main(argv: Sequence[str] | None = None) -> int:
    args = options(__doc__, argv, ("--accuracy", dict(type=Path, metavar="CSV", help="measured top-1: columns block, ratio, mode, top1")))
    return exit_code("memory_movement.py", lambda: run(args))


def run(args: argparse.Namespace) -> None:
    """Show and write."""
    modes = accuracies(args.accuracy) if args.accuracy else {}
    rows, text = cells(), text_cells()
    for mode, top1 in (modes or {"": None}).items():
        name = f"Figures 6.1 and 6.2{': ' + mode if mode else ''}"
        print(f"{name}, GiB capped at the dense model's, ours, variant A, 391 batches, derived\n\n{grid(rows, 'ours', top1)}\n")
        save(args.out, f"memory_movement_{mode}" if mode else "memory_movement", rows, lambda top1=top1: draw(rows, top1))  # type: ignore[misc]
    print(f"The same with 390.625 batches\n\n{grid(rows, 'at_390.625_batches')}\n")
    masked = [r for r in text if r["published"] == TEXT["32x32"]]
    nearest = min(masked, key=lambda r: abs(float(r["ours"]) - float(r["published"])))
    fits = sum(r["status"] == "agrees" for r in masked)
    notes = [f"variant {v}: {how}" for v, how in VARIANTS.items()]
    notes.append(f"{fits} of {len(masked)} candidates give {TEXT['32x32']}; the nearest is {nearest['ours']}. The source does not say how it counts.")
    show("The two figures of the text", text, notes)
    save(args.out, "memory_movement_text", text)
    known = {r["published"] for r in text}
    agree = {r["published"] for r in text if r["status"] == "agrees"}
    print(f"{len(agree)} of {len(known)} published figures agree with a candidate (as whole GiB); {tally(rows)}")


if __name__ == "__main__":
    sys.exit(main())
