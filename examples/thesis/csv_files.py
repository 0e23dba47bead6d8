"""The examples' csv files: read, and rewritten by one rename, so that a run that is killed meanwhile leaves the old file or the new one."""

from __future__ import annotations

import csv
import os
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def read(path: Path) -> list[dict[str, str]]:
    """The rows of a csv, none where there is no file."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file beside `path` to write, which takes its place at the end. It has a name of its own: two that write one table would rename each other's away."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex}.part")
    try:
        yield part
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def write(path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, Any]], end: str = "\r\n") -> None:
    """The whole table anew, or as it was."""
    with replacing(path) as part, part.open("w", newline="") as file:
        table = csv.DictWriter(file, columns, lineterminator=end)
        table.writeheader()
        table.writerows(rows)
