"""`fxmask bench`: its options, and what they mean."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from .cells import ANCHORS, DTYPES, MASKS, PROVIDERS, make_cells
from .driver import CSV, Run, check_device, run_cells
from .summary import crossover_lines, crossovers, plot


def names(given: str) -> tuple[str, ...]:
    return tuple(n.strip() for n in given.split(",") if n.strip())


def add_options(p: argparse.ArgumentParser) -> None:
    p.add_argument("--quick", action="store_true", help="two shapes, blocks of 128 and 64, ratios 0.5, 0.8 and 0.9, random masks; on a CPU tiny shapes")
    p.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--dtype", choices=DTYPES, default=None, help="bf16 on cuda, fp32 on cpu")
    p.add_argument("--out", type=Path, default=Path("bench-output"), metavar="DIR", help=f"{CSV} is appended to there, and a second run goes on")
    p.add_argument("--time-limit", type=float, default=None, metavar="S", help="begin no cell that would not end within S seconds")
    p.add_argument("--cells", default="", metavar="GLOBS", help="e.g. 'forward/*/b64x64/*,metadata*'; --list shows what they are matched with")
    p.add_argument("--providers", default="", metavar="NAMES", help=", ".join(PROVIDERS))
    p.add_argument("--shapes", default="", metavar="SHAPES", help="other shapes, as tokens x in -> out: 8192x4096->4096")
    p.add_argument("--masks", default=",".join(MASKS), metavar="KINDS", help="random, rows")
    p.add_argument("--seed", type=int, default=0, help="of the data and the masks")
    p.add_argument("--sample-s", type=float, default=1.0, metavar="S", help="on a CPU: sample a cell for at most S seconds")
    p.add_argument("--plot", action="store_true", help="write crossover.png too (needs matplotlib)")
    p.add_argument("--list", action="store_true", help="print the cells and measure nothing")


def main(a: argparse.Namespace) -> int:
    dtype = a.dtype or ("bf16" if a.device == "cuda" else "fp32")
    kinds = tuple(k for k in MASKS if k in names(a.masks)) or MASKS
    cells = make_cells(a.device, dtype, a.quick, a.cells, names(a.providers), names(a.shapes), kinds, a.seed)
    if a.list:
        print("\n".join(c.name for c in cells))
        return 0
    run = Run(check_device(a.device), a.out, a.time_limit, a.sample_s)
    run_cells(run, cells)
    rows = [r for r in run.table.rows if all(r[c] == run.shared[c] for c in ("source", "device", "torch", "triton"))]
    print("\n".join(crossover_lines(rows)))
    refused = [r for r in rows if r["gate"] == "fail"]
    for r in refused:
        print(f"gate: {r['provider']} {r['op']} {r['M']}x{r['K']}->{r['N']} b{r['block_n']} r{r['ratio']} failed ({r['verdict']})")
    if a.plot and not crossovers(rows):
        print("nothing to plot yet")
    elif a.plot:
        print(f"wrote {plot(rows, a.out / 'crossover.png').name}")
    return 1 if any(r["provider"] not in ANCHORS for r in refused) else 0
