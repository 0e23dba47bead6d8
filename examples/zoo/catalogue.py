"""Which models the zoo has: `models.csv`, and whatever the command line names."""

from __future__ import annotations

import csv
import itertools
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

LIST = Path(__file__).with_name("models.csv")
SOURCES = ("huggingface", "torchvision", "timm", "own")


@dataclass(frozen=True)
class Entry:
    """One model: `name` is what its source calls it, of `own` "package.module:callable". `parameters` orders the list; 0 where the configuration is tiny.

    `task`: of Hugging Face, for which of its classes; see `huggingface.tiny`.
    """

    source: str
    family: str
    name: str
    parameters: int = 0
    task: str = ""


def listed() -> list[Entry]:
    """All models of the zoo: of each source the cheapest first, and the sources side by side, so that a run that is stopped has something of each."""
    with LIST.open(newline="") as file:
        entries = [Entry(r["source"], r["family"], r["name"], int(r["parameters"]), r["task"]) for r in csv.DictReader(file)]
    by_source = [sorted((e for e in entries if e.source == s), key=lambda e: e.parameters) for s in SOURCES]
    return [e for _, e in sorted(((i / len(group), e) for group in by_source for i, e in enumerate(group)), key=lambda pair: pair[0])]


def chosen(entries: list[Entry], sources: list[str] | None, only: list[str] | None) -> list[Entry]:
    """Those of the sources that match one of the globs."""
    return [e for e in entries if (not sources or e.source in sources) and (not only or any(fnmatchcase(e.name, p) for p in only))]


def smallest_of_families(entries: list[Entry], at_most: int) -> set[Entry]:
    """The smallest model of every family: of each source in turn, the smallest ones first."""
    first: dict[tuple[str, str], Entry] = {}
    for e in sorted(entries, key=lambda e: e.parameters):  # which are not known of tiny configurations
        first.setdefault((e.source, e.family), e)
    by_source: dict[str, list[Entry]] = {}
    for (source, _), e in first.items():
        by_source.setdefault(source, []).append(e)
    turns = [e for turn in itertools.zip_longest(*by_source.values()) for e in turn if e is not None]
    return set(turns[:at_most])
