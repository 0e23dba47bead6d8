"""Whether training masked is smooth: 200 steps of ResMLP-S12 at 224 pixels and of a width-512 MLP in every backward mode, and the largest spike of each loss.

    python examples/thesis/stability.py                       # the table; goes on where it was stopped
    python examples/thesis/stability.py --models mlp512 --modes masked ste

Handwritten digits, enlarged to the model's size: nothing to download. AdamW, lr 1e-3, warm-up over 20 steps, 32x32 blocks at 80 %; `literal` is the thesis'
code, Adam with coupled decay, spectral norm and backward="unmasked". A spike is what the loss (mean of 10 steps) climbs above the lowest it had been before,
as a share of the loss that guessing gives (log 10): 0 never climbs, above 0.5 counts as a spike.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from checked_arguments import check_numbers
from data import digits
from resmlp import PRESETS, ResMLP, ResMLPConfig
from tabulate import tabulate
from torch import Tensor, nn
from torch.nn import functional as F
from train import flushed_denormals

import fxmask
from thesis import csv_files, lock
from thesis.side_by_side import GOES_ON, exit_code

CSV = Path(__file__).resolve().parents[1] / "results" / "stability.csv"
COLUMNS = ("model", "mode", "steps", "batch", "first_loss", "last_loss", "spike", "spike_step", "finite", "seconds", "threads", "torch")
STEPS, WINDOW, LIMIT = 200, 10, 0.5
RAMP = fxmask.Schedule("cubic", steps=100)
MODES: dict[str, dict[str, Any] | None] = {
    "dense": None,
    "masked": {"backward": "masked"},
    "ste": {"backward": "ste"},
    "rigl": {"backward": "rigl", "dense_every": 20, "refresh": 20, "regrow": fxmask.Regrow("gradient", 0.3)},
    "unmasked": {"backward": "unmasked"},
    "ramp": {"schedule": RAMP},
    "ramp-taylor": {"schedule": RAMP, "criterion": "taylor", "average": 0.9},
    "soft": {"schedule": RAMP, "soft": True},
    "static-gain": {"criterion": "random", "refresh": 0, "cover": True, "gain": True},
    "literal": {"backward": "unmasked", "criterion": "spectral"},
}


class Wide(nn.Sequential):
    """An MLP of width 512 over the 64 pixels of a digit."""

    def __init__(self) -> None:
        layers: list[nn.Module] = [nn.Flatten(), nn.Linear(64, 512), nn.GELU()]
        for _ in range(4):
            layers += [nn.Linear(512, 512), nn.GELU()]
        super().__init__(*layers, nn.Linear(512, 10))


def build(model: str) -> tuple[nn.Module, int, str]:
    """(model, side of its images in pixels, which linears are masked)."""
    torch.manual_seed(0)
    if model == "mlp512":
        return Wide(), 8, "*"
    config = ResMLPConfig(**{**vars(PRESETS["s12"]), "classes": 10, "channels": 1})
    return ResMLP(config), config.image, "blocks.*"


@flushed_denormals()
def losses_of(model: str, mode: str, steps: int, batch: int) -> list[float]:
    """The training loss of every step."""
    net, side, include = build(model)
    options = MODES[mode]
    if options is not None:
        exclude = ("11",) if model == "mlp512" else None  # the head stays dense, as in the thesis
        fxmask.apply(net, fxmask.WeightMask(ratio=0.8, block=(32, 32), **options), include=include, exclude=exclude)
    kind = torch.optim.Adam if mode == "literal" else torch.optim.AdamW
    optimiser = kind(net.parameters(), lr=1e-3, weight_decay=1e-4)
    if options is not None:
        fxmask.guard(optimiser, net, masked_weights="free" if mode == "literal" else "auto")
    warmup = torch.optim.lr_scheduler.LinearLR(optimiser, 0.05, total_iters=20)
    pixels, found = digits()[0], []
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        rows = torch.randint(0, len(pixels.labels), (batch,), generator=generator)
        x: Tensor = (pixels.images[rows] / pixels.top - pixels.mean) / pixels.std
        loss = F.cross_entropy(net(F.interpolate(x, size=side)), pixels.labels[rows])
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        optimiser.step()
        warmup.step()
        found.append(loss.item())
    return found


def spike(losses: list[float]) -> tuple[float, int]:
    """(largest climb of the smoothed loss over its lowest value before, as a share of log 10; its step). Infinite for a loss that is not finite."""
    worst, at, lowest = 0.0, 0, math.inf
    for i in range(WINDOW, len(losses) + 1):
        mean = sum(losses[i - WINDOW : i]) / WINDOW
        if not math.isfinite(mean):
            return math.inf, i
        if mean - lowest > worst * math.log(10):
            worst, at = (mean - lowest) / math.log(10), i
        lowest = min(lowest, mean)
    return worst, at


def key_of(row: dict[str, str]) -> tuple[str, ...]:
    """What makes a row one run's."""
    return tuple(row[column] for column in ("model", "mode", "steps", "batch"))


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    p.add_argument("--models", nargs="+", choices=("mlp512", "resmlp-s12"), default=["mlp512", "resmlp-s12"])
    p.add_argument("--modes", nargs="+", choices=tuple(MODES), default=list(MODES))
    p.add_argument("--steps", type=int, default=STEPS)
    p.add_argument("--batch", type=int, help="default: 64 for the MLP, 8 for ResMLP-S12")
    p.add_argument("--threads", type=int, default=1)
    p.add_argument("--csv", type=Path, default=CSV)
    args = p.parse_args(argv)
    check_numbers(p, args)
    if args.steps < WINDOW:  # no mean would be looked at
        p.error(f"--steps: expected at least {WINDOW}, got {args.steps}")
    torch.set_num_threads(args.threads)
    return exit_code("stability.py", lambda: run(args), GOES_ON)


def run(args: argparse.Namespace) -> int:
    """Measure what the csv lacks, and show all of it; 1 where a loss has a spike."""
    for model in args.models:
        for mode in args.modes:
            batch = args.batch or (64 if model == "mlp512" else 8)
            key = (model, mode, str(args.steps), str(batch))
            if key in map(key_of, csv_files.read_own(args.csv, COLUMNS)):
                continue
            began = time.perf_counter()
            losses = losses_of(model, mode, args.steps, batch)
            height, at = spike(losses)
            row = {
                "model": model, "mode": mode, "steps": args.steps, "batch": batch, "first_loss": f"{losses[0]:.4f}",
                "last_loss": f"{sum(losses[-WINDOW:]) / WINDOW:.4f}", "spike": f"{height:.3f}", "spike_step": at, "finite": all(map(math.isfinite, losses)),
                "seconds": f"{time.perf_counter() - began:.0f}", "threads": args.threads, "torch": torch.__version__,
            }  # fmt: skip
            with lock.alone(args.csv):  # another process may have added rows meanwhile, this one among them
                others = [r for r in csv_files.read_own(args.csv, COLUMNS) if key_of(r) != key]
                csv_files.write(args.csv, COLUMNS, [*others, row])
            print(f"{model} {mode}: spike {height:.3f}", flush=True)
    rows = csv_files.numbers(args.csv, csv_files.read_own(args.csv, COLUMNS), "spike")
    print(tabulate(rows, headers="keys"))
    wrong = [f"{r['model']} {r['mode']}" for r in rows if float(r["spike"]) > LIMIT and r["mode"] != "literal"]
    print(f"a spike above {LIMIT} in: {', '.join(wrong)}" if wrong else f"no spike above {LIMIT} but in literal, if at all")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
