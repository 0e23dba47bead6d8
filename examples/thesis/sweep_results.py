"""What a sweep's runs came to: `masked_accuracy.csv` and `loaded_elements.csv`, made anew from the runs' own logs each time.

A run counts when its log has all of its epochs, so none is lost or counted twice, whoever was killed when. Predicted loads and memory movement are those of
the thesis' table 6.2 and figures 6.1 and 6.2, for as many batches as the run has: every batch with all masks at their ratio. What is measured also has
the dense epochs before masks begin, and ramps of the ratio.
"""

from __future__ import annotations

import fnmatch
import shlex
from argparse import Namespace
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from resmlp import PRESETS

from fxmask.analysis.model_shapes import LinearShape, ModelShapes
from fxmask.analysis.thesis import Movement, loaded_elements, movement
from thesis import csv_files, run_folder
from thesis.masked_model import preset_of
from thesis.side_by_side import published
from thesis.sweep_file import Job
from thesis.sweep_fixed import classes_of

ACCURACY = (
    "run", "block", "ratio", "backward", "seed", "variant", "top1", "top5", "judged_on", "train_acc", "train_loss", "val_loss", "ratio_achieved", "flips",
    "epochs", "seconds", "threads", "device", "torch", "data", "command",
)  # fmt: skip
LOADED = (
    "run", "block", "ratio", "backward", "seed", "variant", "batches", "predicted", "measured", "measured_over_predicted", "predicted_g", "published_g",
    "moved_gib",
)  # fmt: skip
THESIS_BATCHES = 391 * 200


@dataclass(frozen=True)
class Ended:
    """A run that has ended: its job, the options it ran with, and its log."""

    job: Job
    facts: dict[str, Any]
    log: list[dict[str, str]]
    test: dict[str, float] | None

    @property
    def top1(self) -> float:
        return float((self.test or self.log[-1])["top1"])


def ended(job: Job, out: Path) -> Ended | None:
    """The run, None while it has not ended.

    Raises:
        SweepError: the folder holds a run with other settings.
    """
    facts = run_folder.facts_of(out)
    if facts is None:
        return None
    args, log = job.namespace(), run_folder.log_of(out)
    run_folder.same_settings(vars(args), facts, out, "the sweep's file says", "another --out, or remove the folder")
    test = run_folder.test_of(out) if args.read_test else None
    return None if len(log) < args.epochs or (args.read_test and test is None) else Ended(job, facts, log, test)


def block_and_ratio(job: Job) -> tuple[tuple[int, int], float] | None:
    """A run's cell of the thesis' grid; None where its layers differ, or some of the three are dense."""
    forms = {(item.form, item.ratio, item.block) for item in job.config.items}
    if len(forms) != 1 or len({p for item in job.config.items for p in item.patterns}) != 3:
        return None
    ((form, ratio, block),) = forms
    return (block, ratio) if form == "masked" else None


def variant(job: Job) -> str:
    """What of the grid sets runs of one cell apart, besides mode and seed."""
    return " ".join(f"{k}={v}" for k, v in job.settings.items() if k not in ("seed", "backward", "model_config"))


def keys(run: Ended) -> dict[str, Any]:
    cell, args = block_and_ratio(run.job), run.facts
    return {
        "run": run.job.name,
        "block": f"{cell[0][0]}x{cell[0][1]}" if cell else "",
        "ratio": f"{cell[1]:g}" if cell else "",
        "backward": args["backward"] if run.job.config.items else "dense",
        "seed": args["seed"],
        "variant": variant(run.job),
    }


def accuracy_row(run: Ended) -> dict[str, Any]:
    """A row of masked_accuracy.csv: the last epoch's values, sums over all of them."""
    last, args, words = run.log[-1], run.facts, list(run.job.arguments)
    if "--root" in words:
        words[words.index("--root") + 1] = "DIR"
    return {
        **keys(run),
        **{k: f"{float((run.test or last)[k]):.2f}" for k in ("top1", "top5")},
        "judged_on": "test images" if run.test or not args["holdout"] else "held-out training images",
        "train_acc": f"{float(last['train_acc']):.2f}",
        **{k: f"{float(last[k]):.4f}" for k in ("train_loss", "val_loss", "ratio_achieved")},
        "flips": sum(int(r["flips"]) for r in run.log),
        "epochs": len(run.log),
        "seconds": f"{sum(float(r['seconds']) for r in run.log):.1f}",
        **{k: args[k] for k in ("threads", "device", "torch", "data")},
        "command": shlex.join(["python", "examples/thesis/train.py", *words]),
    }


def loaded_row(run: Ended) -> dict[str, Any]:
    """A row of loaded_elements.csv."""
    batches, args = len(run.log) * run.facts["steps"], run.job.namespace()
    layers, cell = layers_of(run.job, args), block_and_ratio(run.job)
    predicted, measured = batches * sum(loaded for _, _, loaded in layers), round(sum(float(r["loaded"]) for r in run.log))
    row = {**keys(run), "batches": batches, "predicted": predicted, "measured": measured, "measured_over_predicted": f"{measured / predicted:.4f}"}
    moved = moved_of(args, run.job, cell)
    row |= {"predicted_g": f"{predicted / 1e9:.2f}", "moved_gib": f"{moved.gib(batches):.6g}" if moved else ""}
    thesis = cell and batches == THESIS_BATCHES and shapes_of(args, run.job) == ModelShapes.resmlp()
    return {**row, "published_g": table_6_2().get((row["block"], f"{cell[1]:.0%}"), "") if thesis and cell else ""}


@cache
def table_6_2() -> dict[tuple[str, str], str]:
    return {(line["block"], ratio): text for line in published("table_6_2") for ratio, text in line.items()}


def shapes_of(args: Namespace, job: Job) -> ModelShapes:
    """Shapes of the run's model."""
    preset = PRESETS[preset_of(args)]
    sizes = {"dim": args.dim or preset.dim, "expansion": args.expansion or preset.expansion, "classes": classes_of(args) or preset.classes}
    return ModelShapes.resmlp(image=preset.image, channels=preset.channels, patch=preset.patch, depth=job.config.depth, **sizes)


def layers_of(job: Job, args: Namespace) -> list[tuple[LinearShape, Any, int]]:
    """The blocks' linears, the item that masks each (None: dense), and the elements that a forward loads of it."""
    found = []
    for linear in shapes_of(args, job).linears:
        if linear.masked:
            items = [i for i in job.config.items if any(fnmatch.fnmatch(linear.name, f"{p}.weight") for p in i.patterns)]
            item = items[-1] if items else None
            found.append((linear, item, loaded_elements(linear, item.block, item.ratio) if item else linear.elements))
    return found


def moved_of(args: Namespace, job: Job, cell: tuple[tuple[int, int], float] | None) -> Movement | None:
    """Memory that a batch's forward moves, variant A; None where no single block and ratio describe the model."""
    return movement(shapes_of(args, job), *cell, batch=args.batch) if cell else None


def collect(jobs: tuple[Job, ...], out: Path) -> list[Ended]:
    """All runs of the sweep that have ended, in its order."""
    return [run for run in (ended(job, out / job.name) for job in jobs) if run]


def write(runs: list[Ended], out: Path) -> None:
    """Both csv files, whole or as they were before."""
    for name, columns, row in (("masked_accuracy", ACCURACY, accuracy_row), ("loaded_elements", LOADED, loaded_row)):
        csv_files.write(out / f"{name}.csv", columns, (row(run) for run in runs))
