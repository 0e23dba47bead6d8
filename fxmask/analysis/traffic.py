"""Bytes of one op, operand by operand, at every level that they are counted at.

| level | what |
| --- | --- |
| compulsory (`bytes_min`) | every distinct byte once: no schedule moves less between DRAM and the chip |
| requested (`bytes_req`) | what programs ask of the L2 cache, each for itself; L1 hits and bank conflicts are not modelled |
| sectors, lines | requested, in granules of 32 and 128 bytes |
| DRAM estimate (`bytes_dram_est`) | between compulsory and sectors: an operand is read again where what is touched between two uses does not fit the cache |
"""

from __future__ import annotations

from typing import Any

from ..kernels import sectors
from ..kernels.triton.tiles import SPLIT_FILL, TOKEN_GROUP
from ..passes.counting.work import Work
from .devices import Device

ALPHA = 0.5  # share of the L2 that one operand may hold until its next use; an assumption, to be calibrated per device
DRAM_MODEL = f"finite L2, an operand may hold {ALPHA} of it"


def operands(work: Work, device: Device) -> list[dict[str, Any]]:
    """A row for each operand and direction of an op."""
    c, rows = work.cost, []
    for direction, asked, least in (("read", c.reads, c.reads_min), ("write", c.writes, c.writes_min)):
        for name in sorted({*asked, *least}):
            req, low = asked.get(name, 0), least.get(name, 0)
            if not req and not low:
                continue
            width, pitch = work.widths.get(name, (max(req, 1), max(req, 1)))
            sector, line = (sectors.rounded(req, width, pitch, g) for g in (device.sector_bytes, device.line_bytes))
            again = 1 if direction == "write" else _passes(work, name, low, device)
            rows.append(
                {
                    "operand": name,
                    "direction": direction,
                    "bytes_min": low,
                    "bytes_req": req,
                    "bytes_sector": sector,
                    "bytes_line": line,
                    "reread": req / low if low else None,
                    "sector_eff": req / sector if sector else None,
                    "bytes_dram_est": max(low, min(low * again, sector)),
                }
            )
    return rows


def _passes(work: Work, name: str, low: int, device: Device) -> int:
    """How often an operand of a product comes from DRAM: once where it fits, else once for every group of programs that run together."""
    if low <= ALPHA * device.l2_bytes or not work.m or not work.cost.flop_issued:
        return 1
    if work.phase == "dW":
        tiles = -(-work.m // 128) * -(-work.n // 128)
        return -(-tiles // SPLIT_FILL)
    if name == "w":
        return -(-work.m // TOKEN_GROUP)
    slice_bytes = low * min(1, TOKEN_GROUP / work.m)
    return 1 if slice_bytes <= ALPHA * device.l2_bytes else -(-work.n // device.dense_tile[1])
