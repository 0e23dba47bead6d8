"""`fxmask bench --device cpu --dispatch`: how far the dispatch's choice is from the best plan, over a grid of cases drawn at random.

For each case the choice is made anew, as a user's process makes it the first time; then all plans are timed in turns. The regret is the chosen plan's time over
the fastest one's, less one; least times of many turns, since noise only adds. Every plan's result is compared with float64 first.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..kernels import reference
from ..kernels.cpu import chosen, deciding, implementation, masked_dense
from ..kernels.cpu.plans import BY_NAME, MASKED_DENSE, Case, Plan, plans
from ..kernels.grid import grid_shape
from . import clock, gate
from .cells import Cell
from .compare import usable
from .inputs import TORCH_DTYPES, make_mask
from .provenance import provenance, utc
from .session import within
from .stopwatch import Stopwatch, turns
from .table import WHAT, WHERE, Row, Table, number, text, verdict_of, what

CSV = "dispatch.csv"
COLUMNS = (
    *WHERE, "load", "verdict", *WHAT, "chosen", "why", "best", "chosen_ms", "best_ms", "masked_dense_ms", "regret", "x_masked_dense", "times",
    "max_err", "gate",
)  # fmt: skip
GOOD, SHARE = 0.05, 0.95  # regret of a good choice; how many of them have to be good
SHAPES = ((1024, 1024), (1536, 384), (384, 1536), (768, 768), (1000, 768), (2048, 512), (196, 196), (256, 1024))
TOKENS, BLOCKS, RATIOS, OPS = (256, 1024, 2048, 4096), (16, 32, 64, 128), (0.5, 0.7, 0.8, 0.9, 0.95), ("forward", "dx", "dw", "backward")


def draw(count: int, dtype: str, seed: int) -> list[Cell]:
    """Different cases out of the grid, in an order that the seed alone decides."""
    grid = product(OPS, TOKENS, SHAPES, BLOCKS, RATIOS)
    every = [Cell(op, "plans", m, n, k, dtype, (b, b), r, "random", seed) for op, m, (n, k), b, r in grid]
    return random.Random(seed).sample(every, min(count, len(every)))


def calls(cell: Cell, x: Tensor, gy: Tensor, w: Tensor, mask: Tensor) -> tuple[Callable[[], Any], Callable[[Plan], Callable[[], Any]]]:
    """The op as the dispatch runs it, and as any one plan does."""
    b, auto = cell.block, chosen.AUTO
    own: dict[str, Callable[[], Any]] = {
        "forward": lambda: auto.masked_linear(x, w, None, mask, b),
        "dx": lambda: auto.masked_linear_dx(gy, w, mask, b, "masked"),
        "dw": lambda: auto.masked_linear_dw(gy, x, mask, None, b, "masked"),
        "backward": lambda: auto.masked_linear_backward(gy, x, w, mask, None, b, "masked"),
    }
    dense: dict[str, Callable[[], Any]] = {
        "forward": lambda: masked_dense.masked_linear(x, w, None, mask, b),
        "dx": lambda: masked_dense.masked_linear_dx(gy, w, mask, b, "masked"),
        "dw": lambda: masked_dense.masked_linear_dw(gy, x, mask, None, b, "masked"),
        "backward": lambda: masked_dense.masked_linear_backward(gy, x, w, mask, b),
    }
    strips: dict[str, Callable[[Plan], Any]] = {
        "forward": lambda plan: implementation.masked_linear(x, w, None, mask, b, plan),
        "dx": lambda plan: implementation.masked_linear_dx(gy, w, mask, b, plan),
        "dw": lambda plan: implementation.backward(gy, x, None, mask, b, plan),
        "backward": lambda plan: implementation.backward(gy, x, w, mask, b, plan),
    }
    return own[cell.op], lambda plan: dense[cell.op] if plan == MASKED_DENSE else partial(strips[cell.op], plan)


def _exact(cell: Cell, x: Tensor, gy: Tensor, w: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
    """What the op gives by plain PyTorch, in the operands' precision."""
    b = cell.block
    if cell.op == "forward":
        return (reference.masked_linear(x, w, None, mask, b),)
    dx, dw = reference.masked_linear_backward(gy, x, w, mask, None, b, "masked")
    return {"dx": (dx,), "dw": (dw,), "backward": (dx, dw)}[cell.op]


def _outputs(result: Any) -> tuple[Tensor, ...]:
    return tuple(t for t in (result if isinstance(result, tuple) else (result,)) if t is not None)


def measure(cell: Cell, shared: Row, seconds: float) -> Row:
    """The row of one case."""
    g, dtype = torch.Generator().manual_seed(cell.seed), TORCH_DTYPES[cell.dtype]
    x, gy, w = (torch.randn(s, generator=g).to(dtype) for s in ((cell.M, cell.K), (cell.M, cell.N), (cell.N, cell.K)))
    mask = make_mask(grid_shape((cell.N, cell.K), cell.block), cell.ratio, "random", cell.seed)
    own, by = calls(cell, x, gy, w, mask)
    load = clock.load_average()
    deciding.decisions.clear()
    results = [own()]
    case = Case(cell.op, cell.M, (cell.N, cell.K), cell.block, float(mask.float().mean()), dtype)
    choice = deciding.of(case, False)
    assert choice is not None  # it has just run, over a mask that leaves something to skip
    wanted = [str(MASKED_DENSE), *map(str, plans(case))]
    results += [by(BY_NAME[n])() for n in wanted]
    plain, exact = _exact(cell, x, gy, w, mask), _exact(cell, x.double(), gy.double(), w.double(), mask)
    errors = [gate.of_the_dtypes_size(_outputs(r), plain, exact) for r in results]
    del results, plain, exact
    times, watch = dict.fromkeys(wanted, float("inf")), Stopwatch(x.device)
    for turn, name in turns(wanted, seconds, 6):
        took = 1e3 * watch(by(BY_NAME[name]))
        if turn:  # the first one warms up
            times[name] = min(times[name], took)
    best = min(times, key=lambda n: times[n])
    return {
        **shared, **what(cell, float(mask.float().mean())), "utc": utc(), "load": text(load), "verdict": verdict_of(load),
        "chosen": choice.name, "why": choice.why, "best": best, "chosen_ms": text(times[choice.name]), "best_ms": text(times[best]),
        "masked_dense_ms": text(times[str(MASKED_DENSE)]), "regret": text(times[choice.name] / times[best] - 1),
        "x_masked_dense": text(times[str(MASKED_DENSE)] / times[choice.name]), "times": " ".join(f"{n}:{t:.3g}" for n, t in times.items()),
        "max_err": text(max(e for e, _ in errors)), "gate": "pass" if all(good for _, good in errors) else "fail",
    }  # fmt: skip


def run(found: list[Cell], out: Path, seconds: float, limit: float | None, say: Callable[[str], None] = print) -> Table:
    """Measure what the csv lacks, until the time limit."""
    shared = provenance(torch.device("cpu"))
    table = Table(out / CSV, COLUMNS)
    for cell in within([c for c in found if {**shared, **what(c)} not in table], limit, say):
        row = measure(cell, shared, seconds)
        table.append(row)
        say(f"{cell.group}  chosen {row['chosen']} {row['chosen_ms']} ms  best {row['best']} {row['best_ms']} ms")
    return table


def summary(rows: list[Row]) -> tuple[str, bool]:
    """How many choices are good, and the worst; what was not judged; and whether enough of them are good and no result is wrong."""
    wrong = [r for r in rows if r["gate"] != "pass"]
    judged = [r for r in rows if usable(r)]
    lines = [f"  {r['op']} {r['M']}x{r['K']}->{r['N']} b{r['block_n']} r{r['ratio']}: wrong results, error {r['max_err']}" for r in wrong]
    if busy := len(rows) - len(judged) - len(wrong):
        lines.append(f"  {busy} cases have no verdict: the machine was busy")
    if not judged:
        return "\n".join(["dispatch: no case was measured on an idle machine", *lines]), not wrong
    regrets = sorted(number(r, "regret") or 0.0 for r in judged)
    good, slow = sum(r <= GOOD for r in regrets), sum((number(r, "x_masked_dense") or 0.0) < 0.97 for r in judged)
    head = (
        f"dispatch: {good} of {len(judged)} choices within {GOOD:.0%} of the best plan ({good / len(judged):.1%}), median {regrets[len(regrets) // 2]:.1%}, "
        f"worst {regrets[-1]:.0%}; {slow} below 0.97 of masked-dense"
    )
    return "\n".join([head, *lines]), not wrong and good >= SHARE * len(judged)
