"""What a time means beside other rows of the same sources on the same machine: ratios to the baselines, to the ceilings, and with a mask's refresh in it."""

from __future__ import annotations

from collections.abc import Iterable

from .cells import Cell
from .provenance import SAME
from .table import Row, number, text, what

REFRESHES = (1, 10, 100)
RATED = ("bf16", "fp16")  # of which the ceilings have a rate
CELL = ("op", "phase", "provider", "M", "N", "K", "dtype", "block_n", "block_k", "ratio", "mask", "mask_seed")


def usable(row: Row) -> bool:
    """Whether a row has a time that may be compared."""
    return row["gate"] == "pass" and row["verdict"] == "ok"


def _found(rows: list[Row], own: Row, wanted: dict[str, str]) -> Row | None:
    """The latest usable row of the same sources and machine with these values."""
    for row in reversed(rows):
        if usable(row) and all(row[c] == own.get(c, "") for c in SAME) and all(row[c] == v for c, v in wanted.items()):
            return row
    return None


def _cell(rows: list[Row], own: Row, cell: Cell) -> Row | None:
    return _found(rows, own, {c: v for c, v in what(cell).items() if c in CELL})


def roof(ceilings: dict[str, float], row: Row) -> None:
    """The least time that the measured ceilings allow, and how near the cell came. Nothing in 32 bits, for which the tensor cores have other rates."""
    ms, flops, rate = number(row, "ms_p50"), ceilings.get("flops_per_s"), ceilings.get("bytes_per_s")
    if ms and flops and rate and row.get("bytes_min") and row["dtype"] in RATED:
        least = max((number(row, "flop_useful") or 0) / flops, (number(row, "bytes_min") or 0) / rate)
        row |= {"t_min_us": text(1e6 * least), "roof_pct": text(1e5 * least / ms)}


def with_baselines(rows: list[Row], cell: Cell, row: Row) -> None:
    """Ratios to dense, and to the faster of dense and masked-dense: above 1 the cell was faster."""
    dense = row if cell.provider == "dense" else _cell(rows, row, cell.dense())
    masked = row if cell.provider == "masked_dense" else None if cell.provider == "dense" else _cell(rows, row, cell.by("masked_dense"))
    for prefix in ("", "cold_"):
        own, d, m = (number(r, f"{prefix}ms_p50") if r else None for r in (row, dense, masked))
        if own and d:
            row[f"{prefix}x_dense"] = text(d / own)
            if m:
                row[f"{prefix}x_best"] = text(min(d, m) / own)


def with_refreshes(rows: list[Row], cell: Cell, row: Row) -> None:
    """The time with the mask's refresh in it, every 1, 10 or 100 steps: the mask, and for the kernels the lists of both directions.

    Metadata costs the same for every number of tokens, ratio and kind of mask, so any row of the same weight shape and block serves.
    """
    kernels = "triton" in cell.provider or "triton" in row.get("ran", "")
    parts = {"block_index": cell.provider} | ({"lists": "fxmask_triton"} if kernels else {})
    same = {"N": str(cell.N), "K": str(cell.K), "dtype": cell.dtype, "block_n": str(cell.block[0]), "block_k": str(cell.block[1])}
    add_refreshes(row, [_found(rows, row, {**same, "op": "metadata", "phase": phase, "provider": by}) for phase, by in parts.items()])


def add_refreshes(row: Row, parts: Iterable[Row | None]) -> None:
    """Fill the refresh columns from the metadata rows; nothing where one is missing."""
    times = [number(p, "ms_p50") if p else None for p in parts]
    own, known = number(row, "ms_p50"), [t for t in times if t is not None]
    if own is not None and len(known) == len(times):
        row["metadata_ms"] = text(float(sum(known)))
        row |= {f"ms_refresh_{n}": text(own + sum(known) / n) for n in REFRESHES}
