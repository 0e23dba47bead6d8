"""Whole training steps of a masked ResMLP in train mode, fed by two data-loader workers: is `auto` ever slower than masked-dense?

    python examples/benchmarks/whole_model.py --preset s12 --batch 4 --threads 2 --out examples/results/cpu/whole_model.csv

Two copies of one model, both masked alike, one by impl="auto" and one by impl="reference" (masked-dense), and a dense one, take steps in turns on the same
batches. The workers are forked while the CPU implementation's threads are alive, as a user's are. A row a contender is appended to the csv.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

import fxmask
from fxmask.bench.provenance import provenance, utc

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from checked_arguments import check_numbers
from resmlp import PRESETS, ResMLP, ResMLPConfig
from thesis.side_by_side import exit_code

from benchmarks import checked

WHERE = ("source", "device", "torch", "python", "threads")
COLUMNS = (*WHERE, "utc", "load", "preset", "batch", "workers", "ratio", "block", "steps", "provider", "ms_p50", "x_dense", "x_masked_dense", "loss_drift")


class Noise(Dataset[tuple[torch.Tensor, int]]):
    """Images of N(0, 1), made by the workers."""

    def __init__(self, config: ResMLPConfig, size: int) -> None:
        self.config, self.size = config, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        g = torch.Generator().manual_seed(index)
        return torch.randn(self.config.channels, self.config.image, self.config.image, generator=g), index % self.config.classes


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--preset", choices=PRESETS, default="s12")
    p.add_argument("--batch", type=int, default=4)
    p.add_argument("--steps", type=int, default=12)
    p.add_argument("--ratio", type=float, default=0.9)
    p.add_argument("--block", type=int, default=64)
    p.add_argument("--threads", type=int, default=1)
    p.add_argument("--workers", type=int, default=2)
    p.add_argument("--out", type=Path)
    a = p.parse_args(argv)
    check_numbers(p, a)
    return exit_code("whole_model.py", lambda: run(a))


def run(a: argparse.Namespace) -> None:
    """Measure, print and append."""
    checked.masks(a.block, [a.ratio])
    checked.table("--out", a.out, COLUMNS)
    torch.set_num_threads(a.threads)
    config = PRESETS[a.preset]

    def model(impl: str | None) -> torch.nn.Module:
        torch.manual_seed(0)
        m = ResMLP(config).train()
        return m if impl is None else fxmask.apply(m, ratio=a.ratio, block=(a.block, a.block), impl=impl)

    models = {"dense": model(None), "masked_dense": model("reference"), "fxmask_auto": model("auto")}
    optimizers = {n: torch.optim.AdamW(m.parameters(), 1e-3) for n, m in models.items()}
    times: dict[str, list[float]] = {n: [] for n in models}
    losses: dict[str, list[float]] = {n: [] for n in models}
    warm = 2
    for images, labels in DataLoader(Noise(config, a.batch * (a.steps + warm)), a.batch, num_workers=a.workers):
        for name, m in models.items():
            begin = time.perf_counter()
            optimizers[name].zero_grad()
            loss = F.cross_entropy(m(images), labels)
            loss.backward()
            optimizers[name].step()
            times[name].append(1e3 * (time.perf_counter() - begin))
            losses[name].append(loss.item())
    medians = {n: statistics.median(t[warm:]) for n, t in times.items()}
    drift = max(abs(x - y) / abs(y) for x, y in zip(losses["fxmask_auto"], losses["masked_dense"], strict=True))
    for name, t in medians.items():
        print(f"{name:13s} {t:8.1f} ms a step, {medians['masked_dense'] / t:.2f} of masked-dense's speed, {medians['dense'] / t:.2f} of dense's")
    print(f"losses of auto and of masked-dense differ by at most {drift:.1e} over {a.steps + warm} steps")
    if a.out is not None:
        here = provenance(torch.device("cpu"))
        rows = (
            {**{k: here[k] for k in WHERE}, "utc": utc(), "load": f"{os.getloadavg()[0]:.2f}", "preset": a.preset,
             "batch": a.batch, "workers": a.workers, "ratio": a.ratio, "block": a.block, "steps": a.steps, "provider": n, "ms_p50": f"{t:.4g}",
             "x_dense": f"{medians['dense'] / t:.4g}", "x_masked_dense": f"{medians['masked_dense'] / t:.4g}", "loss_drift": f"{drift:.2g}"}
            for n, t in medians.items()
        )  # fmt: skip
        checked.append(a.out, COLUMNS, rows, "\r\n")


if __name__ == "__main__":
    sys.exit(main())
