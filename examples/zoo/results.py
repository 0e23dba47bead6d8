"""The csv of the zoo: a row a model, appended when it is done; of two rows of one model the later counts."""

from __future__ import annotations

import csv
import fcntl
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from zoo.catalogue import Entry

NAMES = ("source", "name", "family")
FACTS = ("parameters", "input", "note", "linears", "eligible", "left_out")
RESULTS = {  # of each check: its columns; the first says whether it has been made
    "masks": ("masks", "masks_why"),
    "apply": ("apply", "train", "eval", "unreached", "apply_why"),
    "guard": ("guard", "guard_why"),
    "analyze": ("analyze", "flop", "coverage", "flop_equal", "analyze_why"),
    "trace": ("trace", "trace_equal", "trace_why"),
    "graph": ("graph", "graph_equal", "graph_why"),
    "export": ("export", "export_why"),
    "backend": ("backend", "stock", "backend_equal", "backend_why"),
    "inductor": ("inductor", "inductor_why"),
    "inductor_stock": ("inductor_stock", "inductor_stock_why"),
}
MISSED, BEYOND = "not masked: ", "masked beyond nn.Linear's rule: "  # in `apply_why`, before names
PASSING = ("out of memory", "out of time", "ended by ")  # why a model was not made: another limit or another day may make it
ENDS = ("status", "seconds", "peak_mb", "utc", "fxmask", "torch", "torchvision", "timm", "transformers")
COLUMNS = (*NAMES, *FACTS, *(c for columns in RESULTS.values() for c in columns), *ENDS)
Row = dict[str, str]


class TableError(ValueError):
    """A file that is not this csv, or one that another run appends to."""


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """One run at a time appends to a csv; the system lets go of the lock with the process. Raises: TableError while another run has it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(path.name + ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise TableError(f"{path}: another run appends to it.\n  fix: wait for it, or give this one another --csv.") from None
        yield


def read(path: Path) -> dict[tuple[str, str], Row]:
    """{(source, name): row}. A line that a killed run has cut off is left out. Raises: TableError for another file."""
    if not path.exists() or not path.stat().st_size:
        return {}
    with path.open(newline="", encoding="utf-8", errors="replace") as file:  # of half a character that a killed run left, the line is left out
        reader = csv.DictReader(line.replace("\0", "\ufffd") for line in file)  # which Python 3.10 refuses to read
        if tuple(reader.fieldnames or ()) != COLUMNS:
            raise TableError(f"{path}: expected a csv of the zoo, with the columns {', '.join(COLUMNS)}.\n  fix: another --csv, or move this file away.")
        rows = [row for row in reader if None not in row and all(v is not None for v in row.values())]
    return {(row["source"], row["name"]): row for row in rows}


def append(path: Path, row: dict[str, Any]) -> None:
    """One row by one system call, behind whatever is there."""
    held = path.read_bytes() if path.exists() else b""
    text = io.StringIO("\n" if held and not held.endswith(b"\n") else "", newline="")  # a killed run left half a line
    text.seek(0, io.SEEK_END)
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    if not held:
        writer.writeheader()
    writer.writerow({c: row.get(c, "") for c in COLUMNS})
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab", buffering=0) as file:
        file.write(text.getvalue().encode())


def compact(path: Path) -> None:
    """Without superseded rows and half lines, by one rename: a run that is killed meanwhile leaves the old file or the new one."""
    rows, new = read(path), path.with_suffix(".new")
    if rows:
        with new.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows.values())
        os.replace(new, path)


def blank(entry: Entry) -> dict[str, Any]:
    return {"source": entry.source, "name": entry.name, "family": entry.family}


def to_do(row: dict[str, Any], checks: list[str]) -> list[str]:
    """The checks that a row lacks; none of a model that cannot be made, whatever is tried, unless it is the user's own, who may have mended it."""
    status = str(row.get("status", ""))
    never = status.startswith("skipped") or (status.startswith("build: ") and not status.startswith(tuple(f"build: {cause}" for cause in PASSING)))
    if never and row.get("source") != "own":
        return []
    return [c for c in checks if not row.get(c)]
