"""What a run of train.py has left in its folder, and whether it is the run that is asked for. Files that are half written count as not there."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
    """The options that the run was started with, and where."""
    return _json(out / "run.json")


def log_of(out: Path) -> list[dict[str, str]]:
    """A row an epoch so far; none while the last one is being written."""
    try:
        text = (out / "log.csv").read_text()
    except (OSError, UnicodeDecodeError):
        return []
    return list(csv.DictReader(io.StringIO(text))) if text.endswith("\n") else []


def test_of(out: Path) -> dict[str, float] | None:
    """Accuracies on the test images."""
    return _json(out / "test.json")


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
