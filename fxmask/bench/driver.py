"""One run over the cells: gate, time, write, next; then the crossovers."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ..errors import UnsupportedError
from ..kernels.errors import message
from . import clock, compare, gate, providers
from .cells import ANCHORS, Cell
from .costs import cost_of
from .inputs import Inputs, make_inputs
from .provenance import clocks, provenance, utc
from .table import BUSY, Row, Table, text, what

CSV, CEILINGS = "bench.csv", "ceilings.json"


@dataclass
class Run:
    """A run's settings and what it has found so far."""

    device: torch.device
    out: Path
    time_limit: float | None = None
    sample_s: float = 1.0  # CPU: at most this long a cell
    registry: Mapping[str, providers.Provider] = field(default_factory=lambda: providers.REGISTRY)
    load: Callable[[], float | None] = clock.load_average
    say: Callable[[str], None] = print
    samples: int = clock.SAMPLES

    def __post_init__(self) -> None:
        self.table = Table(self.out / CSV)
        self.shared = provenance(self.device)
        self.ceilings = read_ceilings(self.out)
        self.inputs: Inputs | None = None
        self.flush = clock.flush_buffer(self.device) if self.device.type == "cuda" else None


def read_ceilings(out: Path) -> dict[str, float]:
    """{"flops_per_s": ..., "bytes_per_s": ...} as the GPU driver measured them; empty where it did not."""
    try:
        return {k: float(v) for k, v in json.loads((out / CEILINGS).read_text(encoding="utf-8")).items()}
    except (OSError, ValueError):
        return {}


def check_device(name: str) -> torch.device:
    """The device, present and usable; UnsupportedError otherwise."""
    if name == "cuda" and not torch.cuda.is_available():
        what = f"expected a CUDA device, got none (torch {torch.__version__})"
        raise UnsupportedError(message(what, "fxmask bench --device cuda", "run it on a machine with a GPU and a CUDA build of torch, or with --device cpu."))
    return torch.device("cuda", torch.cuda.current_device()) if name == "cuda" else torch.device(name)


def run_cells(run: Run, cells: list[Cell]) -> int:
    """Measure what the csv lacks, until the time limit; returns how many cells are left."""
    begin, longest = time.monotonic(), 0.0
    todo = [c for c in cells if {**run.shared, **what(c)} not in run.table]
    if len(todo) < len(cells):
        run.say(f"{len(cells) - len(todo)} of {len(cells)} cells are in {CSV} already")
    for n, cell in enumerate(todo):
        start = time.monotonic()
        if run.time_limit is not None and start - begin + longest > run.time_limit:
            run.say(f"stopped by the time limit of {run.time_limit:g} s with {len(todo) - n} of {len(cells)} cells left; the same command goes on from here")
            return len(todo) - n
        row = measure(run, cell)
        run.table.append(row)
        run.say(line(row, cell))
        longest = max(0.9 * longest, time.monotonic() - start)
    return 0


def line(row: Row, cell: Cell) -> str:
    times = " ".join(f"{c}={row[c]}" for c in ("ms_p50", "cold_ms_p50", "x_best") if row.get(c))
    return f"{cell.name}  {row['gate']}  {times}"


def _inputs(run: Run, cell: Cell) -> Inputs:
    held = run.inputs
    if held is not None and cell.by("") == held.cell.by(""):
        held.cell = cell  # another provider of the same group: the same tensors
        return held
    run.inputs = None  # its memory first
    run.inputs = make_inputs(cell, run.device)
    return run.inputs


def measure(run: Run, cell: Cell) -> Row:
    """The row of one cell. A cell that fails, in any way, is a row too, with no time."""
    torch.backends.cuda.matmul.allow_tf32 = cell.dtype == "tf32"
    row = {**run.shared, "utc": utc(), **what(cell), "gate": "fail"}
    try:
        i = _inputs(run, cell)
        row |= what(cell, float(i.mask.float().mean()))
        row |= {k: text(v) for k, v in cost_of(i).items()}
        with torch.no_grad():
            call = run.registry[cell.provider](i)
            verdict = gate.check(i, call)
            row |= {"max_err": text(verdict.max_err), "base_err": text(verdict.base_err)}
            if not verdict.passed:
                return {**row, "gate": "fail", "verdict": f"none: {verdict.why}"}
            row["gate"] = "pass"
            _time(run, cell, call, row)
    except torch.cuda.OutOfMemoryError:
        run.inputs = None
        torch.cuda.empty_cache()
        return {**row, "gate": "skip", "verdict": "none: out of memory"}
    except Exception as e:  # an anchor may not take a shape; the rows after it still count
        words = f"none: {type(e).__name__}: {e}".split("\n")[0][:160]
        gate_says = row["gate"] if row["gate"] == "pass" else "skip" if cell.provider in ANCHORS else "fail"
        return {**row, "gate": gate_says, "verdict": words}
    return row


def _time(run: Run, cell: Cell, call: providers.Call, row: Row) -> None:
    before, load = clocks(run.device), run.load()
    if run.flush is not None:
        times = clock.time_cuda(call, run.flush, run.samples)
    else:
        times = clock.time_cpu(call, run.sample_s)
    after, cores = clocks(run.device), os.cpu_count() or 1
    row |= before | {"sm_clock_mhz_after": after["sm_clock_mhz"], "temperature_c_after": after["temperature_c"], "load": text(load), "how": times.how}
    for prefix, values in (("", times.warm), ("cold_", times.cold)):
        if values is not None:
            row |= {f"{prefix}ms_{p}": text(v) for p, v in zip(("p10", "p50", "p90"), values, strict=True)}
    row["cpu_ms_p50"] = text(times.cpu)
    if run.flush is None and load is not None and load > cores:
        row["verdict"] = f"{BUSY} {load:.1f} on {cores} cores"
        return
    row["verdict"] = "ok"
    compare.roof(run.ceilings, row)
    if cell.op != "metadata":
        compare.with_baselines(run.table.rows, cell, row)
        if cell.provider.startswith("fxmask"):
            compare.with_refreshes(run.table.rows, cell, row, cell.provider == "fxmask_triton" and bool(providers.builds_lists(call)))
