"""The times of a masked step in docs/masks.md are those of the recorded rows."""

import csv
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = " ".join((ROOT / "docs/masks.md").read_text().split())
ROWS = {  # of the table: (optimizer, form, block, refresh)
    "AdamW: dense step / freeze": ("adamw", "default", "64", "0"),
    "AdamW, blocks of 16": ("adamw", "default", "16", "0"),
    "AdamW, masks made anew in each step (`refresh=1`)": ("adamw", "default", "64", "1"),
    "AdamW, fused": ("adamw", "fused", "64", "0"),
    "SGD with momentum": ("sgd", "default", "64", "0"),
}
TIMES = ("no_guard", "freeze", "clones", "masked_step")


def runs(label, ratio):
    """The rows of one cell, a run each, in milliseconds."""
    with (ROOT / "examples/results/cpu/masked_step.csv").open(newline="") as file:
        rows = [r for r in csv.DictReader(file) if (*(r[k] for k in ("optimizer", "form", "block", "refresh")), r["ratio"]) == (*ROWS[label], ratio)]
    assert [r["repeats"] for r in rows] == ["15", "41", "41"]
    return [{name: float(r[f"{name}_ms"]) for name in TIMES} for r in rows]


def quotients(label, ratio, one, other):
    return [run[one] / run[other] for run in runs(label, ratio)]


def lowest_to_highest(found, digits, to=" to "):
    return f"{min(found):.{digits}f}{to}{max(found):.{digits}f}"


def test_times_of_a_masked_step():
    for label in ROWS:
        said = [" / ".join(lowest_to_highest(quotients(label, ratio, name, "masked_step"), 2, "–") for name in TIMES[:2]) for ratio in ("0.5", "0.8", "0.9")]
        assert f"| {label} | {' | '.join(said)} |" in PAGE


def test_how_far_the_machines_are_apart():
    cells = [runs(label, ratio) for label in ROWS for ratio in ("0.5", "0.9")]
    slower = {name: [run[name] / first[name] for first, *later in cells for run in later] for name in ("no_guard", "masked_step")}
    said = [lowest_to_highest(slower[name], 1) for name in slower]
    assert f"At 50 and 90 % the dense step took {said[0]} times as long there, the masked step {said[1]}:" in PAGE


def test_what_freeze_takes_beside_copies():
    found = [q for label in ROWS for ratio in ("0.5", "0.8", "0.9") for q in quotients(label, ratio, "freeze", "clones")]
    assert f"That takes {lowest_to_highest(found, 1)} of the time with copies of whole tensors" in PAGE
