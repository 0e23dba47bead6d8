"""Timings that go on after the rows of a csv: what these rows share, which of them need not be measured again, and where they were measured."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence

import torch

from benchmarks.checked import device_here
from fxmask.bench.provenance import provenance
from fxmask.bench.table import Row, Table, key


def opened(a: Namespace, name: str, columns: Sequence[str], names: Sequence[str]) -> tuple[Row, Table | None]:
    """What all rows of a command share, and the csv in its `--out`, None where none is given; from here on PyTorch has its `--threads`."""
    if a.threads:
        torch.set_num_threads(a.threads)
    device = device_here(a.device)
    shared = {k: v for k, v in provenance(device).items() if k != "threads"}
    return shared, None if a.out is None else Table(a.out / f"{name}_{device.type}.csv", columns, names)


def place(rows: Sequence[Row], device: str) -> str:
    """The machine that measured these rows, for a title, and whether it was busy."""
    threads = f", {rows[0]['threads']} threads" if torch.device(device).type == "cpu" else ""
    return rows[0]["device"] + threads + (", busy" if any(r["busy"] == "1" for r in rows) else "")


def measured(table: Table | None, wanted: Sequence[Row], again: bool = False) -> list[Row] | None:
    """The latest row of every cell that is wanted; None without a table, where one is missing, or, with `again`, where the machine was busy."""
    latest = {} if table is None else {key(row, table.names): row for row in table.rows}
    found = [latest[k] for row in wanted if table is not None and (k := key(row, table.names)) in latest]
    return None if len(found) < len(wanted) or (again and any(row["busy"] == "1" for row in found)) else found
