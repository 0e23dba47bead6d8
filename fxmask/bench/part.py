"""A stage of the GPU run with a csv of its own: cells of any kind, a row each, resumed like the benchmark."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .provenance import utc
from .session import Session, words
from .table import STATE, TIMES, WHERE, Row, Table, text

FOUND = ("gate", "max_err")


class Prepared(NamedTuple):
    """A cell that can be measured. `check` runs it once: its largest error, and why it is wrong, empty where it is right. `worth` reads what its ms tell."""

    call: Callable[[], Any]
    check: Callable[[], tuple[float, str]]
    worth: Callable[[float], dict[str, float | int]]


@dataclass(frozen=True)
class Part:
    """`kind` is the cells' NamedTuple: its fields are the columns that tell cells apart; `worth` the columns that a measurement adds to the times."""

    name: str
    kind: Any
    worth: tuple[str, ...]
    cells: Callable[[torch.device, bool], list[Any]]  # device, quick
    prepare: Callable[[Any, torch.device], Prepared]
    sources: Callable[[], str] | None = None  # hash of what is timed, where that is not `kernels`
    on_cpu: Callable[[bool], list[Any]] | None = None  # quick; the cells of a CPU as a device of its own, where `cells` rehearses on it for a GPU
    alike: tuple[str, ...] = ()  # columns that a cell shares with the dense one to be compared with it
    by: str = ""  # the column that says `dense`

    @property
    def columns(self) -> tuple[str, ...]:
        return (*WHERE, *STATE, *self.kind._fields, *TIMES, *self.worth, *FOUND)

    def table(self, out: Path) -> Table:
        return Table(out / f"{self.name}.csv", self.columns, self.kind._fields)


def names_of(cell: Any) -> Row:
    return {name: text(value) for name, value in cell._asdict().items()}


def measure(session: Session, part: Part, cell: Any) -> Row:
    """The row of one cell; one that fails, in any way, is a row too, with no time."""
    row = {**session.shared, "utc": utc(), **names_of(cell), "gate": "fail"}
    try:
        with torch.no_grad():
            ready = part.prepare(cell, session.device)
            error, why = ready.check()
            row["max_err"] = text(error)
            if why:
                return {**row, "verdict": f"none: {why}"}
            times = session.timed(ready.call)
            worth = ready.worth(float(times["ms_p50"]))
            row |= {"gate": "pass", **times, **{name: text(value) for name, value in worth.items()}}
    except Exception as e:
        return {**row, "verdict": words(e)}
    return row


def run_part(session: Session, part: Part, cells: Sequence[Any]) -> tuple[list[Row], int]:
    """Measure what the csv lacks, until the time limit. Returns the rows of these cells, old and new, and how many cells are left."""
    if part.sources is not None:
        session.shared = {**session.shared, "source": part.sources()}
    table = part.table(session.out)

    def done(cell: Any, row: Row) -> None:
        table.append(row)
        found = " ".join(f"{c}={row[c]}" for c in ("ms_p50", *part.worth) if row.get(c))
        session.say(f"{part.name} {' '.join(names_of(cell).values())}  {row['gate']}  {found if row.get('verdict') == 'ok' else row.get('verdict', '')}")

    left = session.over(session.lacking(cells, table, names_of), lambda cell: measure(session, part, cell), done)
    return table.of({**session.shared, **names_of(c)} for c in cells), left
