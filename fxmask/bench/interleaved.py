"""`fxmask bench --device cpu`: a layer's training step by every contender in turns, so that whatever slows the machine down slows all of them.

A turn of a contender: the weight changes (not timed), then its mask is built (not by the dense layer, which has none), then a forward and a backward run, as
separate calls. Speed is against the faster of dense and masked-dense, in process time on one thread, in wall time on more.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch

from ..kernels.cpu import deciding
from ..kernels.cpu.plans import Case
from ..kernels.grid import grid_shape, keep_count
from . import clock
from .cells import Cell, parse_shape
from .contenders import Contender, Layer, contender, error_of, layer_of
from .inputs import TORCH_DTYPES
from .provenance import provenance, utc
from .session import within
from .stopwatch import turns
from .table import WHAT, WHERE, Row, Table, number, text, time_column, verdict_of, what

CSV = "cpu.csv"
TINY = ("512x128->256",)
DEFAULT_BLOCKS = (64, 32, 16)
RATIOS = (0.5, 0.7, 0.8, 0.9, 0.95)
PARTS = ("mask", "forward", "backward")
COLUMNS = (
    *WHERE, "load", "load_after", "verdict", *WHAT, "turns", *(f"{p}_ms" for p in PARTS), "ms_p50", "ms_p10", "ms_p90", "cpu_ms_p50",
    "forward_plan", "backward_plan", "max_err", "gate", "x_dense", "x_masked_dense", "x_best",
)  # fmt: skip


def _timed(call: Callable[[], Any], into: list[tuple[float, float]]) -> Any:
    w, c = time.perf_counter(), time.process_time()
    out = call()
    into.append((1e3 * (time.perf_counter() - w), 1e3 * (time.process_time() - c)))
    return out


def _turn(i: Layer, c: Contender, turn: int) -> list[tuple[float, float]]:
    i.w.copy_(i.weights[turn % 2])  # another weight, and with it another mask
    times: list[tuple[float, float]] = []
    m = _timed(c.mask, times)
    _timed(lambda: c.forward(m), times)
    _timed(lambda: c.backward(m), times)
    return times


def measure(cell: Cell, names: tuple[str, ...], seconds: float, shared: Row) -> list[Row]:
    """The rows of a cell, one a contender."""
    i, before = layer_of(cell), clock.load_average()
    made = {name: contender(name, i) for name in names}
    right = {name: (0.0, True) if name == "dense" else error_of(i, c) for name, c in made.items()}
    times: dict[str, list[list[tuple[float, float]]]] = {name: [] for name in names}
    for c in made.values():
        _turn(i, c, 0)
        _turn(i, c, 1)
    for turn, name in turns(names, seconds, 5):
        times[name].append(_turn(i, made[name], turn))
    after = clock.load_average()
    verdict = verdict_of(max((v for v in (before, after) if v is not None), default=None))
    rows = {}
    for name, (error, good) in right.items():
        rows[name] = {**shared, **what(cell.by(name)), "utc": utc(), "load": text(before), "load_after": text(after), "max_err": text(error)}
        if good:
            rows[name] |= {"gate": "pass", "verdict": verdict} | _plans(cell, name) | _times(times[name])
        else:  # no time for a wrong result
            rows[name] |= {"gate": "fail", "verdict": "none: wrong"}
    if verdict == "ok":
        _compare(rows)
    return list(rows.values())


def _times(taken: list[list[tuple[float, float]]]) -> Row:
    """Columns of a contender's turns: medians of its parts in the time that decides, percentiles of the whole."""
    decides = 1 if torch.get_num_threads() == 1 else 0
    wall, cpu = (clock.percentiles([sum(part[k] for part in turn) for turn in taken]) for k in (0, 1))
    found = {f"{p}_ms": text(clock.percentiles([turn[j][decides] for turn in taken])[1]) for j, p in enumerate(PARTS)}
    return found | {"turns": text(len(taken)), "ms_p10": text(wall[0]), "ms_p50": text(wall[1]), "ms_p90": text(wall[2]), "cpu_ms_p50": text(cpu[1])}


def _compare(rows: dict[str, Row]) -> None:
    """Times as fast as dense and masked-dense, where those and the contender are right."""
    ms = {name: float(row[time_column(row)]) for name, row in rows.items() if row["gate"] == "pass"}
    bases = {name: ms[name] for name in ("dense", "masked_dense") if name in ms}
    for name, own in ms.items():
        rows[name] |= {f"x_{base}": text(t / own) for base, t in bases.items()}
        rows[name]["x_best"] = text(min(bases.values()) / own) if len(bases) == 2 else ""


def _plans(cell: Cell, name: str) -> Row:
    if name not in ("fxmask_auto", "fxmask_cpu"):
        return {}
    names, blocks = {}, math.prod(grid_shape((cell.N, cell.K), cell.block))
    density = keep_count(blocks, cell.ratio) / blocks
    for op in ("forward", "backward"):
        found = deciding.of(Case(op, cell.M, (cell.N, cell.K), cell.block, density, TORCH_DTYPES[cell.dtype]), name == "fxmask_cpu")
        names[f"{op}_plan"] = found.name if found else ""
    return names


def cells(shapes: tuple[str, ...], blocks: tuple[int, ...], ratios: tuple[float, ...], kinds: tuple[str, ...], dtype: str, seed: int) -> Iterator[Cell]:
    """Every shape, block, ratio and kind of mask."""
    for shape, b, kind, r in product(shapes, blocks, kinds, ratios):
        m, n, k = parse_shape(shape)
        yield Cell("step", "interleaved", m, n, k, dtype, (b, b), r, kind, seed)


def run(
    found: list[Cell], out: Path, seconds: float, limit: float | None, names: tuple[str, ...], say: Callable[[str], None] = print, csv: str = CSV
) -> Table:
    """Measure what the csv lacks, until the time limit."""
    shared = provenance(torch.device("cpu"))
    table = Table(out / csv, COLUMNS)
    todo = [cell for cell in found if not all({**shared, **what(cell.by(name))} in table for name in names)]
    for cell in within(todo, limit, say):
        rows = measure(cell, names, seconds, shared)
        for row in rows:
            table.append(row)
        say(f"{cell.group}  " + "  ".join(f"{r['provider']} {number(r, time_column(r)) or float('nan'):.1f} ms" for r in rows) + f"  {rows[0]['verdict']}")
        ours = [r for r in rows if r.get("forward_plan")]
        say("    " + "  ".join(f"{r['provider']} x_best={r.get('x_best', '')} ({r['forward_plan']}, {r['backward_plan']})" for r in ours))
    return table
