"""A table that prints, and that other programs can read."""

from __future__ import annotations

import json
from pathlib import Path
from textwrap import fill
from typing import Any

from .files import as_path, csv_text
from .kernels.errors import ConfigError, message

SUFFIX = {"csv": ".csv", "json": ".json", "markdown": ".md", "html": ".html", "latex": ".tex", "text": ".txt"}
FORMATS = {suffix: form for form, suffix in SUFFIX.items()}
TABLEFMT = {"markdown": "github", "html": "html", "latex": "latex_booktabs", "text": "simple"}
WIDE, LONG = 120, 48  # characters: a table that is not printed as it is, and a cell that is then cut
CUT = " .."
WHOLE = 3  # leading columns that say what a row is: name, masked, reason


def _text(value: Any) -> str:
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _table(columns: list[str], rows: list[dict[str, Any]], tablefmt: str = "simple") -> str:
    from tabulate import TableFormat, tabulate, tabulate_formats  # here, so that kernels and benchmarks do without it

    known = tablefmt in ("markdown", *tabulate_formats) if isinstance(tablefmt, str) else isinstance(tablefmt, TableFormat)
    if not known:  # tabulate takes an unknown one for `simple`
        raise ConfigError(f"table: expected markdown or one of {', '.join(tabulate_formats)}, got {tablefmt!r}.")
    form = "github" if tablefmt == "markdown" else tablefmt
    return tabulate([[_text(row.get(c)) for c in columns] for row in rows], headers=columns, tablefmt=form, disable_numparse=True)


class Report:
    """Rows of one kind, with a title and notes.

    `print(report)` shows it, what would be wide in a short form; `report.table()` is the whole table, `report.rows` a list of dicts, `report.to_dict()` plain
    data, and `report.save(path)` writes csv, json, markdown, html, LaTeX or text by the path's suffix. Missing values are None.
    """

    def __init__(self, title: str, rows: list[dict[str, Any]], notes: list[str] | None = None, summary: dict[str, Any] | None = None) -> None:
        self.title, self.rows, self.notes, self.summary = title, rows, notes or [], summary or {}

    @property
    def columns(self) -> list[str]:
        """Column names, in order of first appearance."""
        return list(dict.fromkeys(k for row in self.rows for k in row))

    def table(self, tablefmt: str = "simple") -> str:
        """The rows as text in one of tabulate's formats (`markdown` is its `github`), without columns that hold nothing. ConfigError for an unknown one."""
        return _table(self._shown(), self.rows, tablefmt)

    def _shown(self) -> list[str]:
        return [c for c in self.columns if any(row.get(c) is not None for row in self.rows)]

    def _short(self) -> list[str]:
        """The table for a terminal. Where it is wide, what all rows, or all masked ones, say alike stands beneath it, and long cells are cut."""
        shown, whole = self._shown(), self.table()
        if max(map(len, whole.splitlines()), default=0) <= WIDE or len(self.rows) == 1:
            return [whole]
        alike: dict[str, list[str]] = {"all rows": [], "masked rows": []}
        left = shown[:WHOLE]
        for c in shown[WHOLE:]:
            having = [row.get(c) is not None for row in self.rows]
            texts = {_text(row[c]) for row in self.rows if row.get(c) is not None}
            rows = "all rows" if all(having) else "masked rows" if having == [row.get("masked") is True for row in self.rows] else ""
            if rows and len(texts) == 1 and max(map(len, texts)) <= LONG:
                alike[rows] += [f"{c} {t}" for t in texts]
            else:
                left.append(c)
        cells = [{c: t if len(t := _text(row.get(c))) <= LONG or c in shown[:WHOLE] else t[:LONG] + CUT for c in left} for row in self.rows]
        notes = [fill(f"{rows}: {'; '.join(said)}", WIDE, subsequent_indent="  ") for rows, said in alike.items() if said]
        notes += [f"{CUT.strip()} cut here; report.table() and --format text have it whole"] if any(t.endswith(CUT) for r in cells for t in r.values()) else []
        return [_table(left, cells), *notes]

    def to_dict(self) -> dict[str, Any]:
        """Title, rows, summary and notes as plain Python data."""
        return {"title": self.title, "rows": [dict(r) for r in self.rows], "summary": dict(self.summary), "notes": list(self.notes)}

    def save(self, path: str | Path) -> Path:
        """Write the report; the suffix chooses the format, and a folder that is missing is made. Raises ConfigError for an unknown one, and where it cannot."""
        path = as_path(path, "Report.save")
        form = FORMATS.get(path.suffix)
        if form is None:
            raise ConfigError(f"Report.save: expected a path that ends in {', '.join(FORMATS)}, got {path.name!r}.")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(formatted(self, form) + "\n", encoding="utf-8")
        except OSError as e:
            what = f"the report cannot be written: expected a path that takes a file, got: {e.strerror or e}."
            raise ConfigError(message(what, str(path), "name a file in a folder that you may write to.")) from None
        return path

    def whole(self) -> str:
        """What `print` shows, with the whole table however wide it is."""
        return self._lines([self.table()])

    def _lines(self, table: list[str]) -> str:
        parts = [self.title, *table] + [f"{k}: {v}" for k, v in self.summary.items()] + self.notes
        return "\n".join(p for p in parts if p)

    def __str__(self) -> str:
        return self._lines(self._short())

    __repr__ = __str__


def formatted(report: Report, form: str) -> str:
    """A report in one of the forms of `SUFFIX`, as it is written and printed."""
    if form == "json":
        return json.dumps(report.to_dict(), indent=1)
    if form == "csv":
        return csv_text(report.rows).rstrip("\n")
    return report.whole() if form == "text" else report.table(TABLEFMT[form])
