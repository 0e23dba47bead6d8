"""Forward and backward of a linear behind dropout, against p: figures 3a and 3b of SparseDrop, on a CPU or a GPU.

    python examples/benchmarks/block_dropout.py --threads 1 --csv examples/results/cpu/block_dropout.csv

| contender | |
| --- | --- |
| dense | the linear alone |
| dropout + linear | F.dropout, then F.linear |
| block dropout + linear | a mask of blocks, multiplied in, then F.linear |
| fused | fxmask.BlockDropout; `fused, triton` and so on where `--impl` asks for one |
| mask of fused | what of that is spent on drawing the mask |

All take turns in one run, in an order that changes; medians. On one CPU thread process time, on more wall time, on CUDA events. GFLOP/s count the dense
products, so that what is skipped shows as speed. Rows of all p are printed, losing ones too.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn

import fxmask
from fxmask.bench.clock import load_average
from fxmask.bench.provenance import provenance, utc
from fxmask.bench.stopwatch import Stopwatch
from fxmask.kernels import draw_ops, dropout
from fxmask.kernels.dispatch import IMPLEMENTATIONS

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # beside the other examples, from whatever folder it is started
from checked_arguments import check_numbers
from thesis.side_by_side import exit_code

from benchmarks import checked

MEASURED = ("p", "contender", "ms", "gflops_dense_equivalent", "x_dense", "x_dropout", "load", "utc")
RATES = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


MASK = "mask of fused"


def name_of(a: argparse.Namespace) -> str:
    return "fused" if a.impl == "auto" else f"fused, {a.impl}"


def contenders(a: argparse.Namespace, p: float) -> dict[str, Callable[[], None]]:
    """Calls that run forward and backward once."""
    dtype = getattr(torch, a.dtype)
    torch.manual_seed(0)
    linear = nn.Linear(a.features, a.features, device=a.device, dtype=dtype)
    fused = fxmask.apply(nn.Sequential(linear), fxmask.BlockDropout(p, (a.block, a.block), impl=a.impl), exclude=())
    x = torch.randn(a.tokens, a.features, device=a.device, dtype=dtype, requires_grad=True)
    gy = torch.randn(a.tokens, a.features, device=a.device, dtype=dtype)

    def run(forward: Callable[[], Tensor]) -> Callable[[], None]:
        def call() -> None:
            x.grad = linear.weight.grad = linear.bias.grad = None
            forward().backward(gy)

        return call

    def blocks() -> Tensor:
        keep = dropout.draw(a.tokens, a.features, (a.block, a.block), p, torch.randint(2**62, (), device=a.device))
        return F.linear(dropout.drop(x, keep, (a.block, a.block), p), linear.weight, linear.bias)

    return {
        "dense": run(lambda: F.linear(x, linear.weight, linear.bias)),
        "dropout + linear": run(lambda: F.linear(F.dropout(x, p), linear.weight, linear.bias)),
        "block dropout + linear": run(blocks),
        name_of(a): run(lambda: fused(x)),
        MASK: lambda: (draw_ops.mask(x, (a.block, a.block), p, a.impl), None)[1],
    }


def medians(watch: Stopwatch, calls: dict[str, Callable[[], None]], repeats: int) -> dict[str, float]:
    """Milliseconds of each call, timed in turns of shuffled order, of which the first two warm up."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(repeats + 2):
        for name in random.Random(turn).sample(list(calls), len(calls)):
            times[name].append(watch(calls[name]))
    return {name: 1e3 * statistics.median(t[2:]) for name, t in times.items()}


def main(argv: list[str] | None = None) -> int:
    """0, or 2 for a use that cannot be measured."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--tokens", type=int, default=1024)
    p.add_argument("--features", type=int, default=1024)
    p.add_argument("--block", type=int, default=128)
    p.add_argument("--rates", type=float, nargs="+", default=list(RATES))
    p.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    p.add_argument("--impl", choices=IMPLEMENTATIONS, default="auto")
    p.add_argument("--repeats", type=int, default=15)
    p.add_argument("--threads", type=int)
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--csv", type=Path, help="append rows there")
    a = p.parse_args(argv)
    check_numbers(p, a)
    return exit_code("block_dropout.py", lambda: run(a))


def run(a: argparse.Namespace) -> None:
    """Measure, print, append. ConfigError for what cannot be measured."""
    for rate in a.rates:
        fxmask.BlockDropout(rate, (a.block, a.block), impl=a.impl)
    if a.threads:
        torch.set_num_threads(a.threads)
    device = checked.device_here(a.device)
    watch, shared, rows = Stopwatch(device), provenance(device), []
    settings = {k: v for k, v in vars(a).items() if k not in ("csv", "rates", "threads", "impl", "device")}  # threads and device are in `shared`
    columns = [*shared, *settings, *MEASURED]
    checked.table("--csv", a.csv, columns)
    flop, shares = 6 * a.tokens * a.features**2, []
    for rate in a.rates:
        ms = medians(watch, contenders(a, rate), a.repeats)
        for name, t in ms.items():
            speed = (f"{flop / t / 1e6:.4g}", f"{ms['dense'] / t:.3g}", f"{ms['dropout + linear'] / t:.3g}") if name != MASK else ("", "", "")
            rows.append(dict(zip(MEASURED, (rate, name, f"{t:.4g}", *speed, load_average(), utc()), strict=True)))
        shares.append(ms[MASK] / ms[name_of(a)])
    print(tabulate([{k: v for k, v in r.items() if k not in ("load", "utc")} for r in rows], headers="keys"))
    won = [r for r in a.rates if all(float(x["x_dropout"]) > 1 for x in rows if x["contender"] == name_of(a) and x["p"] >= r)]
    print(f"fused is faster than dropout + linear from p = {won[0]:g} on" if won else "fused is not faster than dropout + linear at the highest p")
    print(f"its mask takes {100 * min(shares):.2g} to {100 * max(shares):.2g} % of it")
    if a.csv is not None:
        checked.append(a.csv, columns, ({**shared, **settings, **r} for r in rows))


if __name__ == "__main__":
    sys.exit(main())
