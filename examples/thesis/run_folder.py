"""What a run of train.py has left in its folder, and whether it is the run that is asked for. Files that are half written count as not there."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from thesis import csv_files
from thesis.sweep_checks import SweepError
from thesis.sweep_file import defaults_of_train
from thesis.train_run import HOW_RUN


def _json(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):  # neither text nor JSON
        return None
    return found if isinstance(found, dict) else None


def facts_of(out: Path) -> dict[str, Any] | None:
    """The options that the run was started with, and where. Raises: SweepError where they are another script's."""
    facts = _json(out / "run.json")
    lacking = [] if facts is None else [name for name in ("epochs", "data", "dense", "holdout", "threads", "torch") if name not in facts]
    if lacking or (facts is not None and not isinstance(facts["epochs"], int)):
        what = f"expected what thesis/train.py writes, got {f'no {lacking[0]}' if lacking else 'epochs that are no number'}"
        raise SweepError(f"{out / 'run.json'}: {what}.\n  fix: bring the file back, or remove the folder.")
    return facts


def log_of(out: Path) -> list[dict[str, str]]:
    """A row an epoch so far; none while the last one is being written. Raises: ConfigError where a row holds something else than numbers."""
    try:
        text = (out / "log.csv").read_text()
    except (OSError, UnicodeDecodeError):
        return []
    rows = list(csv.DictReader(io.StringIO(text))) if text.endswith("\n") else []
    return csv_files.numbers(out / "log.csv", rows, *(rows[0] if rows else ()))


def sums_of(log: list[dict[str, str]]) -> dict[str, Any]:
    """What a table has of all epochs together: flips, TFLOP and seconds."""
    flop, seconds = (sum(float(row[column]) for row in log) for column in ("flop", "seconds"))
    return {"flips": sum(int(row["flips"]) for row in log), "train_tflop": f"{flop / 1e12:.2f}", "train_seconds": f"{seconds:.0f}"}


def test_of(out: Path) -> dict[str, float] | None:
    """Accuracies on the test images. Raises: ConfigError where they are no numbers."""
    found = _json(out / "test.json")
    csv_files.numbers(out / "test.json", [] if found is None else [found], "top1", "top5")
    return found


def differing(now: Mapping[str, Any], facts: Mapping[str, Any]) -> list[str]:
    """Options that a run has otherwise. One that it does not name is younger than the run, and had its default."""
    before = {**defaults_of_train(), **facts}
    return [key for key in now if key not in (*HOW_RUN, "dense") and now[key] != before[key]]


def same_settings(now: Mapping[str, Any], facts: Mapping[str, Any], out: Path, who: str, fix: str) -> None:
    """The folder's run has the options `now`, which `who` asks for.

    Raises:
        SweepError: it has others.
    """
    differ = differing(now, facts)
    if differ:
        wanted, got = (", ".join(f"{key} {side[key]!r}" for key in differ) for side in (now, {**defaults_of_train(), **facts}))
        raise SweepError(f"{out}: expected a run with {wanted}, as {who}, got one with {got}.\n  fix: {fix}.")
