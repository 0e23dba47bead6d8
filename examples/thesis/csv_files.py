"""The examples' csv files: read, and rewritten by one rename, so that a run that is killed meanwhile leaves the old file or the new one."""

from __future__ import annotations

import csv
import os
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import inf
from pathlib import Path
from typing import Any

from fxmask.errors import ConfigError


def read(path: Path, columns: Sequence[str] = (), cut_off: bool = False) -> list[dict[str, str]]:
    """The rows of a csv, none where there is no file, or an empty one. `cut_off`: a row that lacks a value is left out, and no error.

    Raises:
        ConfigError: it is no csv, lacks one of the `columns`, has a row without a value for one of them (for any where none is given), or with one too many.
    """
    if not path.exists():
        return []
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:  # a spreadsheet begins its UTF-8 by a mark
            table = csv.DictReader(file)
            rows, header = list(table), table.fieldnames or ()
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path}: expected a csv, got {type(error).__name__}: {error}.\n  fix: name another file.") from None
    missing = [column for column in columns if column not in header]
    if rows and missing:
        what = f"expected a csv with the columns {', '.join(columns)}, got none of {', '.join(missing)}"
        raise ConfigError(f"{path}: {what}.\n  fix: name another file.")
    if cut_off:
        return [row for row in rows if all(row[column] is not None for column in columns)]
    for number, row in enumerate(rows, 1):
        if None in row or any(row[column] is None for column in columns or header):
            what = f"expected values for {', '.join(columns or header)} in each row, got {'more' if None in row else 'fewer'} in row {number}"
            raise ConfigError(f"{path}: {what}.\n  fix: restore that row, or remove it.")
    return rows


def numbers(path: Path, rows: list[Any], *columns: str, above: float = -inf, kind: Callable[[Any], float] = float) -> list[Any]:
    """`rows` of that file, in which these columns hold numbers. Raises: ConfigError where one holds something else, or nothing."""
    for row in rows:
        for column in columns:
            try:
                value = kind(row.get(column))
                fits = above == -inf or value > above  # nan, which runs that diverged have, is above nothing
            except (TypeError, ValueError):  # None: the row is cut off
                fits = False
            if not fits:
                what = f"a {'whole ' if kind is int else ''}number{f' above {above:g}' if above > -inf else ''}"
                raise ConfigError(f"{path}: expected {what} for {column} in each row, got {row.get(column)!r}.\n  fix: restore that row, or remove it.")
    return rows


def read_own(path: Path, columns: Sequence[str], younger: Sequence[str] = (), cut_off: bool = False) -> list[dict[str, str]]:
    """The rows of a table that is to be written anew with these `columns`, asked for before anything is measured. Older files may lack the `younger`.

    Raises:
        ConfigError: it is another table, which rewriting would destroy, or its folder cannot be made.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{path}: its folder cannot be made: {error.strerror}.\n  fix: name another file.") from None
    rows = read(path, [column for column in columns if column not in younger], cut_off)
    more = sorted({column or "a value without a column" for row in rows for column in row} - {*columns})
    if more:
        raise ConfigError(f"{path}: expected a csv with no columns but {', '.join(columns)}, got {', '.join(more)}, too.\n  fix: name another file.")
    return rows


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file beside `path` to write, which takes its place at the end. It has a name of its own: two that write one table would rename each other's away."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.parent / f".{path.name}.{uuid.uuid4().hex}.part"
    try:
        yield part
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def write(path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, Any]], end: str = "\r\n") -> None:
    """The whole table anew, or as it was."""
    with replacing(path) as part, part.open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, columns, lineterminator=end)
        table.writeheader()
        table.writerows(rows)
