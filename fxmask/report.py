"""A table that prints, and that other programs can read."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

from .kernels.errors import ConfigError

FORMATS = {".csv": "csv", ".json": "json", ".md": "github", ".html": "html", ".tex": "latex"}


def _text(value: Any) -> str:
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


class Report:
    """Rows of one kind, with a title and notes.

    `print(report)` shows it, `report.rows` is a list of dicts, `report.to_dict()` plain data, `report.save(path)` writes csv, json, markdown, html or LaTeX
    by the path's suffix. Missing values are None.
    """

    def __init__(self, title: str, rows: list[dict[str, Any]], notes: list[str] | None = None, summary: dict[str, Any] | None = None) -> None:
        self.title, self.rows, self.notes, self.summary = title, rows, notes or [], summary or {}

    @property
    def columns(self) -> list[str]:
        """Column names, in order of first appearance."""
        return list(dict.fromkeys(k for row in self.rows for k in row))

    def table(self, tablefmt: str = "simple") -> str:
        """The rows as text in one of tabulate's formats, without columns that hold nothing."""
        from tabulate import tabulate  # here, so that kernels and benchmarks do without it

        shown = [c for c in self.columns if any(row.get(c) is not None for row in self.rows)]
        cells = [[_text(row.get(c)) for c in shown] for row in self.rows]
        return tabulate(cells, headers=shown, tablefmt=tablefmt, disable_numparse=True)

    def to_dict(self) -> dict[str, Any]:
        """Title, rows, summary and notes as plain Python data."""
        return {"title": self.title, "rows": [dict(r) for r in self.rows], "summary": dict(self.summary), "notes": list(self.notes)}

    def save(self, path: str | Path) -> Path:
        """Write the report; the suffix chooses the format. Raises ConfigError for an unknown one."""
        path = Path(path)
        form = FORMATS.get(path.suffix)
        if form is None:
            raise ConfigError(f"Report.save: expected a path that ends in {', '.join(FORMATS)}, got {path.name!r}.")
        if form == "csv":
            with path.open("w", newline="") as f:
                writer = csv.DictWriter(f, self.columns)
                writer.writeheader()
                writer.writerows(self.rows)
        else:
            path.write_text(json.dumps(self.to_dict(), indent=2) if form == "json" else self.table(form) + "\n")
        return path

    def __str__(self) -> str:
        parts = [self.title, self.table()] + [f"{k}: {v}" for k, v in self.summary.items()] + self.notes
        return "\n".join(p for p in parts if p)

    __repr__ = __str__
