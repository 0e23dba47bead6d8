"""Measured traffic: csv exports of Nsight Compute, one row a kernel launch. `COMMAND` makes one.

Read are the long format (`ncu --csv`: a row for each launch and metric) and the wide one (`ncu --csv --page raw`: a row for each launch, units in the second
line), and whatever the program printed between is left out. Units become us, bytes, % and GB/s; K is 1000, as Nsight Compute has it; a sector is 32 bytes. What
was not collected is absent from a row and None in a sum, never 0. NVTX ranges are of a thread: kernels of a backward, which autograd launches from a thread of
its own, are in the ranges that are pushed there (hooks, an emit_nvtx), not in those around `backward()`.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

from ..kernels.errors import ConfigError, message

SECTOR_BYTES = 32
# a metric's name, and what the pages of sections call it -> column
COLUMNS = {
    "gpu__time_duration.sum": "time_us",
    "dram__bytes_read.sum": "dram_read_bytes",
    "dram__bytes_write.sum": "dram_write_bytes",
    "lts__t_sectors_srcunit_tex.sum": "l2_bytes",
    "l1tex__t_sectors.sum": "l1_bytes",
    "l1tex__t_sector_hit_rate.pct": "l1_hit_rate",
    "lts__t_sector_hit_rate.pct": "l2_hit_rate",
}
ALIASES = {
    "gpu__time_duration.avg": "time_us",
    "Duration": "time_us",
    "L1/TEX Hit Rate": "l1_hit_rate",
    "L2 Hit Rate": "l2_hit_rate",
    "dram__bytes.sum.per_second": "gbps_meas",
    "Memory Throughput": "gbps_meas",  # a second one of this name is in %
}
COMMAND = f"ncu --csv --page raw --nvtx --metrics {','.join(COLUMNS)} --log-file step.csv python train.py"
SUMMED = ("time_us", "dram_read_bytes", "dram_write_bytes", "l2_bytes", "l1_bytes")
RATED = {"l1_hit_rate": "l1_bytes", "l2_hit_rate": "l2_bytes"}  # what a hit rate's mean is weighted by

_TENS = {"": 0, "n": -9, "u": -6, "m": -3, "K": 3, "k": 3, "M": 6, "G": 9, "T": 12}
# column -> the names of its unit, and the power of ten that brings one to the column's
_UNITS = {"time_us": (("second", "s"), 6), "gbps_meas": (("byte/second", "byte/s", "B/second", "B/s"), -9)}
_UNITS |= dict.fromkeys(("dram_read_bytes", "dram_write_bytes"), (("byte", "B"), 0)) | dict.fromkeys(("l2_bytes", "l1_bytes"), (("sector",), 0))


def _number(text: str) -> float | None:
    """1,234.5 -> 1234.5; None for n/a. A list of instances in brackets behind it is left out."""
    text = text.partition(" (")[0].strip().replace(",", "")
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _value(column: str, text: str, unit: str, where: str) -> float | None:
    """In the column's unit; None where it was not measured, or is another metric of that name."""
    number = _number(text)
    if number is None or (column == "gbps_meas" and unit == "%"):
        return None
    if column not in _UNITS:  # a hit rate
        return number
    names, tens = _UNITS[column]
    prefixes = [prefix for prefix, end in product(_TENS, names) if prefix + end == unit.strip()]
    if not prefixes:
        what = f"unknown unit of {column}: expected one of {names[0]}, such as M{names[0]}, got {unit!r}."
        raise ConfigError(message(what, where, "export with --print-units base."))
    tens += _TENS[prefixes[0]]
    scaled = number * 10**tens if tens >= 0 else number / 10**-tens  # one rounding: 1,500 ns are 1.5 us
    return round(scaled * (SECTOR_BYTES if "sector" in names else 1)) if column.endswith("_bytes") else scaled


def _range(cell: str) -> str:
    """Name of the innermost NVTX range of a cell such as `7  "<default domain>:outer:none:..."  "<default domain>:inner:none:..."`; empty outside of any."""
    entries = re.findall(r'"([^"]+)"', cell)
    if not entries:
        return ""
    parts = entries[-1].split(":")[1:]  # without the domain
    return ":".join(parts[:-6]) if len(parts) > 6 else parts[0] if parts else ""  # six fields follow the name, which may have colons of its own


def _text(path: Path) -> str:
    try:
        data = path.read_bytes()
    except OSError as error:
        what = f"no csv of Nsight Compute there: expected a file that can be read, got {str(path)!r} ({error.strerror})."
        raise ConfigError(message(what, fix=COMMAND)) from None
    return data.decode("utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig", errors="replace")  # PowerShell's > writes utf-16


def _records(path: Path) -> Iterator[tuple[str, int, dict[str, str]]]:
    """(where it stands, number of the export in the file, cells by header) of each row; what the program or the profiler printed is left out."""
    header: list[str] = []
    exports = 0
    lines = ["" if line.startswith("==") else line for line in _text(path).splitlines()]  # ==PROF== and its like
    reader = csv.reader(lines)
    for cells in reader:
        where = f"{path}, line {reader.line_num}"
        if "ID" in cells and "Kernel Name" in cells:
            header, exports = cells, exports + 1
        elif header and len(cells) == len(header):
            yield where, exports, dict(zip(header, cells, strict=True))
        elif header and re.match(r'"\d', lines[reader.line_num - 1]):  # all that ncu writes is quoted
            raise ConfigError(message(f"a row is cut off: expected {len(header)} cells, got {len(cells)}.", where=where, fix=f"export again: {COMMAND}"))
    if not header:
        what = 'no table of Nsight Compute: expected a line with "ID" and "Kernel Name", got none.'
        raise ConfigError(message(what, str(path), f"export a row a launch: {COMMAND}"))


def read_ncu_csv(path: str | Path) -> list[dict[str, Any]]:
    """One row a kernel launch, in the order of the file.

    Returns:
        Rows of id, kernel, range (the innermost NVTX range, empty outside of any) and, where collected, time_us, dram_read_bytes, dram_write_bytes, l2_bytes
        (what SMs asked of L2), l1_bytes, l1_hit_rate and l2_hit_rate in %, gbps_meas (10^9 bytes of DRAM a second).

    Raises:
        ConfigError: no such file, no table in it, no kernels, none of these metrics, a unit that is not theirs, a row that is cut off; the text has the command
        that makes what is needed.
    """
    path = Path(path)
    rows: dict[tuple[int, str, str], dict[str, Any]] = {}
    units: dict[str, str] = {}
    for where, export, cells in _records(path):
        if not cells["ID"].strip():  # wide: the second line
            units = cells
            continue
        if not cells["ID"].isdigit():  # printed by the program
            continue
        row = rows.setdefault((export, cells.get("Process ID", ""), cells["ID"]), {"id": int(cells["ID"]), "kernel": cells["Kernel Name"], "range": ""})
        for name, cell in cells.items():
            if "Push/Pop_Range" in name or ("Start/Stop_Range" in name and not row["range"]):
                row["range"] = _range(cell) or row["range"]
        if "Metric Name" in cells:
            measured: Iterable[tuple[str, str, str]] = [(cells["Metric Name"], cells["Metric Value"], cells.get("Metric Unit", ""))]
        else:
            measured = [(name, cell, units.get(name, "")) for name, cell in cells.items()]
        for name, text, unit in measured:
            column = COLUMNS.get(name) or ALIASES.get(name)
            value = _value(column, text, unit, where) if column else None
            if column and value is not None and (name in COLUMNS or column not in row):
                row[column] = value
    found = list(rows.values())
    if not found:
        what = "no kernels in this csv: expected rows below the header, got none."
        raise ConfigError(message(what, str(path), f"profile something that runs on the GPU: {COMMAND}"))
    if not any(column in row for row in found for column in (*SUMMED, *RATED, "gbps_meas")):
        raise ConfigError(message(f"none of the metrics that are used: expected some of {', '.join(COLUMNS)}, got none.", where=str(path), fix=COMMAND))
    for row in found:
        if (gbps := _gbps(row)) is not None:
            row["gbps_meas"] = gbps
    return found


def _gbps(row: dict[str, Any]) -> float | None:
    us, read, written = (row.get(column) for column in ("time_us", "dram_read_bytes", "dram_write_bytes"))
    return (read + written) / us / 1e3 if us and read is not None and written is not None else None


def sum_by_range(rows: Iterable[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Rows of `read_ncu_csv` added up by NVTX range, in the order in which the ranges come; the key is empty for launches outside of any.

    Each has range, launches, kernels (their names), the sums, hit rates (means by the bytes that were asked for) and gbps_meas. A sum is None where one of its
    launches lacks the metric: a part would be taken for the whole.
    """
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row["range"], []).append(row)
    return {name: _sum(name, group) for name, group in groups.items()}


def _sum(name: str, group: list[dict[str, Any]]) -> dict[str, Any]:
    total: dict[str, Any] = {"range": name, "launches": len(group), "kernels": list(dict.fromkeys(row["kernel"] for row in group))}
    for column in SUMMED:
        total[column] = sum(row[column] for row in group) if all(column in row for row in group) else None
    for rate, weight in RATED.items():
        complete = all(rate in row for row in group)
        if complete and total[weight]:
            total[rate] = sum(row[rate] * row[weight] for row in group) / total[weight]
        else:
            total[rate] = group[0][rate] if complete and len(group) == 1 else None
    total["gbps_meas"] = group[0].get("gbps_meas") if len(group) == 1 else _gbps(total)
    return total
