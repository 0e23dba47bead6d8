"""Checkpoints that survive a kill at any moment: the last whole one is always there, and a damaged file is told from a missing one."""

from __future__ import annotations

import errno
import json
import os
import sys
import zipfile
from pathlib import Path
from typing import Any

import torch

from fxmask import FxMaskError
from thesis import csv_files

LAST, BEFORE = "checkpoint.pt", "checkpoint.before.pt"
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
PARTS = ("model", "masks", "optimiser", "scheduler", "progress", "tracker", "settings")


class CheckpointError(FxMaskError):
    """A folder whose checkpoints cannot be used; the message says why and what to do."""


def save(folder: Path, state: dict[str, Any]) -> None:
    """Write `state` as the folder's last checkpoint; the one before it is kept, or the last whole one where that is cut off."""
    new = folder / "checkpoint.new.pt"
    write(new, state)
    if zipfile.is_zipfile(folder / LAST):  # where it is not, BEFORE is what the run went on from, and all that a kill now would leave
        os.replace(folder / LAST, folder / BEFORE)
    os.replace(new, folder / LAST)


def write(path: Path, state: dict[str, Any]) -> None:
    """`torch.save`, down to the disk. Raises: CheckpointError where there is no room, of which torch's own error does not speak; nothing is left of it then."""
    try:
        with path.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
    except (OSError, RuntimeError) as error:
        why = error if isinstance(error, OSError) else error.__context__  # torch closes its archive behind the write that failed
        if not (isinstance(why, OSError) and why.errno in NO_ROOM):  # it says itself what it is
            raise
        path.unlink(missing_ok=True)
        what = f"{path}: cannot be written: {why.strerror}"
        raise CheckpointError(f"{what}.\n  fix: make room; the same command goes on from the checkpoint before.") from None


def begin_again(folder: Path) -> None:
    """Remove what an earlier run has left. First what counts as its end, last what it would go on from: killed in between, a run goes on, or begins anew."""
    for name in ("test.json", "accuracy.png", "active_blocks.png", BEFORE, LAST):
        (folder / name).unlink(missing_ok=True)


def has_epochs(log: Path, done: int) -> None:
    """A run that goes on behind `done` epochs has their rows. Raises: CheckpointError."""
    there = {row["epoch"] for row in csv_files.read(log, ("epoch",), cut_off=True) if None not in row.values()}  # None: the row is cut off
    missing = [str(epoch) for epoch in range(1, done + 1) if str(epoch) not in there]
    if missing:
        what = f"expected a row for each of the {done} epochs that the checkpoint has behind it, got none of {', '.join(missing[:5])}"
        raise CheckpointError(f"{log}: {what}.\n  fix: bring the file back, or --fresh, which begins again.")


def load(folder: Path, map_location: str | None = None) -> dict[str, Any] | None:
    """The last whole checkpoint; None where there is none. A damaged one is reported on stderr and the one before it taken."""
    found = [folder / name for name in (LAST, BEFORE) if (folder / name).exists()]
    for path in found:
        try:
            state = torch.load(path, weights_only=True, map_location=map_location)
        except Exception as error:  # bytes that are no checkpoint raise anything: UnpicklingError, IndexError, struct.error
            print(f"{path}: cut off or damaged ({type(error).__name__}: {str(error)[:100]!r})", file=sys.stderr)
            continue
        return checked(state, path)
    if found:
        names = ", ".join(path.name for path in found)
        raise CheckpointError(f"no whole checkpoint in {folder}: expected one of {names} to be readable.\n  fix: --fresh begins again.")
    return None


def checked(state: Any, path: Path) -> dict[str, Any]:
    """A checkpoint has all of its parts, or says what a run from it would lose."""
    if not isinstance(state, dict):
        raise CheckpointError(f"{path}: expected a dict with {', '.join(PARTS)}, got {type(state).__name__}.")
    missing = [part for part in PARTS if part not in state]
    if missing:
        lost = "; without masks the steps of schedule, start and refresh, cached masks and the guard are lost" if "masks" in missing else ""
        raise CheckpointError(f"{path}: expected {', '.join(PARTS)}, got none of {', '.join(missing)}{lost}.\n  fix: --fresh begins again.")
    return state


def same_settings(saved: dict[str, Any], now: dict[str, Any], folder: Path) -> None:
    """Raise CheckpointError where a run would go on with other settings than it began with."""
    differ = [f"{k}: {now.get(k)!r} now, {saved.get(k)!r} in the checkpoint" for k in {**saved, **now} if saved.get(k) != now.get(k)]
    if differ:
        raise CheckpointError(f"{folder}: expected the settings that its run began with, got {'; '.join(differ)}.\n  fix: another --out, or --fresh.")


def write_facts(folder: Path, facts: dict[str, Any]) -> None:
    """What the run is, in run.json: the new file or the one before it, whenever the run is killed."""
    with csv_files.replacing(folder / "run.json") as part:
        part.write_text(json.dumps(facts, indent=1, default=str) + "\n")


def facts_of(folder: Path) -> dict[str, Any]:
    """What `write_facts` has written; nothing where there is no file. Raises: CheckpointError where it is damaged."""
    path = folder / "run.json"
    try:
        facts = json.loads(path.read_text()) if path.exists() else {}
    except (OSError, ValueError) as error:  # neither text nor JSON
        raise CheckpointError(f"{path}: expected JSON, got {type(error).__name__}: {error}.\n  fix: bring the file back, or remove it.") from error
    if not isinstance(facts, dict):
        raise CheckpointError(f"{path}: expected JSON of a run's options, got a {type(facts).__name__}.\n  fix: bring the file back, or remove it.")
    return facts


def ran_on(folder: Path, device: str | None, went_on: bool) -> list[str]:
    """What a run has been trained on, a GPU by its name, and will be: it may go on elsewhere. None: nothing is left to train."""
    before = facts_of(folder) if went_on else {}
    named = before.get("ran_on", [before["device"]] if "device" in before else [])
    here = [] if device is None else [torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else device]
    return list(dict.fromkeys([*named, *here]))
