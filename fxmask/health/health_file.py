"""The csv of a `HealthLog`: every update appends to it, and where a log goes on from a saved state the rows of later updates are dropped."""

from __future__ import annotations

import csv
import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from ..files import cannot_write
from ..kernels.errors import ConfigError, StateError, message

COLUMNS = (
    "update", "step", "name", "blocks", "kept", "ratio", "flips", "flip_rate", "flips_total", "age_mean", "age_max", "never_kept", "kept_norm_fraction",
    "dead_rows", "dead_cols",
)  # fmt: skip


def log_path(given: Any) -> Path | None:
    """The path, None without one. Raises ConfigError for what is none, and where no file can be: now, and not after the first epoch."""
    if given is None:
        return None
    if not isinstance(given, (str, os.PathLike)):
        raise ConfigError(f"HealthLog: expected a path or None, got {given!r}.")
    path = Path(given)
    with _written(path):
        os.stat(os.path.join(path.parent, "."))
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, f"{path.name} is a folder there")
    return path


@contextmanager
def appended(path: Path) -> Iterator[TextIO]:
    """The file, open at its end."""
    with _written(path), path.open("a", newline="", encoding="utf-8") as file:
        yield file


def write(file: TextIO, rows: list[dict[str, Any]]) -> None:
    """Write rows, in a new file behind a head."""
    writer = csv.DictWriter(file, COLUMNS)
    if not file.tell():
        writer.writeheader()
    writer.writerows(rows)


def rows_of(path: Path) -> list[dict[str, Any]]:
    """The rows of a file; StateError for one that no log has written."""
    with path.open(newline="", encoding="utf-8-sig", errors="replace") as file:  # spreadsheets begin with a mark
        first, head = file.readline(), ",".join(COLUMNS)
        if first.replace('"', "").rstrip("\r\n") != head and not head.startswith(first):  # one that a kill has cut short
            what = f"HealthLog.load_state_dict: {path} is no csv of a log: expected a first line {COLUMNS[0]},{COLUMNS[1]},..., got {first[:60]!r}."
            raise StateError(message(what, fix="name another path, or the file that the saved log has written."))
        return list(csv.DictReader(file, COLUMNS))


def keep_until(path: Path, rows: list[dict[str, Any]], updates: int) -> None:
    """Let the file have those of its rows that are of the first so many updates; later ones will be written again."""
    whole = (r for r in rows if r[COLUMNS[-1]] is not None and None not in r)  # not cut short, nor with another in its line
    rows = [r for r in whole if r["update"].isdecimal() and int(r["update"]) <= updates]
    new = path.with_name(path.name + ".new")
    with _written(path), new.open("w", newline="", encoding="utf-8") as file:
        write(file, rows)
    new.replace(path)


@contextmanager
def _written(path: Path) -> Iterator[None]:
    """ConfigError where a file cannot be written."""
    try:
        yield
    except OSError as e:
        raise cannot_write(path.parent, e) from None
