"""One run over the cells: gate, time, write, next; then the crossovers."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ..errors import UnsupportedError
from ..kernels.errors import message
from . import compare, gate, providers
from .cells import ANCHORS, Cell
from .costs import cost_of
from .inputs import Inputs, make_inputs
from .provenance import utc
from .session import Session, words
from .table import Row, Table, text, what

CSV, CEILINGS = "bench.csv", "ceilings.json"


@dataclass
class Run(Session):
    """A run over the cells of one csv, and what it has found so far."""

    registry: Mapping[str, providers.Provider] = field(default_factory=lambda: providers.REGISTRY)
    costs: Callable[[Inputs], dict[str, int]] = cost_of
    csv: str = CSV

    def __post_init__(self) -> None:
        super().__post_init__()
        self.table = Table(self.out / self.csv)
        self.ceilings = read_ceilings(self.out) if self.device.type == "cuda" else {}  # a GPU's, whose run may have this folder, too
        self.inputs: Inputs | None = None


def read_ceilings(out: Path) -> dict[str, float]:
    """{"flops_per_s": ..., "bytes_per_s": ...} as the GPU driver measured them; empty where it did not, or, which is said, where the file is damaged."""
    try:
        return {k: float(v) for k, v in json.loads((out / CEILINGS).read_text(encoding="utf-8")).items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as error:  # no JSON, no numbers, no names
        what = f"expected a number for each name, got {type(error).__name__}: {error}; t_min_us and roof_pct stay empty"
        print(f"{out / CEILINGS}: {what}.\n  fix: remove it, or measure it anew by the stage ceilings of make gpu.", file=sys.stderr)
        return {}


def check_device(name: str) -> torch.device:
    """The device, present and usable; UnsupportedError otherwise."""
    if name == "cuda" and not torch.cuda.is_available():
        what = f"expected a CUDA device, got none (torch {torch.__version__})"
        raise UnsupportedError(message(what, "fxmask bench --device cuda", "run it on a machine with a GPU and a CUDA build of torch, or with --device cpu."))
    return torch.device("cuda", torch.cuda.current_device()) if name == "cuda" else torch.device(name)


def run_cells(run: Run, cells: list[Cell]) -> int:
    """Measure what the csv lacks, until the time limit; returns how many cells are left."""

    def done(cell: Cell, row: Row) -> None:
        run.table.append(row)
        times = " ".join(f"{c}={row[c]}" for c in ("ms_p50", "cold_ms_p50", "x_best") if row.get(c))
        run.say(f"{cell.name}  {row['gate']}  {times}")

    return run.over(run.lacking(cells, run.table, what), lambda cell: measure(run, cell), done)


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
    row = {**run.shared, "utc": utc(), **what(cell), "gate": "skip" if cell.provider in ANCHORS else "fail"}  # an anchor may not take a shape
    try:
        i = _inputs(run, cell)
        row |= what(cell, float(i.mask.float().mean()))
        row |= {k: text(v) for k, v in run.costs(i).items()}
        with torch.no_grad():
            call = run.registry[cell.provider](i)
            verdict = gate.check(i, call)
            row |= {"max_err": text(verdict.max_err), "base_err": text(verdict.base_err)}
            if not verdict.passed:
                return {**row, "gate": "fail", "verdict": f"none: {verdict.why}"}
            row["ran"] = providers.ran(i)
            _time(run, cell, call, row)
            row["gate"] = "pass"  # a call that raises while it is timed has failed, too
    except torch.cuda.OutOfMemoryError:
        run.inputs = None
        torch.cuda.empty_cache()
        return {**row, "gate": "skip", "verdict": "none: out of memory"}
    except Exception as e:  # the rows after it still count
        return {**row, "verdict": words(e)}
    return row


def _time(run: Run, cell: Cell, call: providers.Call, row: Row) -> None:
    row |= run.timed(call)
    if row["verdict"] != "ok":
        return
    compare.roof(run.ceilings, row)
    if cell.op != "metadata":
        compare.with_baselines(run.table.rows, cell, row)
        if cell.provider.startswith("fxmask"):
            compare.with_refreshes(run.table.rows, cell, row)
