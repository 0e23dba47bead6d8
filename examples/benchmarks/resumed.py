"""Which rows of a csv need not be measured again."""

from __future__ import annotations

from collections.abc import Sequence

from fxmask.bench.table import Row, Table, key


def measured(table: Table | None, wanted: Sequence[Row], again: bool = False) -> list[Row] | None:
    """The latest row of every cell that is wanted; None without a table, where one is missing, or, with `again`, where the machine was busy."""
    latest = {} if table is None else {key(row, table.names): row for row in table.rows}
    found = [latest[k] for row in wanted if table is not None and (k := key(row, table.names)) in latest]
    return None if len(found) < len(wanted) or (again and any(row["busy"] == "1" for row in found)) else found
