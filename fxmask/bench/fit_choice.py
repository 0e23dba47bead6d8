"""Constants of `kernels.gpu_choice` from a recorded benchmark: `python -m fxmask.bench.fit_choice examples/results/h200/bench.csv` prints them.

Least squares of relative errors, none below zero. The choice is of whole steps; the fit is of their parts, so that other backward modes can be told, too.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from ..kernels import gpu_choice
from . import table
from .cells import products
from .compare import RATED, usable
from .provenance import SAME

STEPS = 3.0  # weight of a whole step's error, which is what the choice is of
PROVIDERS = {"triton": "fxmask_triton", "masked_dense": "masked_dense"}


def read(path: str) -> list[dict[str, str]]:
    """Rows of a benchmark in 16 bits that passed their gate and have a time, of the sources and the GPU that were measured last."""
    rows = [r for r in table.read(Path(path)) if r["dtype"] in RATED and not r["threads"]]  # a CPU's may stand behind them
    return [r for r in rows if all(r[c] == rows[-1][c] for c in SAME) and usable(r) and r["ms_p50"]]


def sizes(r: dict[str, str]) -> tuple[int, tuple[int, int], tuple[int, int], float]:
    """Tokens, shape, block and density of a row."""
    return int(r["M"]), (int(r["N"]), int(r["K"])), (int(r["block_n"]), int(r["block_k"])), float(r["density"])


def least(a: torch.Tensor, y: torch.Tensor) -> list[float]:
    """Non-negative x with a x near y: columns whose part would be negative are left out, the worst one first."""
    scale, left = a.abs().amax(0), list(range(a.shape[1]))
    while True:
        x = torch.linalg.lstsq((a / scale)[:, left], y[:, None]).solution[:, 0]
        if bool((x >= 0).all()):
            return [float(x[left.index(i)] / scale[i]) if i in left else 0.0 for i in range(a.shape[1])]
        left.pop(int(x.argmin()))


def fit(rows: Iterable[dict[str, str]]) -> dict[tuple[str, str], tuple[float, ...]]:
    """`gpu_choice.SECONDS` of the rows: of forward, dX and dW alone, and of the three together, which count more."""
    found: dict[tuple[str, str], tuple[float, ...]] = {}
    rows = list(rows)
    for impl, provider in PROVIDERS.items():
        parts, wanted = [], []
        for r in rows:
            if r["provider"] == provider and r["op"] != "metadata":
                sums = [0.0] * 8
                for op in products(r["op"]):
                    at = 4 * (op == "dw")
                    for i, f in enumerate(gpu_choice.features(op, *sizes(r), impl == "triton")):
                        sums[at + i] += f
                weight = STEPS if r["op"] == "step" else 1.0
                parts.append([weight * f / (float(r["ms_p50"]) / 1e3) for f in sums])
                wanted.append(weight)
        values = least(torch.tensor(parts, dtype=torch.float64), torch.tensor(wanted, dtype=torch.float64))
        found[impl, "product"], found[impl, "dw"] = tuple(values[:4]), tuple(values[4:])
    return found


def main(argv: Sequence[str] | None = None) -> None:
    p = argparse.ArgumentParser(prog="python -m fxmask.bench.fit_choice", description=(__doc__ or "").split("\n")[0])
    p.add_argument("csv")
    path = p.parse_args(argv).csv
    try:
        found = fit(read(path))
    except (OSError, ValueError, LookupError):  # no file, another one or spoilt numbers, no row in 16 bits
        p.error(f"expected a csv that fxmask bench has written, got {path}")
    for key, values in found.items():
        print(f"    {key}: ({', '.join(f'{v:.4g}' for v in values)}),")


if __name__ == "__main__":
    main()
