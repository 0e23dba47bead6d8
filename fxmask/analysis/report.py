"""The result of `analyze`: a Report with several tables."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from ..files import as_path, csv_text, write_files
from ..kernels.errors import ConfigError
from ..report import FORMATS, SUFFIX, TABLEFMT, Report
from .measured import attach
from .summary import LOWER_BOUNDS

SCHEMA = "fxmask.analysis/1"
TABLES = ("summary", "modules", "nodes", "traffic", "roofline", "footprint", "coverage", "thesis")
PRINTED = ("module", "type", "params", "density", "flop", "flop_pct", "flop_dense", "bytes_min", "calls")


class Analysis(Report):
    """FLOP and memory movement of a step, as tables of rows (lists of dicts with stable names; units are in the names, plain ones are counts).

    `print(report)` shows totals and modules, `report.tables["traffic"]` is a list of dicts, `report.to_dict()` everything as plain data, `report.save(path)`
    writes files, `report.compare(other)` puts two analyses side by side, `report.explain(node)` prints the formulas of a node with their numbers.
    """

    def __init__(
        self,
        title: str,
        tables: dict[str, list[dict[str, Any]]],
        notes: list[str],
        summary: dict[str, Any],
        meta: dict[str, Any],
        explained: Callable[[str], str],
    ) -> None:
        unnamed = set(tables) - {*TABLES}
        assert not unnamed, f"name these in TABLES, by which the command offers them, and in docs/analysis.md: {unnamed}"
        super().__init__(title, tables["modules"], notes, summary)
        self.tables, self.meta, self._explained = tables, meta, explained

    def explain(self, node: str) -> str:
        """The formulas of a node (or of all nodes of a module), with the numbers that they have here. ConfigError where there is none of that name."""
        if not isinstance(node, str):
            raise ConfigError(f"explain: expected the name of a node or a module, got {node!r}.")
        return self._explained(node)

    def to_dict(self) -> dict[str, Any]:
        """Schema, provenance (`meta`), summary, notes and all tables."""
        return {"schema_version": SCHEMA, "title": self.title, "meta": self.meta, "summary": self.summary, "notes": self.notes, "tables": self.tables}

    def to_pandas(self, table: str) -> Any:
        """A table as a pandas DataFrame; ImportError without pandas."""
        import pandas  # type: ignore[import-untyped]

        return pandas.DataFrame(self._rows(table))

    def _rows(self, table: str) -> list[dict[str, Any]]:
        if table not in self.tables:
            raise ConfigError(f"analysis has no table {table!r}: expected one of {', '.join(self.tables)}.")
        return self.tables[table]

    def text(self, table: str, tablefmt: str = "simple", columns: Sequence[str] = ()) -> str:
        """One table in one of tabulate's formats; large counts in short units."""
        rows = self._rows(table)
        shown = [{c: r.get(c) for c in columns or r} for r in rows]
        if table == "modules" and tablefmt == "simple":
            shown = [s | {"module": "  " * r["depth"] + s["module"]} for r, s in zip(rows, shown, strict=True)]
        if table == "summary":
            order = [c for c in dict.fromkeys(k for r in rows for k in r) if c != "total"] + ["total"]
            shown = [{c: short(r["quantity"], r.get(c)) if c != "quantity" else r[c] for c in order} for r in rows]
        return Report(table, [{c: short(c, v) for c, v in r.items()} for r in shown]).table(tablefmt)

    def printed(self, table: str, form: str = "text") -> str:
        """A table, or "all" of them, in one of the formats of `save`. ConfigError for an unknown one."""
        if form not in SUFFIX:
            raise ConfigError(f"format: expected one of {', '.join(SUFFIX)}, got {form!r}.")
        if form == "json":
            return json.dumps(self.to_dict() if table == "all" else self._rows(table), indent=1)
        if table == "all":
            return "\n\n".join(f"{t}\n{self.printed(t, form)}" for t in self.tables if self.tables[t])
        return csv_text(self._rows(table)) if form == "csv" else self.text(table, TABLEFMT[form])

    def compare(self, other: Analysis) -> Report:
        """This analysis and another one of the same model (dense and masked), module by module: FLOP, compulsory bytes, parameters, and their ratios."""
        if not isinstance(other, Analysis):
            raise ConfigError(f"compare: expected another analysis, as fxmask.analyze gives one, got {other!r}.")
        mine, its = ({r["module"]: r for r in a.tables["modules"]} for a in (self, other))
        rows = []
        for name in dict.fromkeys([*mine, *its]):
            a, b = mine.get(name, {}), its.get(name, {})
            row: dict[str, Any] = {"module": name}
            for c in ("params_kept", "flop", "bytes_min"):
                x, y = a.get(c), b.get(c)
                row |= {f"{c}_a": x, f"{c}_b": y, f"{c}_ratio": y / x if x and y is not None else None}
            rows.append(row)
        totals = {n: f"{self.summary[n]['total']} -> {other.summary[n]['total']}" for n in ("flop", "flop_executed", "bytes_min", "bytes_req")}
        less = [n for n in dict.fromkeys((*self.notes, *other.notes)) if n.startswith(LOWER_BOUNDS)]
        return Report(f"a: {self.title}\nb: {other.title}", rows, ["A FLOP ratio is not a speed-up.", *less], totals)

    def attach_measurements(
        self, *, ncu_csv: str | Path | None = None, timings: dict[str, float] | None = None, energy: dict[str, Any] | None = None
    ) -> Analysis:
        """Put measured columns beside predicted ones; what was not measured stays absent.

        ncu_csv: an export of Nsight Compute whose NVTX ranges are named by node or module (`fxmask.analysis.ncu.COMMAND`); timings: {node or module: seconds};
        energy: a row of `fxmask.analysis.energy.measure_energy`. Returns self.
        """
        self.notes += attach(self.tables, ncu_csv, timings, energy)
        return self

    def save(self, path: str | Path, formats: Iterable[str] = ("csv", "json", "markdown")) -> Path:
        """Write the tables; whole files or none.

        A path with a suffix of `Report.save` is one file: json has everything, csv the nodes, others what is printed. Any other path is a folder that gets a
        file a table and format: csv, json, markdown, html, latex, text. ConfigError for an unknown format or a folder that cannot be written.
        """
        path = as_path(path, "Analysis.save")
        if path.suffix in FORMATS:
            form = FORMATS[path.suffix]
            write_files({path.name: self._file({"json": "all", "csv": "nodes"}.get(form, "modules"), form)}, path.parent)
            return path
        formats = [formats] if isinstance(formats, str) else list(formats)
        unknown = [f for f in formats if f not in SUFFIX]
        if unknown or not formats:
            raise ConfigError(f"Analysis.save: expected formats among {', '.join(SUFFIX)}, got {', '.join(map(repr, unknown)) or 'none'}.")
        files = {"analysis.json": self._file("all", "json")} if "json" in formats else {}
        for form in formats:
            if form != "json":
                files |= {f"{t}{SUFFIX[form]}": self._file(t, form) for t in self.tables if self.tables[t]}
        write_files(files, path)
        return path

    def _file(self, table: str, form: str) -> str:
        content = self.printed(table, form)
        return content if form in ("csv", "json") else (f"{self.title}\n\n" if form in ("markdown", "text") else "") + content + "\n"

    def __str__(self) -> str:
        parts = [self.title, self.text("summary"), self.text("modules", columns=PRINTED)]
        parts += [f"{t}\n{self.text(t)}" for t in ("thesis", "measured", "energy") if self.tables.get(t)]
        if self.tables["coverage"]:
            parts.append("unknown ops:\n" + self.text("coverage"))
        return "\n\n".join(p for p in [*parts, "\n".join(self.notes)] if p)

    __repr__ = __str__


def short(column: str, value: Any) -> Any:
    """A number as it is printed: FLOP in M, G, T; bytes in kB, MB, GB (powers of ten)."""
    if column.endswith("_gib") and isinstance(value, float):
        return f"{value:.2f}"
    if isinstance(value, bool) or not isinstance(value, int) or not ("flop" in column or "bytes" in column or column == "mac"):
        return value
    unit = "B" if "bytes" in column else ""
    for power, letter in ((12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if abs(value) >= 10**power:
            return f"{value / 10**power:.2f} {letter}{unit}"
    return f"{value} {unit}".strip()
