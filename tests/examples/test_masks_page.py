"""The times of a masked step in docs/masks.md are those of the recorded rows, and so is what it says of cells that were slowed down."""

import csv
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/masks.md").read_text()
ROWS = {  # of the table: (optimizer, form, block, refresh)
    "AdamW: dense step / freeze": ("adamw", "default", "64", "0"),
    "AdamW, blocks of 16": ("adamw", "default", "16", "0"),
    "AdamW, masks made anew in each step (`refresh=1`)": ("adamw", "default", "64", "1"),
    "AdamW, fused": ("adamw", "fused", "64", "0"),
    "SGD with momentum": ("sgd", "default", "64", "0"),
}


def cells(label):
    """The rows at 50, 80 and 90 %, in milliseconds."""
    with (ROOT / "examples/results/cpu/masked_step.csv").open(newline="") as file:
        found = {r["ratio"]: r for r in csv.DictReader(file) if tuple(r[k] for k in ("optimizer", "form", "block", "refresh")) == ROWS[label]}
    return [{name: float(found[ratio][f"{name}_ms"]) for name in ("no_guard", "freeze", "masked_step")} for ratio in ("0.5", "0.8", "0.9")]


def test_times_of_a_masked_step():
    for label in ROWS:
        said = [f"{c['no_guard'] / c['masked_step']:.2f} / {c['freeze'] / c['masked_step']:.2f}" for c in cells(label)]
        assert f"| {label} | {' | '.join(said)} |" in PAGE


def at_80(name, *labels):
    """Of each row what one of the times is at 80 %, that of the masked step, and the times at 50 and 90 %."""
    return [(middle[name], middle["masked_step"], (first[name], last[name])) for first, middle, last in map(cells, labels)]


def test_what_is_to_be_read_with_care():
    page = " ".join(PAGE.split())
    (ms, step, beside), (ms_anew, step_anew, beside_anew) = at_80("no_guard", "AdamW: dense step / freeze", "AdamW, masks made anew in each step (`refresh=1`)")
    low, high = min(*beside, *beside_anew), max(*beside, *beside_anew)
    assert f"took {ms:.0f} and {ms_anew:.0f} ms there, {low:.0f} to {high:.0f} in the cells beside them" in page
    assert f"Against those {ms / step:.2f} would be {low / step:.1f} to {high / step:.1f}, and {ms_anew / step_anew:.2f} a loss, " in page
    assert f"a loss, {low / step_anew:.1f} to {high / step_anew:.1f}." in page


def test_freeze_is_to_be_read_with_care_too():
    (ms, step, beside), (ms_sgd, step_sgd, beside_sgd) = at_80("freeze", "AdamW, fused", "SGD with momentum")
    assert f"{ms:.0f} and {ms_sgd:.0f} ms there, {min(*beside, *beside_sgd):.0f} to {max(*beside, *beside_sgd):.0f} beside" in PAGE
    instead = [b / step for b in beside] + [b / step_sgd for b in beside_sgd]
    assert f"{ms / step:.2f} and {ms_sgd / step_sgd:.2f} would be {min(instead):.1f} to {max(instead):.1f}." in PAGE
