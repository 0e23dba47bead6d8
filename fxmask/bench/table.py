"""A csv: its columns, appending row by row, and what is in it already. `examples/results/README.md` says what each column means."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from ..errors import ConfigError
from ..kernels.errors import message
from .cells import Cell
from .provenance import SAME

WHERE = ("fxmask", "git_sha", "dirty", "source", "utc", "device", "driver", "torch", "triton", "ptxas", "python", "threads")
STATE = ("power_limit_w", "sm_clock_mhz", "sm_clock_mhz_after", "temperature_c", "temperature_c_after", "load", "verdict")
WHAT = ("op", "phase", "provider", "M", "N", "K", "dtype", "block_n", "block_k", "ratio", "density", "mask", "mask_seed")
TIMES = ("how", "ms_p50", "ms_p10", "ms_p90", "cold_ms_p50", "cold_ms_p10", "cold_ms_p90", "cpu_ms_p50")
REFRESH = ("metadata_ms", "ms_refresh_1", "ms_refresh_10", "ms_refresh_100")
COSTS = ("flop_useful", "flop_issued", "bytes_min", "bytes_req", "t_min_us", "roof_pct")
RIGHT = ("max_err", "base_err", "gate")
AGAINST = ("x_dense", "x_best", "cold_x_dense", "cold_x_best")
LATER = ("ran",)  # columns that older files do not have
COLUMNS = WHERE + STATE + WHAT + TIMES + REFRESH + COSTS + RIGHT + AGAINST + LATER

BUSY = "none: load"  # how a verdict begins where the machine had other work

Row = dict[str, str]


def text(value: Any) -> str:
    """A cell of the csv; None is empty."""
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)


def number(row: Row, column: str) -> float | None:
    """A column as a number, None where it is empty."""
    value = row.get(column, "")
    try:
        return float(value) if value else None
    except ValueError:
        return None


def time_column(row: Row) -> str:
    """The column that decides on a CPU: process time on one thread, which other processes disturb least, and wall time on more."""
    return "cpu_ms_p50" if row["threads"] == "1" else "ms_p50"


def verdict_of(load: float | None) -> str:
    """Whether a time means something, by the load beside which it was taken."""
    cores = os.cpu_count() or 1
    return f"{BUSY} {load:.1f} on {cores} cores" if load is not None and load > cores else "ok"


def what(cell: Cell, density: float | None = None) -> Row:
    """The columns that name a cell."""
    values = (cell.op, cell.phase, cell.provider, cell.M, cell.N, cell.K, cell.dtype, *cell.block, cell.ratio, density, cell.mask, cell.seed)
    return {name: text(value) for name, value in zip(WHAT, values, strict=True)}


def key(row: Row, names: Sequence[str] = WHAT) -> tuple[str, ...]:
    """What makes two rows the same measurement: the cell, which `names` tell apart, the sources and the machine."""
    return tuple(row.get(c, "") for c in (*names, *SAME) if c != "density")


class Table:
    """A csv file that grows. Rows are flushed as they come, so that a killed run keeps what it had. `names`: the columns that tell cells apart."""

    def __init__(self, path: Path, columns: Sequence[str] = COLUMNS, names: Sequence[str] = WHAT) -> None:
        self.path, self.columns, self.names = path, tuple(columns), tuple(names)
        try:  # where nothing can be written, nothing is measured first
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab") if path.exists() else TemporaryFile(dir=path.parent):
                pass
        except OSError as e:
            where = path if path.parent.is_dir() else path.parent
            raise ConfigError(message(f"the csv cannot be written: {e.strerror or e}.", str(where), "name a file that you may write to.")) from None
        self.rows = read(path, self.columns) if path.exists() and path.stat().st_size else []
        self.keys = self._measured(self.rows)

    def _measured(self, rows: Iterable[Row]) -> set[tuple[str, ...]]:
        """What a busy machine measured is measured again."""
        return {key(row, self.names) for row in rows if not row["verdict"].startswith(BUSY)}

    def __contains__(self, row: Row) -> bool:
        return key(row, self.names) in self.keys

    def of(self, wanted: Iterable[Row]) -> list[Row]:
        """The rows that there are of these cells, by these sources on this machine: what a run shows as its own. Of a cell that was measured again the last."""
        keys = {key(row, self.names) for row in wanted}
        return list({own: row for row in self.rows if (own := key(row, self.names)) in keys}.values())

    def append(self, row: Row) -> None:
        """Write one row; missing columns are empty."""
        self.extend([row])

    def extend(self, rows: Sequence[Row]) -> None:
        """Write rows that belong together: all by one system call, so that a run that is killed leaves all of them or none."""
        full = [{c: row.get(c, "") for c in self.columns} for row in rows]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        held = self.path.read_bytes() if self.path.exists() else b""
        if held.partition(b"\n")[0].decode().strip() == ",".join(_older(self.columns)) != ",".join(self.columns):
            held = self._rewritten()
        lines = io.StringIO(newline="")
        writer = csv.DictWriter(lines, self.columns, lineterminator="\n")
        if not held:
            writer.writeheader()
        elif not held.endswith(b"\n"):
            lines.write("\n")  # a killed run left half a line
        writer.writerows(full)
        with self.path.open("ab", buffering=0) as f:
            f.write(lines.getvalue().encode())
        self.rows += full
        self.keys |= self._measured(full)

    def _rewritten(self) -> bytes:
        """An older file with this version's columns, whole or not at all; what it holds now."""
        beside = self.path.with_name(f".{self.path.name}.new")
        with beside.open("w", newline="", encoding="utf-8") as f:
            writer = csv.DictWriter(f, self.columns, lineterminator="\n")
            writer.writeheader()
            writer.writerows(read(self.path, self.columns))
        os.replace(beside, self.path)
        return self.path.read_bytes()


def _older(columns: Sequence[str]) -> tuple[str, ...]:
    return tuple(c for c in columns if c not in LATER)


def read(path: Path, columns: Sequence[str] = COLUMNS) -> list[Row]:
    """Rows of a csv of this version's columns, or without those of `LATER`; a line that was cut off is dropped. ConfigError for another file."""
    try:
        with path.open(newline="", encoding="utf-8") as f:
            reader = csv.DictReader(f)
            if tuple(reader.fieldnames or ()) not in (tuple(columns), _older(columns)):
                raise ConfigError(f"{path.name}: expected a csv with this version's columns, got {reader.fieldnames}; give another file.")
            return [{**dict.fromkeys(columns, ""), **row} for row in reader if None not in row and all(v is not None for v in row.values())]
    except (UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path.name}: expected a csv, got {type(error).__name__}: {error}; give another file.") from None
