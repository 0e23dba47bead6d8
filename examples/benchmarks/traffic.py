"""Bytes that a masked layer's products move on a GPU, by hardware counters, beside the closed forms: is the memory traffic really less?

    METRICS=dram__bytes_read.sum,dram__bytes_write.sum,lts__t_sectors_srcunit_tex.sum,gpu__time_duration.sum
    ncu --csv --page raw --nvtx --profile-from-start off --metrics $METRICS --log-file traffic.ncu.csv python examples/benchmarks/traffic.py run
    python examples/benchmarks/traffic.py table traffic.ncu.csv       # traffic.csv and the table; needs no GPU

Where clocks are not yours to lock: ncu --clock-control none.

`run` launches each product once inside of an NVTX range and notes what the closed forms of `fxmask.kernels` say; `table` joins both. Of dense and masked-dense,
which are a library's kernels, only the compulsory bytes are known. Lists and masks are given, as in the benchmark; zeros that torch writes by memset are no
kernel, and ncu does not see them.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
from tabulate import tabulate

from fxmask.analysis.ncu import read_ncu_csv, sum_by_range
from fxmask.bench import providers
from fxmask.bench.cells import Cell, parse_shape
from fxmask.bench.costs import cost_of
from fxmask.bench.inputs import make_inputs
from fxmask.bench.provenance import provenance
from fxmask.bench.table import text
from fxmask.errors import ConfigError

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # beside the other examples, from whatever folder it is started
from thesis import csv_files
from thesis.side_by_side import check_folder, exit_code

from benchmarks import checked

NAMES = ("op", "shape", "provider", "block", "ratio")
MEASURED = ("l2_bytes", "dram_bytes", "time_us")
COLUMNS = (*NAMES, "bytes_req", "bytes_min", *MEASURED, "l2_of_req", "l2_of_dense", "kernels")
CELLS = "traffic.cells.json"


def cells(device: torch.device, shapes: list[str]) -> list[Cell]:
    """Forward, dX and dW of a layer: dense, and masked in blocks of 128, 64 and 32."""
    found: dict[Cell, None] = {}
    dtype = "bf16" if device.type == "cuda" else "fp32"
    ours = "fxmask_triton" if device.type == "cuda" else "fxmask_reference"
    for shape in shapes:
        m, n, k = parse_shape(shape)
        for op, phase in (("forward", "forward"), ("dx", "backward"), ("dw", "backward")):
            for block in (128, 64, 32):
                for ratio in (0.5, 0.8, 0.9):
                    cell = Cell(op, phase, m, n, k, dtype, (block, block), ratio, "random", 0, ours)
                    found |= dict.fromkeys((cell.dense(), cell))
                    if (block, ratio) == (128, 0.8):
                        found[cell.by("masked_dense")] = None
    return list(found)


def run(a: argparse.Namespace) -> None:
    """Launch every cell once, between cudaProfilerStart and Stop."""
    device = checked.device_here(a.device)
    cuda, noted = device.type == "cuda", []
    for i, cell in enumerate(cells(device, a.shapes)):
        inputs = make_inputs(cell, device)
        call = providers.REGISTRY[cell.provider](inputs)
        call()  # compiles, and makes what is not counted
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.profiler.start()
            torch.cuda.nvtx.range_push(f"cell-{i}")
        call()
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.nvtx.range_pop()
            torch.cuda.profiler.stop()
        block = f"{cell.block[0]}x{cell.block[1]}" if cell.block[0] else ""
        names = dict(zip(NAMES, (cell.op, cell.shape, cell.provider, block, f"{cell.ratio:g}"), strict=True))
        noted.append({**names, **cost_of(inputs)})
    a.out.mkdir(parents=True, exist_ok=True)
    (a.out / CELLS).write_text(json.dumps({"provenance": provenance(device), "cells": noted}, indent=1) + "\n", encoding="utf-8")
    print(f"{len(noted)} cells: {a.out / CELLS}")


def table(a: argparse.Namespace) -> list[dict[str, str]]:
    """Rows of the cells with what was measured, and their shares."""
    try:
        noted = json.loads((a.out / CELLS).read_text(encoding="utf-8"))
        where, found = noted["provenance"], noted["cells"]
    except (ValueError, KeyError, TypeError) as error:
        what = f"expected what `traffic.py run` writes, got {type(error).__name__}: {error}"
        raise ConfigError(f"{a.out / CELLS}: {what}.\n  fix: run it again, and ncu with it.") from None
    ranges, rows = sum_by_range(read_ncu_csv(a.ncu)), []
    for i, cell in enumerate(found):
        seen = ranges.get(f"cell-{i}")
        if seen is None:
            raise ConfigError(f"{a.ncu}: expected an NVTX range cell-{i} for each of {len(found)} cells, got {len(ranges)} ranges. Was ncu run with --nvtx?")
        both = seen["dram_read_bytes"], seen["dram_write_bytes"]
        row = {**cell, "l2_bytes": seen["l2_bytes"], "dram_bytes": None if None in both else sum(both), "time_us": seen["time_us"]}
        row["kernels"] = " ".join(k.split("(")[0][:40] for k in seen["kernels"])
        rows.append(row)
    dense = {(r["op"], r["shape"]): r["l2_bytes"] for r in rows if r["provider"] == "dense"}
    for row in rows:
        asked, whole = row.get("bytes_req"), dense.get((row["op"], row["shape"]))
        row["l2_of_req"] = row["l2_bytes"] / asked if asked and row["l2_bytes"] else None
        row["l2_of_dense"] = row["l2_bytes"] / whole if whole and row["l2_bytes"] else None
    written = [{**where, **{c: text(row.get(c)) for c in COLUMNS}} for row in rows]
    csv_files.write(a.out / "traffic.csv", [*where, *COLUMNS], written, "\n")
    shown = [
        [row[c] for c in NAMES] + [_mb(row.get(c)) for c in ("bytes_req", "l2_bytes", "bytes_min", "dram_bytes")] + [row["l2_of_req"], row["l2_of_dense"]]
        for row in rows
    ]
    heads = [*NAMES, "L2 asked, closed form", "L2 asked, measured", "compulsory", "DRAM, measured", "measured / closed form", "of dense"]
    print(f"{where['device']}, torch {where['torch']}, Triton {where['triton']}; MB (10^6)\n")
    print(tabulate(shown, heads, tablefmt="github", floatfmt=".2f", missingval=""))
    return written


def _mb(size: float | None) -> float | None:
    return None if size is None else round(size / 1e6, 1)


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sub = p.add_subparsers(dest="what", required=True)
    r = sub.add_parser("run")
    r.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    r.add_argument("--shapes", nargs="+", default=["8192x4096->4096"], metavar="TOKENSxIN->OUT")
    t = sub.add_parser("table")
    t.add_argument("ncu", type=Path, metavar="NCU.csv")
    for q in (r, t):
        q.add_argument("--out", type=Path, default=Path("bench-output"))
    a = p.parse_args(argv)
    if a.what == "run":
        check_folder(r, "--out", a.out)
        return exit_code("traffic.py", lambda: run(a))
    for path, maker in ((a.out / CELLS, "traffic.py run"), (a.ncu, "ncu --csv")):
        if not path.is_file():
            t.error(f"expected what `{maker}` writes, got {path}, which is no file")
    return exit_code("traffic.py", lambda: table(a))


if __name__ == "__main__":
    sys.exit(main())
