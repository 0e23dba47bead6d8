"""Every tile of the matmuls that may be worth it, at three layers, in seconds: what `fxmask.kernels.triton.tiles` and `lists.strip_of` choose by.

    python examples/benchmarks/tile_scan.py --csv bench-output/tile_scan.csv            # needs a GPU; some 400 kernels are compiled in 16 threads, then timed
    python examples/benchmarks/tile_scan.py --show bench-output/tile_scan.csv           # the fastest of each case, beside the library's own choice

Coarser than `make gpu`'s stages `tiles` and `splits`, which have the benchmark's gate, percentiles and baselines: a case here is the median of five replays of
four launches, checked against PyTorch in the same precision (`err`, relative, in the Frobenius norm). Lists are given, in strips as wide as the tile's.
"""

from __future__ import annotations

import argparse
import csv
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch
from tabulate import tabulate
from torch import Tensor

from fxmask.bench.inputs import make_mask, operands
from fxmask.bench.provenance import provenance
from fxmask.bench.sweeps import tile_name
from fxmask.errors import ConfigError
from fxmask.kernels import reference
from fxmask.kernels.grid import grid_shape
from fxmask.kernels.triton import launch, refresh, tiles
from fxmask.kernels.triton.tiles import Tile

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # beside the other examples, from whatever folder it is started
from thesis.csv_files import numbers, read
from thesis.side_by_side import exit_code

SHAPES = {"8192x4096->4096": (8192, 4096, 4096), "25088x384->1536": (25088, 1536, 384), "25088x1536->384": (25088, 384, 1536)}  # (M, N, K)
BLOCKS, RATIOS, THREADS = (128, 64, 32, 16), (0.8, 0.9, 0.5), 16
COLUMNS = ("shape", "op", "block", "ratio", "tile", "features", "splits", "ms", "err")


class Case(NamedTuple):
    """`features` and `splits`: of dW."""

    shape: str
    op: str
    block: int
    ratio: float
    tile: Tile
    features: int = 0
    splits: int = 0


def products(block: int) -> list[Tile]:
    """Tiles of forward and dX: tokens x strip x step, warps, stages, TMA."""
    found = [Tile(128, 128, 64, 8, 3), Tile(128, 128, 64, 8, 4), Tile(128, 128, 64, 4, 3), Tile(256, 128, 64, 8, 3), Tile(256, 128, 64, 8, 4)]
    if block == 128:
        found += [Tile(128, 128, 64, 8, 4, True), Tile(256, 128, 64, 8, 3, True), Tile(256, 128, 64, 8, 4, True)]
    else:
        found += [Tile(256, 64, 64, 8, 3), Tile(256, 64, 64, 8, 4), Tile(256, 64, 64, 4, 4), Tile(128, 64, 64, 4, 4)]
    if block == 64:
        found += [Tile(256, 64, 64, 8, 4, True), Tile(256, 64, 64, 4, 4, True), Tile(128, 64, 64, 4, 4, True)]
    return found


def cases() -> Iterator[Case]:
    for shape, block, ratio in product(SHAPES, BLOCKS, RATIOS):
        yield from (Case(shape, op, block, ratio, t) for op in ("forward", "dx") for t in products(block))
        strips, shares = (128,) if block == 128 else (128, 64), (1, 2, 4) if shape.startswith("8192") else (4, 8, 16)
        for strip, features, stages, splits in product(strips, (128, 256), (3, 4), shares):
            yield Case(shape, "dw", block, ratio, Tile(128, strip, 64, 8, stages), features, splits)


class Scan:
    """Operands, masks and lists, each made once."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.masks: dict[tuple[object, ...], tuple[Tensor, Tensor]] = {}
        self.wanted: tuple[tuple[object, ...], Tensor] | None = None

    def mask(self, c: Case) -> tuple[Tensor, Tensor]:
        key = c.shape, c.block, c.ratio, c.tile.strip
        if key not in self.masks:
            _, n, k = SHAPES[c.shape]
            mask = make_mask(grid_shape((n, k), (c.block, c.block)), c.ratio, "random", 0).to(self.device)
            self.masks[key] = mask, refresh.strip_lists(mask, (c.block, c.block), c.tile.strip)
        return self.masks[key]

    def call(self, c: Case) -> Callable[[], Tensor]:
        (x, w, gy), (mask, lists), block = operands(SHAPES[c.shape], "bf16", self.device), self.mask(c), (c.block, c.block)
        if c.op == "dw":
            return lambda: launch.sampled_matmul(gy, x, mask, block, splits=c.splits, lists=lists, tile=c.tile, features=c.features)
        t, transposed = (x, False) if c.op == "forward" else (gy, True)
        return lambda: launch.list_matmul(t, w, None, mask, block, transposed=transposed, lists=lists, tile=c.tile)

    def expected(self, c: Case) -> Tensor:
        if self.wanted is None or self.wanted[0] != c[:4]:
            (x, w, gy), mask, block = operands(SHAPES[c.shape], "bf16", self.device), self.mask(c)[0], (c.block, c.block)
            kept = reference.masked(w, mask, block)
            made = x @ kept.t() if c.op == "forward" else gy @ kept if c.op == "dx" else reference.masked(gy.t() @ x, mask, block)
            self.wanted = c[:4], made.float()
        return self.wanted[1]

    def compile(self, c: Case) -> None:
        with torch.cuda.stream(torch.cuda.Stream(self.device)):
            self.call(c)()
            torch.cuda.current_stream().synchronize()

    def row(self, c: Case) -> tuple[object, ...]:
        call, wanted = self.call(c), self.expected(c)
        error = float((call().float() - wanted).norm() / wanted.norm())
        return (*c[:4], tile_name(c.tile), c.features or "", c.splits or "", f"{median_ms(call):.5g}", f"{error:.1e}")


def median_ms(call: Callable[[], object], launches: int = 4, replays: int = 5) -> float:
    """Of replays of a CUDA graph."""
    call()
    torch.cuda.synchronize()
    graph, times = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        for _ in range(launches):
            call()
    graph.replay()
    for _ in range(replays):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        times.append((begin, end))
    torch.cuda.synchronize()
    return sorted(a.elapsed_time(b) / launches for a, b in times)[replays // 2]


def measure(path: Path) -> None:
    if not torch.cuda.is_available():
        raise ConfigError(f"expected a CUDA device, got none (torch {torch.__version__}).")
    scan, todo, begin = Scan(torch.device("cuda", torch.cuda.current_device())), list(cases()), time.perf_counter()
    for c in todo:
        scan.mask(c)
    torch.cuda.synchronize()
    kernels = {(c.shape, c.op, c.block, c.tile, c.features, c.splits > 1): c for c in todo}
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(scan.compile, kernels.values()))
    print(f"{len(kernels)} kernels compiled in {time.perf_counter() - begin:.0f} s", flush=True)
    where = provenance(scan.device)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as f:
        writer = csv.writer(f, lineterminator="\n")
        writer.writerow([*where, *COLUMNS])
        for shape, (m, n, k) in SHAPES.items():
            x, w, gy = operands((m, n, k), "bf16", scan.device)
            for op, call in {"forward": lambda x=x, w=w: x @ w.t(), "dx": lambda gy=gy, w=w: gy @ w, "dw": lambda gy=gy, x=x: gy.t() @ x}.items():
                writer.writerow([*where.values(), shape, op, "", "", "dense", "", "", f"{median_ms(call):.5g}", ""])
        for c in todo:
            writer.writerow([*where.values(), *scan.row(c)])
    print(f"{len(todo)} cases in {time.perf_counter() - begin:.0f} s: {path}")


def show(path: Path) -> None:
    rows = numbers(path, read(path, COLUMNS[:-1]), "ms", above=0)
    if not rows:
        raise ConfigError(f"{path}: expected a csv that --csv has written, got no rows.")
    dense = {(r["shape"], r["op"]): float(r["ms"]) for r in rows if r["tile"] == "dense"}
    groups: dict[tuple[str, ...], list[dict[str, str]]] = {}
    for r in rows:
        if r["tile"] != "dense":
            groups.setdefault((r["shape"], r["op"], r["block"], r["ratio"]), []).append(r)
    table = []
    for (shape, op, block, ratio), found in groups.items():
        best, (m, n, k), side = min(found, key=lambda r: float(r["ms"])), SHAPES[shape], (int(block), int(block))
        if op == "dw":
            own, features = tiles.best_dw_tile(torch.bfloat16, side, k)
            splits = tiles.splits_of(m, -(-n // own.strip) * -(-k // features))
        else:
            own, features, splits = tiles.best_tile(torch.bfloat16, side, op == "dx", (m, *((k, n) if op == "dx" else (n, k)))), 0, 0
        name = tile_name(own)
        alike = [r for r in found if r["tile"] == name and int(r["features"] or 0) == features]
        nearest = min(alike, key=lambda r: abs(int(r["splits"] or 0) - splits), default=None)  # not every number of shares was scanned
        ours = float(nearest["ms"]) if nearest else None
        more = f" {best['features']}/{best['splits']}" if op == "dw" else ""
        base = dense[shape, op]
        table.append([shape, op, block, ratio, best["tile"] + more, base / float(best["ms"]), name, base / ours if ours else None])
    print(tabulate(table, ["layer", "op", "block", "ratio", "fastest (features/splits)", "x dense", "own", "x dense"], floatfmt=".2f", missingval="-"))


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--csv", type=Path, default=Path("bench-output/tile_scan.csv"))
    p.add_argument("--show", type=Path, metavar="CSV")
    a = p.parse_args(argv)
    if a.show and not a.show.is_file():
        p.error(f"--show: expected a csv that --csv has written, got {a.show}, which is no file")
    try:
        return exit_code("tile_scan.py", lambda: show(a.show) if a.show else measure(a.csv))
    except (KeyError, ValueError) as error:
        if not a.show:
            raise
        p.error(f"--show: expected a csv that --csv has written, got {a.show}, where a row lacks or spoils {error}")


if __name__ == "__main__":
    sys.exit(main())
