"""`fxmask bench --device cpu --floor`: is `auto` anywhere slower than masked-dense that rebuilds the same mask?

A grid of shapes, layouts, tokens, blocks and ratios, whole steps in turns. Tiny layers are told apart: there an op's fixed cost decides, and it is given in
microseconds. `fxmask_reference` is masked-dense behind the same op, so that the op's cost and the choice's cost can be read apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from .cells import Cell
from .table import Row, number, time_column

CSV = "floor.csv"
CONTENDERS = ("dense", "masked_dense", "fxmask_reference", "fxmask_auto")
# (out, in), tokens, layouts; `token_mixing`: the tokens of the input are contiguous and its features apart, as behind a transpose
GRID: tuple[tuple[tuple[int, int], tuple[int, ...], tuple[str, ...]], ...] = (
    ((1024, 1024), (256, 1024), ("interleaved",)),
    ((1536, 384), (256, 25088), ("interleaved",)),
    ((384, 1536), (1024,), ("interleaved",)),
    ((196, 196), (384, 25088), ("interleaved", "token_mixing")),
    ((1000, 768), (256, 2048), ("interleaved",)),
    ((33, 17), (256, 25088), ("interleaved",)),
    ((384, 384), (1, 64, 255), ("interleaved",)),
    ((33, 17), (1, 255), ("interleaved",)),
)
BLOCKS, RATIOS, LEAST = (16, 32, 64, 128), (0.5, 0.8, 0.9), 256
WRONG = "wrong results"
FLOOR, OVER = 0.97, 100.0  # of masked-dense's speed; microseconds a call of forward or backward


def cells(dtype: str, seed: int) -> Iterator[Cell]:
    """The grid; a 16-bit dtype has fewer tokens, as it may be slow."""
    for (n, k), tokens, layouts in GRID:
        for m, layout, b, r in product(tokens, layouts, BLOCKS, RATIOS):
            if b < max(n, k) and (dtype == "fp32" or m <= 2048):
                yield Cell("step", layout, m, n, k, dtype, (b, b), r, "random", seed)


def _unjudged(found: dict[str, Row]) -> str:
    """Why a cell's times say nothing; empty where they do."""
    if wrong := [r["provider"] for r in found.values() if r["gate"] == "fail"]:
        return f"{WRONG} of {', '.join(wrong)}"
    if missing := sorted(set(CONTENDERS) - set(found)):
        return f"no row of {', '.join(missing)}"
    busy = [r["verdict"] for r in found.values() if r["verdict"] != "ok"]
    return f"no verdict, {busy[0]}" if busy else ""


def summary(rows: list[Row]) -> tuple[str, bool]:
    """How many cells hold the floor, those that do not, those that were not judged; and whether all that were hold it, with right results."""
    by_cell: dict[tuple[str, ...], dict[str, Row]] = {}
    for r in rows:
        by_cell.setdefault(tuple(r[c] for c in ("phase", "M", "K", "N", "dtype", "block_n", "ratio", "threads")), {})[r["provider"]] = r
    lines, large, small, wrong = [], list[bool](), list[bool](), False
    for (layout, m, k, n, dtype, block, ratio, _), found in by_cell.items():
        name = f"{m}x{k}->{n} {dtype} b{block} {float(ratio):.0%} {layout}"
        if why := _unjudged(found):
            wrong = wrong or why.startswith(WRONG)
            lines.append(f"  {name}: {why}")
            continue
        base, op, own, dense = (number(found[p], time_column(found[p])) or float("nan") for p in ("masked_dense", "fxmask_reference", "fxmask_auto", "dense"))
        x, over = base / own, 1e3 * (own - base) / 2  # two calls: forward and backward
        good = x >= FLOOR if int(m) >= LEAST else over <= OVER
        (large if int(m) >= LEAST else small).append(good)
        if not good:
            plans = f"{found['fxmask_auto']['forward_plan']}, {found['fxmask_auto']['backward_plan']}"
            lines.append(f"  {name}: {x:.2f} of masked-dense, {over:+.0f} us a call; {op / own:.2f} of it behind the op; dense {dense / own:.2f}; {plans}")
    head = f"floor: {sum(large)} of {len(large)} cells of {LEAST} tokens or more at {FLOOR} or more of masked-dense's speed"
    head += f"; {sum(small)} of {len(small)} smaller ones at most {OVER:.0f} us a call over it"
    return "\n".join([head, *lines]), not wrong and all(large + small)
