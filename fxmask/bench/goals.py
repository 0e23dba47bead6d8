"""The project's goals for a GPU beside what a csv says: goal / measured / bound, a line each. What was not measured says so; a miss is printed, not hidden."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .compare import RATED, usable
from .summary import crossovers
from .table import Row, number

NOT_MEASURED = "not measured"
LLM, WIDE = ("8192", "4096", "4096"), ("8192", "14336", "4096")  # M, N, K
VIT_FC1, VIT_FC2 = ("25088", "1536", "384"), ("25088", "384", "1536")
RATIOS = ("0.5", "0.7", "0.8", "0.9")
FORWARD = {"128": (1.4, 2.3, 3.2, 5.5), "64": (1.0, 1.5, 2.1, 4.2), "32": (1.0, 1.0, 1.35, 2.5), "16": (1.0, 1.0, 1.0, 1.45)}
DW = {"128": (1.3, 1.8, 2.5, 4.2), "64": (1.0, 1.3, 1.8, 3.0)}
STEP = {"128": (1.3, 2.0, 2.8, 4.8), "64": (1.0, 1.4, 2.0, 3.7)}
CROSSOVER = {"128": 0.30, "64": 0.50, "32": 0.70, "16": 0.83}
REFRESH_US = {"128": 60, "64": 60, "32": 90, "16": 130}
LAUNCHES = 8
ERROR = 1.5
ROOF = 80
ROW_BYTES = {"32": 64, "16": 32}  # of a block in 16 bits; a step of the matmul takes 64 features, and so at most 128
ANCHORS = {"64": 1.3, "32": 2.0, "16": 2.0}


def _pick(rows: Sequence[Row], **wanted: str) -> list[Row]:
    return [r for r in rows if all(r[c] == v for c, v in wanted.items())]


def _at(rows: Sequence[Row], op: str, shape: tuple[str, str, str], block: str, ratio: str, provider: str = "fxmask_triton") -> Row | None:
    m, n, k = shape
    found = [r for r in _pick(rows, op=op, M=m, N=n, K=k, block_n=block, ratio=ratio, provider=provider, mask="random") if usable(r)]
    return found[-1] if found else None


def _mark(reached: bool) -> str:
    return "[+]" if reached else "[!]"


def bound(row: Row | None, ceilings: Mapping[str, float]) -> str:
    """Which of the measured ceilings is nearest: the tensor cores for what is issued, memory, or the L2 cache in rows of a block's width; and what the programs
    ask of the L2."""
    ms = number(row, "ms_p50") if row else None
    if row is None or not ms:
        return "-"
    flops, size, asked = (number(row, c) for c in ("flop_issued", "bytes_min", "bytes_req"))
    rate = ceilings.get(f"l2_bytes_per_s_{ROW_BYTES.get(row['block_k'], 128)}")
    l2 = f", L2 asked for {asked / ms / 1e9:.1f}{f' of {rate / 1e12:.1f}' if rate else ''} TB/s" if asked else ""
    if row["dtype"] not in RATED or not ceilings.get("flops_per_s") or not ceilings.get("bytes_per_s"):
        return f"ceilings not measured{l2}"
    parts = {"MMA": 1e3 * (flops or 0) / ceilings["flops_per_s"], "HBM": 1e3 * (size or 0) / ceilings["bytes_per_s"]}
    if rate and asked:
        parts["L2"] = 1e3 * asked / rate
    name = max(parts, key=lambda p: parts[p])
    return f"{name} {100 * parts[name] / ms:.0f} %{l2}"


def _factors(name: str, rows: Sequence[Row], op: str, shape: tuple[str, str, str], block: str, goal: Sequence[float], ceilings: Mapping[str, float]) -> str:
    """A goal that is a factor over the faster baseline at each ratio. A step's has the refresh of every tenth step in it."""
    found = [_at(rows, op, shape, block, r) for r in RATIOS]
    measured = []
    for row in found:
        x, own, with_refresh = (number(row, c) if row else None for c in ("x_best", "ms_p50", "ms_refresh_10"))
        if op == "step":
            x = x * own / with_refresh if x and own and with_refresh else None
        measured.append("-" if x is None else f"{x:.2f}")
    text = "/".join(measured) if any(m != "-" for m in measured) else NOT_MEASURED
    hit = "".join("-" if m == "-" else "+" if float(m) >= g else "!" for m, g in zip(measured, goal, strict=True))
    nearest = next((row for row in reversed(found) if row is not None), None)
    size = f"{shape[0]}x{shape[2]}->{shape[1]}"
    return f"{name} {op} {size} b{block} >= {'/'.join(f'{g:g}' for g in goal)} at 50/70/80/90 % / {text} [{hit}] / {bound(nearest, ceilings)}"


def _exact(rows: Sequence[Row], stages: Mapping[str, str]) -> list[str]:
    masks = [r for r in rows if r["op"] == "metadata" and r["provider"] == "fxmask_triton"]
    same = sum(r["gate"] == "pass" for r in masks)
    one = f"{same} of {len(masks)} masks and lists equal to the CPU's" if masks else NOT_MEASURED
    tests = {k: stages.get(k, NOT_MEASURED) for k in ("tests", "graphs")}
    pairs = [(number(r, "max_err"), number(r, "base_err"), r) for r in rows if r["provider"] == "fxmask_triton" and r["op"] != "metadata"]
    known = [(e / b, r) for e, b, r in pairs if e is not None and b]
    worst = max(known, key=lambda t: t[0], default=None)
    three = NOT_MEASURED
    if worst is not None:  # of one dtype, as all rows here: float32 is added up in one chain and TF32 cut off, see `bench.tolerance`
        place = f"in {worst[1]['dtype']}, worst {worst[1]['op']} b{worst[1]['block_n']}"
        three = f"{worst[0]:.2f}x over {len(known)} cells {place} {_mark(worst[0] <= ERROR)}"
    return [
        f"1 masks exact, equal to the CPU's to the bit / {one}; GPU tests: {tests['tests']} / -",
        f"2 no sync, one graph of forward, backward and refresh / GPU tests: {tests['graphs']} / -",
        f"3 error <= {ERROR}x that of masked-dense in the same dtype / {three} / -",
    ]


def _refresh(rows: Sequence[Row], refreshes: Sequence[Row], block: str) -> tuple[float | None, Row | None]:
    """Microseconds of a bfloat16 layer's refresh: measured as a whole, or else the sum of its two parts in the benchmark."""
    whole = _pick(refreshes, scope="layer", form="single", N="14336", K="4096", dtype="bf16", block=block)
    same = _pick(rows, op="metadata", provider="fxmask_triton", N="14336", K="4096", dtype="bf16", block_n=block)
    parts = [[r for r in same if r["phase"] == phase and usable(r)] for phase in ("block_index", "lists")]
    row = parts[0][-1] if parts[0] else None
    if whole:
        return 1e3 * (number(whole[-1], "ms_p50") or 0), row
    return (1e3 * sum(number(p[-1], "ms_p50") or 0 for p in parts), row) if all(parts) else (None, None)


def _metadata(rows: Sequence[Row], refreshes: Sequence[Row], ceilings: Mapping[str, float]) -> list[str]:
    out = []
    for block, goal in REFRESH_US.items():
        us, row = _refresh(rows, refreshes, block)
        seen = NOT_MEASURED if us is None else f"{us:.0f} us {_mark(us <= goal)}"
        out.append(f"4 refresh 14336x4096 bf16 b{block} <= {goal} us / {seen} / {bound(row, ceilings)}")
    groups = _pick(refreshes, scope="model", form="group")
    most = max((int(number(r, "launches") or 0) for r in groups), default=None)
    seen = NOT_MEASURED if most is None else f"{most} at most, over {len(groups)} groups {_mark(most <= LAUNCHES)}"
    out.append(f"4 refresh of a whole model <= {LAUNCHES} launches a dtype and block / {seen} / -")
    steps = [(number(r, "ms_p50"), number(r, "ms_refresh_10")) for r in _pick(rows, op="step", provider="fxmask_triton") if usable(r)]
    shares = [100 * (1 - step / both) for step, both in steps if step and both]
    seen = f"{max(shares):.1f} % at most, over {len(shares)} cells {_mark(max(shares) <= 3)}" if shares else NOT_MEASURED
    return [*out, f"4 refresh of every 10th step <= 3 % of the time of a layer's step / {seen} / -"]


def _memory_bound(rows: Sequence[Row], ceilings: Mapping[str, float]) -> list[str]:
    out = []
    for name, shape, goal in (("fc1", VIT_FC1, 1.8), ("fc2", VIT_FC2, 1.45)):
        for block in ("128", "64"):
            row = _at(rows, "forward", shape, block, "0.7")
            x, roof = (number(row, c) if row else None for c in ("x_best", "roof_pct"))
            hit = x is not None and x >= goal and roof is not None and roof >= ROOF
            seen = NOT_MEASURED if x is None else f"{x:.2f}x, {'?' if roof is None else f'{roof:.0f}'} % of the roof {_mark(hit)}"
            out.append(f"7 ViT {name} b{block} at 70 % >= {goal}x and {ROOF} % of the memory roof / {seen} / {bound(row, ceilings)}")
    return out


def _crossovers(rows: Sequence[Row]) -> list[str]:
    found = [c for c in crossovers(rows) if c["provider"] == "fxmask_triton" and c["op"] == "forward" and c["mask"] == "random"]
    out = []
    for block, goal in CROSSOVER.items():
        own = [c for c in found if c["block_n"] == block and (c["M"], c["N"], c["K"]) in (LLM, WIDE)]
        seen = ", ".join("never" if c["wins_from"] is None else f"from {c['wins_from']:g}" for c in own) or NOT_MEASURED
        out.append(f"8 crossover forward b{block} <= {100 * goal:.0f} % (ratios measured: 50 to 90 %) / {seen} / -")
    return out


def _floor(rows: Sequence[Row]) -> str:
    found = []
    for row in _pick(rows, provider="fxmask_auto"):
        base = _at(rows, row["op"], (row["M"], row["N"], row["K"]), row["block_n"], row["ratio"], "masked_dense")
        own, dense = number(row, "ms_p50"), number(base, "ms_p50") if base else None
        if own and dense and usable(row):
            found.append(own / dense)
    seen = f"{max(found):.2f}x its time at most, over {len(found)} cells {_mark(max(found) <= 1.03)}" if found else NOT_MEASURED
    return f"9 impl='auto' within 3 % of masked-dense / {seen} / -"


def _anchors(rows: Sequence[Row]) -> list[str]:
    goals = [("forward", b, g, ("torch_bsr", "torch_bsr_s4")) for b, g in ANCHORS.items()] + [("dw", b, 5.0, ("torch_sampled",)) for b in ("64", "32", "16")]
    out = []
    for op, block, goal, providers in goals:
        factors = []
        for row in _pick(rows, op=op, block_n=block, provider="fxmask_triton", mask="random"):
            others = [_at(rows, op, (row["M"], row["N"], row["K"]), block, row["ratio"], p) for p in providers]
            times = [t for t in (number(o, "ms_p50") if o else None for o in others) if t]
            own = number(row, "ms_p50")
            if own and times and usable(row):
                factors.append(min(times) / own)
        seen = f"{min(factors):.2f} to {max(factors):.2f}x over {len(factors)} cells {_mark(min(factors) >= goal)}" if factors else NOT_MEASURED
        out.append(f"10 {op} b{block} >= {goal}x torch's {providers[0].removeprefix('torch_')} (the faster setting) / {seen} / -")
    return out


def goal_lines(rows: Sequence[Row], stages: Mapping[str, str], ceilings: Mapping[str, float], refreshes: Sequence[Row] = ()) -> list[str]:
    """Goals 1 to 10, `+` reached, `!` missed, `-` not measured; `stages` are the GPU driver's statuses, `refreshes` the rows of its stage `metadata`."""
    out = _exact(rows, stages) + _metadata(rows, refreshes, ceilings)
    out += [_factors("5", rows, "forward", shape, b, g, ceilings) for shape in (LLM, WIDE) for b, g in FORWARD.items()]
    out += [_factors("6", rows, "dw", shape, b, g, ceilings) for shape in (LLM, WIDE) for b, g in DW.items()]
    out += [_factors("6", rows, "step", shape, b, g, ceilings) for shape in (LLM, WIDE) for b, g in STEP.items()]
    return out + _memory_bound(rows, ceilings) + _crossovers(rows) + [_floor(rows)] + _anchors(rows)
