"""What the stages with a csv of their own found: a device's limits, the best tile and number of splits beside the library's own, refreshes, dropout, 2:4."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from ..errors import ConfigError
from . import sweeps
from .compare import usable
from .driver import read_ceilings
from .goals import NOT_MEASURED
from .parts import PARTS
from .provenance import SAME
from .table import Row, Table, number


def latest(table: Callable[[], Table], say: Callable[[str], None], also: Sequence[str] = ()) -> list[Row]:
    """Rows of the sources and the machine that were measured last, and with the same values in `also`; none, and a word, where a csv is of another version."""
    try:
        rows = table().rows
    except ConfigError as e:
        say(f"not read: {e}")
        return []
    return [r for r in rows if all(r[c] == rows[-1][c] for c in (*SAME, *also))]


def rows_of(out: Path, say: Callable[[str], None] = print) -> dict[str, list[Row]]:
    """The rows of each stage that have a time, by its name."""
    tables = {name: partial(part.table, out) for name, part in PARTS.items()} | {name: partial(sweeps.table, name, out) for name in sweeps.OPS}
    return {name: [r for r in latest(table, say) if usable(r)] for name, table in tables.items()}


def _best(rows: Sequence[Row], column: str, **wanted: str) -> Row | None:
    """The row with the most of a column."""
    found = [r for r in rows if all(r[c] == v for c, v in wanted.items()) and number(r, column) is not None]
    return max(found, key=lambda r: number(r, column) or 0.0, default=None)


def _ms(row: Row) -> float:
    return number(row, "ms_p50") or 0.0


def limits(out: Path, found: Mapping[str, Sequence[Row]]) -> dict[str, float]:
    """The ceilings, and the L2's bytes a second for rows of 128, 64 and 32 bytes, whichever way of loading them is the faster: `l2_bytes_per_s_128`."""
    known = read_ceilings(out)
    for size in ("128", "64", "32"):
        row = _best(found["bandwidth"], "tb_per_s", level="L2", row_bytes=size)
        known |= {f"l2_bytes_per_s_{size}": 1e12 * (number(row, "tb_per_s") or 0.0)} if row else {}
    return known


def _bandwidth(rows: Sequence[Row]) -> list[str]:
    out = []
    for level, words in (("L2", "L2 to multiprocessors"), ("HBM", "memory to multiprocessors")):
        parts = []
        for size in ("128", "64", "32"):
            ways = [(by, _best(rows, "tb_per_s", level=level, by=by, row_bytes=size)) for by in ("tma", "pointer")]
            known = [f"{by} {number(row, 'tb_per_s'):.2f} ({row['programs_per_sm']} programs each)" for by, row in ways if row]
            parts += [f"rows of {size} B: {', '.join(known)}"] if known else []
        out.append(f"{words}, TB/s / {'; '.join(parts) or NOT_MEASURED}")
    return out


def _tensorcore(rows: Sequence[Row]) -> list[str]:
    best = [(n, _best(rows, "tflop_per_s", n=n)) for n in ("128", "64", "32", "16")]
    seen = ", ".join(f"n = {n}: {number(row, 'tflop_per_s'):.0f}" for n, row in best if row)
    return [f"tensor cores, m64 x n x k16 from shared memory, TFLOP/s / {seen or NOT_MEASURED}"]


def _sweep(stage: str, rows: Sequence[Row]) -> list[str]:
    """For each block and ratio the fastest choice and the library's own."""
    tried = [r for r in rows if r["provider"] not in ("dense", "masked_dense")]
    out = []
    for block, ratio in dict.fromkeys((r["block_n"], r["ratio"]) for r in tried):
        same = [r for r in tried if (r["block_n"], r["ratio"]) == (block, ratio)]
        times = {r["provider"]: _ms(r) for r in same}
        best = min(times, key=lambda name: times[name])
        own = times.get(sweeps.OWN)
        factor = next(number(r, "x_best") for r in same if r["provider"] == best)
        beside = f"own {own:.3f} ms ({own / times[best]:.2f}x of it)" if own else f"own {NOT_MEASURED}"
        against = "" if factor is None else f", {factor:.2f}x the speed of the faster baseline"
        out.append(f"{stage} {same[0]['op']} b{block} at {ratio} / best of {len(same)}: {best} {times[best]:.3f} ms{against}; {beside}")
    return out or [f"{stage} / {NOT_MEASURED}"]


def _metadata(rows: Sequence[Row]) -> list[str]:
    out = []
    for r in rows:
        what = f"{r['N']}x{r['K']}" if r["scope"] == "layer" else f"model of {r['weights']} weights"
        rate = number(r, "tb_per_s")
        out.append(f"refresh {what} {r['dtype']} b{r['block']} {r['form']} / {1e3 * _ms(r):.0f} us, {r['launches']} launches, {rate:.2f} TB/s of weights")
    return out or [f"refresh / {NOT_MEASURED}"]


def _dropout(rows: Sequence[Row]) -> list[str]:
    """For each size and p how much faster the kernels are than each of the others, and from which p on they are than the dense layer."""
    out = []
    for size in dict.fromkeys((r["M"], r["N"], r["K"]) for r in rows):
        times = {(r["provider"], r["p"]): _ms(r) for r in rows if (r["M"], r["N"], r["K"]) == size}
        ours = {p: ms for (provider, p), ms in times.items() if provider == "fxmask_triton"}
        dense, name, won = times.get(("dense", "0")), f"{size[0]}x{size[2]}->{size[1]}", list[str]()
        for p in sorted(ours, key=float):  # a row that was measured again stands at a csv's end
            own = ours[p]
            others = {"dense": dense, **{n: times.get((n, p)) for n in ("dropout_linear", "masked_dense")}}
            beside = ", ".join(f"{t / own:.2f}x the speed of {n}" for n, t in others.items() if t)
            won = [*won, p] if dense and own < dense else []
            out.append(f"dropout {name} p = {p} / {own:.4f} ms, {beside or 'nothing beside it'}")
        if dense and ours:
            out.append(f"dropout {name} faster than dense from p = 0.05 on / {f'from {won[0]} on' if won else 'not at the highest p'}")
    return out or [f"dropout / {NOT_MEASURED}"]


def _speeds(dense: float | None, times: Mapping[str, float]) -> str:
    """How fast each is beside the dense product, which has to be measured, too."""
    return ", ".join(f"{name} {dense / ms:.2f}x" for name, ms in times.items() if dense and ms) or NOT_MEASURED


def _pruning(rows: Sequence[Row]) -> list[str]:
    """For each output, dtype and block the speed of the pruned product, list included, beside that of the one with the whole input, at each ratio."""
    dense = {(r["N"], r["dtype"]): _ms(r) for r in rows if r["form"] == "dense"}
    ours = [r for r in rows if r["form"] == "triton" and float(r["w_ratio"]) == 0]
    out = []
    for n, dtype, block in dict.fromkeys((r["N"], r["dtype"], r["block"]) for r in ours):
        times = {float(r["ratio"]): _ms(r) for r in ours if (r["N"], r["dtype"], r["block"]) == (n, dtype, block)}
        seen = _speeds(dense.get((n, dtype)), {f"{ratio:g}:": ms for ratio, ms in sorted(times.items())})
        out.append(f"dW of a pruned input, D = {n}, {dtype}, b = {block} / speed of the dense product's at {seen}")
    return out or [f"dW of a pruned input / {NOT_MEASURED}"]


def _nm(rows: Sequence[Row]) -> list[str]:
    """Of each size the speed of 2:4 masks, and of the hardware's form, beside the dense layer."""
    out = []
    for op, *size in dict.fromkeys((r["op"], r["M"], r["N"], r["K"]) for r in rows):
        times = {r["provider"]: _ms(r) for r in rows if [r["op"], r["M"], r["N"], r["K"]] == [op, *size]}
        dense = times.pop("dense", None)
        out.append(f"2:4 {op} {size[0]}x{size[2]}->{size[1]} / speed of the dense layer's: {_speeds(dense, times)}")
    return out or [f"2:4 / {NOT_MEASURED}"]


def finding_lines(found: Mapping[str, Sequence[Row]]) -> list[str]:
    """What was found, a line each, losing choices left out: the csv has them."""
    lines = _bandwidth(found["bandwidth"]) + _tensorcore(found["tensorcore"])
    for stage in sweeps.OPS:
        lines += _sweep(stage, found[stage])
    return lines + _metadata(found["metadata"]) + _dropout(found["dropout"]) + _pruning(found["pruning"]) + _nm(found["nm"])
