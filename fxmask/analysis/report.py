"""The result of `analyze`: a Report with several tables."""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..kernels.errors import message
from ..report import FORMATS, Report

SCHEMA = "fxmask.analysis/1"
SUFFIX = {"csv": ".csv", "json": ".json", "markdown": ".md", "html": ".html", "latex": ".tex", "text": ".txt"}
TABLEFMT = {"markdown": "github", "html": "html", "latex": "latex_booktabs", "text": "simple"}
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
        super().__init__(title, tables["modules"], notes, summary)
        self.tables, self.meta, self._explained = tables, meta, explained

    def explain(self, node: str) -> str:
        """The formulas of a node (or of all nodes of a module), with the numbers that they have here. ConfigError where there is none of that name."""
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
        return Report(f"a: {self.title}\nb: {other.title}", rows, ["A FLOP ratio is not a speed-up."], totals)

    def attach_measurements(
        self, *, ncu_csv: str | Path | None = None, timings: dict[str, float] | None = None, energy: dict[str, Any] | None = None
    ) -> Analysis:
        """Put measured columns beside predicted ones; what was not measured stays absent.

        ncu_csv: an export of Nsight Compute whose NVTX ranges are named by node or module (`fxmask.analysis.ncu.COMMAND`); timings: {node or module: seconds};
        energy: a row of `fxmask.analysis.energy.measure_energy`. Returns self.
        """
        from .measured import attach

        attach(self, ncu_csv, timings, energy)
        return self

    def save(self, path: str | Path, formats: Iterable[str] = ("csv", "json", "markdown")) -> Path:
        """Write the tables; whole files or none.

        A path with a suffix of `Report.save` is one file: json has everything, csv the nodes, others what is printed. Any other path is a folder that gets a
        file a table and format: csv, json, markdown, html, latex, text. ConfigError for an unknown format or a folder that cannot be written.
        """
        path = Path(path)
        if path.suffix in FORMATS:
            form = {"github": "markdown"}.get(FORMATS[path.suffix], FORMATS[path.suffix])
            content = json.dumps(self.to_dict(), indent=1) if form == "json" else self._file("nodes" if form == "csv" else "modules", form)
            _write({path.name: content}, path.parent)
            return path
        formats = [formats] if isinstance(formats, str) else list(formats)
        unknown = [f for f in formats if f not in SUFFIX]
        if unknown or not formats:
            raise ConfigError(f"Analysis.save: expected formats among {', '.join(SUFFIX)}, got {', '.join(map(repr, unknown)) or 'none'}.")
        files = {"analysis.json": json.dumps(self.to_dict(), indent=1)} if "json" in formats else {}
        for form in formats:
            if form != "json":
                files |= {f"{t}{SUFFIX[form]}": self._file(t, form) for t in self.tables if self.tables[t]}
        _write(files, path)
        return path

    def _file(self, table: str, form: str) -> str:
        if form == "csv":
            return csv_text(self.tables[table])
        return (f"{self.title}\n\n" if form in ("markdown", "text") else "") + self.text(table, TABLEFMT[form]) + "\n"

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


def csv_text(rows: list[dict[str, Any]]) -> str:
    """Rows as csv; missing values are empty."""
    import csv
    import io

    columns = list(dict.fromkeys(k for r in rows for k in r))
    out = io.StringIO()
    writer = csv.DictWriter(out, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def cannot_write(folder: Path, e: OSError) -> ConfigError:
    """What to raise where a folder takes no files."""
    what = f"the output folder cannot be written: {e.strerror or e}."
    return ConfigError(message(what, str(folder), "name a folder that you may write to."))


def _write(files: dict[str, str], folder: Path) -> None:
    """All files or none: written into a folder beside, then moved; folders that were made for them go again."""
    new = [p for p in (folder, *folder.parents) if not p.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        beside = Path(tempfile.mkdtemp(prefix=".fxmask-", dir=folder))
    except OSError as e:
        _remove(new)
        raise cannot_write(folder, e) from None
    done = False
    try:
        for name, content in files.items():
            (beside / name).write_text(content, encoding="utf-8")
            if (folder / name).is_dir():
                raise IsADirectoryError(errno.EISDIR, f"{name} is a folder there")
        for name in files:
            os.replace(beside / name, folder / name)
        done = True
    except OSError as e:
        raise ConfigError(message(f"the tables cannot be written: {e.strerror or e}.", str(folder), "make room, or name another folder.")) from None
    finally:
        shutil.rmtree(beside, ignore_errors=True)
        if not done:
            _remove(new)


def _remove(folders: list[Path]) -> None:
    for p in folders:
        with suppress(OSError):
            p.rmdir()
