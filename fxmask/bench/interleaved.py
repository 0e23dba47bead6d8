"""`fxmask bench --device cpu`: a layer's training step by every contender in turns, so that whatever slows the machine down slows all of them.

A turn of a contender: the weight changes (not timed), then its mask is built (not by the dense layer, which has none), then a forward and a backward run, as
separate calls. Speed is against the faster of dense and masked-dense, in process time on one thread, in wall time on more.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels import ops, reference
from ..kernels.cpu import deciding
from ..kernels.cpu.plans import Case
from ..kernels.grid import grid_shape, keep_count
from . import clock, gate
from .cells import BLOCKS, Cell, parse_shape
from .inputs import TORCH_DTYPES
from .provenance import provenance, utc
from .session import within
from .table import WHAT, WHERE, Row, Table, number, text, time_column, verdict_of, what

CSV = "cpu.csv"
TINY = ("512x128->256",)
RATIOS = (0.5, 0.7, 0.8, 0.9, 0.95)
CONTENDERS = ("dense", "masked_dense", "fxmask_auto", "fxmask_cpu")
KNOWN = (*CONTENDERS, "fxmask_reference")  # masked-dense behind the op
PARTS = ("mask", "forward", "backward")
COLUMNS = (
    *WHERE, "load", "load_after", "verdict", *WHAT, "turns", *(f"{p}_ms" for p in PARTS), "ms_p50", "ms_p10", "ms_p90", "cpu_ms_p50",
    "forward_plan", "backward_plan", "max_err", "gate", "x_dense", "x_masked_dense", "x_best",
)  # fmt: skip


@dataclass
class Layer:
    """Operands of one cell, and two weights that it takes turns with."""

    cell: Cell
    x: Tensor
    gy: Tensor
    weights: tuple[Tensor, Tensor]
    w: Tensor
    keep: Tensor

    def change(self, turn: int) -> None:
        """Another weight, and with it another mask."""
        self.w.copy_(self.weights[turn % 2])


def layer_of(cell: Cell) -> Layer:
    """N(0, 1) operands; of kind `rows` the block rows of the weight differ in scale, of phase `token_mixing` the tokens of x are contiguous."""
    g = torch.Generator().manual_seed(cell.seed)
    dtype = TORCH_DTYPES[cell.dtype]
    x, gy, a, b = (torch.randn(s, generator=g) for s in ((cell.M, cell.K), (cell.M, cell.N), (cell.N, cell.K), (cell.N, cell.K)))
    if cell.mask == "rows":
        nb = grid_shape((cell.N, cell.K), cell.block)[0]
        scale = torch.exp(0.02 * torch.randn(nb, 1, generator=g)).repeat_interleave(cell.block[0], 0)[: cell.N]
        a, b = a * scale, b * scale
    if cell.phase == "token_mixing":
        x = x.t().contiguous().t()
    nb, kb = grid_shape((cell.N, cell.K), cell.block)
    first, second = a.to(dtype), b.to(dtype)
    return Layer(cell, x.to(dtype), gy.to(dtype), (first, second), first.clone(), torch.tensor(keep_count(nb * kb, cell.ratio)))


class Contender(NamedTuple):
    """mask() -> mask; forward(mask) -> y; backward(mask) -> (dX, dW)."""

    mask: Callable[[], Tensor | None]
    forward: Callable[[Tensor | None], Tensor]
    backward: Callable[[Tensor | None], tuple[Tensor, Tensor]]


def contender(name: str, i: Layer) -> Contender:
    """One of CONTENDERS over the operands of a layer."""
    b, zero = i.cell.block, torch.zeros((), dtype=torch.int64)

    def mask() -> Tensor:
        return ops.block_index(i.w, i.keep, zero, *b, "fro", "lowest", 0)

    if name == "dense":
        return Contender(lambda: None, lambda _: F.linear(i.x, i.w), lambda _: (i.gy @ i.w, i.gy.t() @ i.x))
    impl = {"masked_dense": "", "fxmask_reference": "reference", "fxmask_auto": "auto", "fxmask_cpu": "cpu"}[name]
    if not impl:
        return Contender(
            mask,
            lambda m: reference.masked_linear(i.x, i.w, None, m, b),  # type: ignore[arg-type]
            lambda m: reference.masked_linear_backward(i.gy, i.x, i.w, m, None, b, "masked"),  # type: ignore[arg-type]
        )
    return Contender(
        mask,
        lambda m: torch.ops.fxmask.masked_linear(i.x, i.w, None, m, *b, "masked", None, impl),
        lambda m: torch.ops.fxmask.masked_linear_backward(i.gy, i.x, i.w, m, *b, "masked", None, impl),
    )


def _timed(call: Callable[[], Any], into: list[tuple[float, float]]) -> Any:
    w, c = time.perf_counter(), time.process_time()
    out = call()
    into.append((1e3 * (time.perf_counter() - w), 1e3 * (time.process_time() - c)))
    return out


def _turn(i: Layer, c: Contender, turn: int) -> list[tuple[float, float]]:
    i.change(turn)
    times: list[tuple[float, float]] = []
    m = _timed(c.mask, times)
    _timed(lambda: c.forward(m), times)
    _timed(lambda: c.backward(m), times)
    return times


def error_of(i: Layer, c: Contender) -> tuple[float, bool]:
    """See `gate.of_the_dtypes_size`: of forward, dX and dW, beside masked-dense's."""
    m = contender("masked_dense", i).mask()
    assert m is not None  # of masked-dense

    def plain(x: Tensor, gy: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        return reference.masked_linear(x, w, None, m, i.cell.block), *reference.masked_linear_backward(gy, x, w, m, None, i.cell.block, "masked")

    exact = plain(i.x.double(), i.gy.double(), i.w.double())
    return gate.of_the_dtypes_size((c.forward(m), *c.backward(m)), plain(i.x, i.gy, i.w), exact)


def measure(cell: Cell, names: tuple[str, ...], seconds: float, shared: Row, load: Callable[[], float | None] = clock.load_average) -> list[Row]:
    """The rows of a cell, one a contender."""
    i, before = layer_of(cell), load()
    made = {name: contender(name, i) for name in names}
    right = {name: (0.0, True) if name == "dense" else error_of(i, c) for name, c in made.items()}
    times: dict[str, list[list[tuple[float, float]]]] = {name: [] for name in names}
    for c in made.values():
        _turn(i, c, 0)
        _turn(i, c, 1)
    end, turn = time.perf_counter() + seconds, 0
    while turn < 5 or (time.perf_counter() < end and turn < clock.SAMPLES):
        for name in random.Random(turn).sample(names, len(names)):  # what ran before decides a fifth of a short op's time
            times[name].append(_turn(i, made[name], turn))
        turn += 1
    after, threads = load(), torch.get_num_threads()
    verdict = verdict_of(max((v for v in (before, after) if v is not None), default=None))
    rows, which = {}, 1 if threads == 1 else 0
    for name in names:
        own = times[name]
        totals = [tuple(sum(part[k] for part in t) for k in (0, 1)) for t in own]
        wall = clock.percentiles([t[0] for t in totals])
        row = {**shared, **what(cell.by(name)), "utc": utc(), "load": text(before), "load_after": text(after), "max_err": text(right[name][0])}
        if not right[name][1]:  # no time for a wrong result
            rows[name] = {**row, "gate": "fail", "verdict": "none: wrong"}
            continue
        row |= {"gate": "pass", "verdict": verdict, "turns": text(turn)} | _plans(cell, name)
        row |= {f"{p}_ms": text(clock.percentiles([t[j][which] for t in own])[1]) for j, p in enumerate(PARTS)}
        row |= {"ms_p10": text(wall[0]), "ms_p50": text(wall[1]), "ms_p90": text(wall[2]), "cpu_ms_p50": text(clock.percentiles([t[1] for t in totals])[1])}
        rows[name] = row
    for row in rows.values():
        if verdict == "ok" and row["gate"] == "pass":
            column = time_column(row)
            bases = {b: float(rows[b][column]) for b in ("dense", "masked_dense") if rows.get(b, {}).get("gate") == "pass"}
            row |= {f"x_{b}": text(t / float(row[column])) for b, t in bases.items()}
            row["x_best"] = text(min(bases.values()) / float(row[column])) if len(bases) == 2 else ""
    return list(rows.values())


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
    for shape in shapes:
        m, n, k = parse_shape(shape)
        for b in blocks:
            for kind in kinds:
                for r in ratios:
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


DEFAULT_BLOCKS = tuple(b for b in BLOCKS if b != 128)
