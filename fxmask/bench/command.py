"""`fxmask bench`: its options, and what they mean."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from ..analysis.plots import available
from ..errors import ConfigError
from ..places import place
from . import contenders, floor, interleaved, regret, systems
from .cells import ANCHORS, CPU_SHAPES, DTYPES, MASKS, PROVIDERS, Cell, make_cells, matching, names
from .driver import Run, check_device, run_cells
from .provenance import SAME, provenance
from .summary import crossover_lines, crossovers, plot
from .table import Row, Table, what


def add_options(p: argparse.ArgumentParser) -> None:
    of_steps = "whole steps on a CPU: one shape, blocks of 64, random masks"
    p.add_argument("--quick", action="store_true", help=f"two shapes, tiny on a CPU, blocks of 128, 64, ratios 0.5, 0.8 and 0.9, random masks; {of_steps}")
    p.add_argument("--system", choices=("weights", *systems.SYSTEMS), default="weights", help="what is timed beside the dense layer; default: weight masks")
    p.add_argument("--op-by-op", action="store_true", help="on a CPU: one op after the other, as on a GPU, instead of whole steps of all contenders in turns")
    p.add_argument("--dispatch", type=int, default=None, metavar="CASES", help="on a CPU: the choice beside every plan, over so many cases; 1 under 95 %%")
    p.add_argument("--floor", action="store_true", help="on a CPU: is auto anywhere slower than masked-dense, over a grid of layers; 1 where it is")
    p.add_argument("--threads", type=int, default=None, metavar="N", help="on a CPU: PyTorch's threads (default: as they are)")
    p.add_argument("--blocks", default="", metavar="SIZES", help="on a CPU: 64,32,16")
    p.add_argument("--ratios", default="", metavar="RATIOS", help="on a CPU: 0.5,0.7,0.8,0.9,0.95")
    p.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--dtype", choices=DTYPES, default=None, help="bf16 on cuda, fp32 on cpu")
    p.add_argument("--out", default="bench-output", metavar="DIR", help="a csv is appended to there, and a second run goes on")
    p.add_argument("--time-limit", type=float, default=None, metavar="S", help="begin no cell that would not end within S seconds")
    p.add_argument("--cells", default="", metavar="GLOBS", help="e.g. 'forward/*/b64x64/*,metadata*'; --list shows what they are matched with")
    p.add_argument("--providers", default="", metavar="NAMES", help=", ".join(PROVIDERS))
    p.add_argument("--shapes", default="", metavar="SHAPES", help="other shapes, as tokens x in -> out: 8192x4096->4096")
    p.add_argument("--masks", default="", metavar="KINDS", help="random, rows (default: both, with --quick random)")
    p.add_argument("--seed", type=int, default=0, help="of the data and the masks")
    p.add_argument("--sample-s", type=float, default=1.0, metavar="S", help="on a CPU: sample a cell for at most S seconds")
    p.add_argument("--plot", action="store_true", help="write a plot, too (needs matplotlib)")
    p.add_argument("--list", action="store_true", help="print the cells and measure nothing")


def main(a: argparse.Namespace) -> int:
    a.out = place(a.out, (), "--out")
    check(a)
    if a.plot:
        available()  # not after hours of measuring
    if a.system != "weights":
        return other_system(a)
    dtype = a.dtype or ("bf16" if a.device == "cuda" else "fp32")
    if a.device != "cpu" or a.op_by_op:
        return one_by_one(a, dtype)
    _set_threads(a.threads)
    return judged(a, dtype) if a.dispatch or a.floor else in_turns(a, dtype)


def one_by_one(a: argparse.Namespace, dtype: str) -> int:
    """One op after the other, as on a GPU."""
    of_steps = ("blocks", "ratios", "floor", "dispatch", *(OF_A_CPU if a.device == "cuda" else ()))
    _unused(a, of_steps, f"{'--op-by-op' if a.op_by_op else '--device cuda'}: its cells are fixed; expected --cells to choose among them")
    _set_threads(a.threads)
    cells = make_cells(a.device, dtype, a.quick, a.cells, names(a.providers), names(a.shapes), _kinds(a), a.seed)
    if a.list:
        print("\n".join(c.name for c in cells))
        return 0
    run = Run(check_device(a.device), a.out, a.time_limit, a.sample_s)
    run_cells(run, cells)
    rows = _shown(run.table, run.shared)
    refused = [r for r in rows if r["gate"] == "fail"]
    for r in refused:
        print(f"gate: {r['provider']} {r['op']} {r['M']}x{r['K']}->{r['N']} b{r['block_n']} r{r['ratio']} failed ({r['verdict']})")
    if a.plot:
        _drawn(rows, a.out / "crossover.png")
    return 1 if any(r["provider"] not in ANCHORS for r in refused) else 0


OF_A_CPU = ("threads", "sample_s")
OF_WEIGHTS = ("blocks", "ratios", "shapes", "providers", "dtype", "floor", "dispatch", "op_by_op", "plot", "masks", "seed")


def check(a: argparse.Namespace) -> None:
    """Numbers and names that cannot be meant are refused, not read as the default."""
    for name, least in (("dispatch", 1), ("threads", 1), ("sample_s", 0), ("time_limit", 0)):
        given = getattr(a, name)
        if given is not None and not given >= least:  # nan, too
            raise ConfigError(f"--{name.replace('_', '-')} {given}: expected at least {least}.")
    if abs(a.seed) >= 1 << 53:
        raise ConfigError(f"--seed {a.seed}: expected a number nearer to 0 than 2^53.")
    if a.dtype == "tf32" and a.device == "cpu":
        raise ConfigError("--dtype tf32 is a mode of GPUs: expected another dtype on a CPU.\n  fix: --dtype fp32, or --device cuda.")
    if set(names(a.masks)) - set(MASKS) or (a.masks and not names(a.masks)):
        raise ConfigError(f"--masks {a.masks!r}: expected some of {', '.join(MASKS)}, separated by commas.")


def _kinds(a: argparse.Namespace) -> tuple[str, ...]:
    """The kinds of masks that are asked for, in their own order."""
    return tuple(k for k in MASKS if k in names(a.masks))


def _unused(a: argparse.Namespace, options: Iterable[str], why: str) -> None:
    """A run that would not look at an option does not begin: hours later its rows would be those of another question."""
    defaults = argparse.ArgumentParser()
    add_options(defaults)
    given = ", ".join(f"--{name.replace('_', '-')}" for name in options if getattr(a, name) != defaults.get_default(name))
    if given:
        raise ConfigError(f"{why}, got {given}.\n  fix: leave it out.")


def other_system(a: argparse.Namespace) -> int:
    """Activation pruning, block dropout or N:M masks, at shapes of their own."""
    unused = (*OF_WEIGHTS, *(OF_A_CPU if a.device == "cuda" else ()))
    _unused(a, unused, f"--system {a.system}: its cells are fixed; expected --quick and --cells to choose among them")
    _set_threads(a.threads)
    cells = matching(systems.cells(a.system, a.device, a.quick), a.cells, systems.name_of)
    if a.list:
        print("\n".join(map(systems.name_of, cells)))
        return 0
    rows = systems.run(a.system, cells, check_device(a.device), a.out, a.time_limit, a.sample_s)
    print(systems.summary(a.system, rows))
    return 1 if any(r["gate"] == "fail" for r in rows) else 0


def _set_threads(threads: int | None) -> None:
    if threads is not None:
        torch.set_num_threads(threads)


def _numbers(given: str, option: str, kind: type, low: float, high: float) -> tuple[Any, ...]:
    wrong = ConfigError(f"{option} {given!r}: expected numbers of at least {low} and below {high:g}, separated by commas.")
    try:
        found = tuple(kind(n) for n in names(given))
    except ValueError:
        raise wrong from None
    if not all(low <= n < high for n in found):
        raise wrong
    return found


def _shown(table: Table, shared: Row) -> list[Row]:
    """Say who wins from where on. A csv may hold rows of other sources, machines, drivers or numbers of threads, too."""
    rows = [r for r in table.rows if all(r[c] == shared[c] for c in SAME)]
    print("\n".join(crossover_lines(rows)))
    return rows


def _drawn(rows: list[Row], path: Path) -> None:
    print(f"wrote {plot(rows, path).name}" if crossovers(rows) else "nothing to plot yet")


def in_turns(a: argparse.Namespace, dtype: str) -> int:
    """Whole steps on a CPU, all contenders in turns."""
    unknown = sorted(set(names(a.providers)) - set(contenders.KNOWN))
    if unknown:
        raise ConfigError(f"unknown provider: expected some of {', '.join(contenders.KNOWN)}, got {', '.join(unknown)}; others need --op-by-op.")
    blocks = _numbers(a.blocks, "--blocks", int, 1, 1 << 31) or interleaved.DEFAULT_BLOCKS[: 1 if a.quick else None]
    ratios = _numbers(a.ratios, "--ratios", float, 0, 1) or interleaved.RATIOS
    shapes = names(a.shapes) or (interleaved.TINY if a.quick else CPU_SHAPES)
    kinds = _kinds(a) or (MASKS[:1] if a.quick else MASKS)
    found: list[Cell] = list(dict.fromkeys(interleaved.cells(shapes, blocks, ratios, kinds, dtype, a.seed)))
    chosen = matching(found, a.cells, lambda c: c.group)
    if a.list:
        print("\n".join(c.group for c in chosen))
        return 0
    table = interleaved.run(chosen, a.out, a.sample_s, a.time_limit, names(a.providers) or contenders.CONTENDERS)
    rows = _shown(table, provenance(torch.device("cpu")))
    if a.plot:
        _drawn(rows, a.out / f"cpu-{torch.get_num_threads()}-threads.png")
    return 1 if any(r["gate"] == "fail" for r in rows) else 0


def judged(a: argparse.Namespace, dtype: str) -> int:
    """The choices of the dispatch beside every plan, or `auto` beside masked-dense: 1 where they are not good enough."""
    fixed = ("quick", "blocks", "ratios", "shapes", "providers", "masks", "plot", *(("floor",) if a.dispatch else ()))
    _unused(a, fixed, f"{'--dispatch draws its cells' if a.dispatch else '--floor: its cells are fixed'}; expected --cells to choose among them")
    grid = regret.draw(a.dispatch, dtype, a.seed) if a.dispatch else list(floor.cells(dtype, a.seed))
    grid = matching(grid, a.cells, lambda c: f"{c.group}/{c.phase}")
    if a.list:
        print("\n".join(f"{c.group}/{c.phase}" for c in grid))
        return 0
    shared = provenance(torch.device("cpu"))
    if a.dispatch:
        table = regret.run(grid, a.out, a.sample_s, a.time_limit)
        text, good = regret.summary(table.of({**shared, **what(c)} for c in grid))
    else:
        table = interleaved.run(grid, a.out, a.sample_s, a.time_limit, floor.CONTENDERS, csv=floor.CSV)
        text, good = floor.summary(table.of({**shared, **what(c.by(name))} for c in grid for name in floor.CONTENDERS))
    print(text)
    return 0 if good else 1
