"""The demonstration: a dense and two block-masked ResMLPs, side by side on handwritten digits. `python examples/demo.py`

No arguments, no download, no GPU. All start from the same weights and see the same batches in the same order; everything printed is
measured in this run.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import textwrap
import time
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from data import Batch, Data, load
from plots import plot_run
from resmlp import PRESETS, ResMLP
from tabulate import tabulate
from thesis import lock
from thesis.side_by_side import check_folder, exit_code
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from tracking import ActiveBlocks, CsvLog, MaskTracker
from train import evaluate, learning_rate, progress, train_step

import fxmask

RATIO, BLOCK = 0.5, (16, 16)
EPOCHS, BATCH, LR = 15, 32, 5e-3
WARM_STEPS = 5  # not timed: the first steps also pay for allocations


class MLP(nn.Module):
    """Two linears, small enough for its graph to be read. [B, 64] -> [B, 64]."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(nn.functional.relu(self.fc1(x)))


class Run:
    """One of the models with all that follows it: optimiser, masks' tracker, files and times."""

    def __init__(self, name: str, model: nn.Module, out: Path, first: Batch) -> None:
        self.name, self.model, self.out = name, model, out / name
        self.out.mkdir(parents=True, exist_ok=True)
        self.optimiser = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
        self.tracker = MaskTracker(model)
        self.log, self.blocks = CsvLog(self.out / "log.csv"), ActiveBlocks(self.out / "active_blocks.csv", self.tracker)
        self.flop = step_flop(model, first)
        self.step_s: list[float] = []
        self.scores: dict[str, float] = {}

    def step(self, batch: Batch, lr: float) -> tuple[float, int]:
        """One training step, timed with the masks' own work in it; the demo's counting of blocks is not part of the time."""
        self.tracker.before_step()
        began = time.perf_counter()
        loss, right = train_step(self.model, self.optimiser, lr, batch)
        self.tracker.after_step()
        self.step_s.append(time.perf_counter() - began)
        return float(loss), int(right)

    def epoch_end(self, epoch: int, results: list[tuple[float, int, int]], data: Data) -> None:
        """Evaluate and write the csv row; `results` holds loss, right answers and size of each batch."""
        n = sum(size for _, _, size in results)
        row: dict[str, Any] = {
            "epoch": epoch,
            "train_loss": sum(loss * size for loss, _, size in results) / n,
            "train_acc": 100 * sum(right for _, right, _ in results) / n,
            **evaluate(self.model, data.test()),
            "ratio_achieved": self.tracker.ratio_achieved(),
            "flips": self.tracker.take_flips(),
            "seconds": sum(self.step_s[-len(results) :]),
        }
        self.log.write({k: round(v, 6) for k, v in row.items()})
        self.blocks.write(epoch)
        self.scores = row

    @property
    def median_ms(self) -> float:
        return 1e3 * statistics.median(self.step_s[WARM_STEPS:] or self.step_s)


def step_flop(model: nn.Module, batch: Batch) -> int:
    """FLOPs of the matmuls of one forward and backward; of masked layers the kept blocks alone are counted (useful FLOPs)."""
    images, labels = batch
    with FlopCounterMode(display=False) as counter:
        nn.functional.cross_entropy(model(images), labels).backward()
    model.zero_grad(set_to_none=True)
    return counter.get_total_flops()


def show_pass() -> None:
    """The same masking as a rewrite of a traced graph, on two layers, so that the change can be read."""
    graph = torch.fx.symbolic_trace(MLP())
    print(f"An MLP of two layers, traced by torch.fx.symbolic_trace:\n\n{indented(graph.code)}\n")
    fxmask.apply(graph, ratio=RATIO, block=BLOCK)
    print(f"The same after fxmask.apply(graph, ratio={RATIO}, block={BLOCK}):\n\n{indented(graph.code)}\n")


def indented(code: str) -> str:
    """Generated code without its `; x = None`, which frees what is not needed any more and hides what is computed."""
    return textwrap.indent("\n".join(line.split(";")[0] for line in code.strip().splitlines()), "    ")


def table(dense: Run, *masked: Run) -> str:
    """The result, one row a quantity, dense beside the masked models."""
    runs = (dense, *masked)
    rows = [
        ("top-1 accuracy (%)", *(f"{r.scores['top1']:.2f}" for r in runs)),
        ("target ratio of masked blocks", "0", *(f"{RATIO:g}" for _ in masked)),
        ("achieved ratio, in weight elements", *(f"{r.scores['ratio_achieved']:.4f}" for r in runs)),
        ("block flips in the run", *(f"{r.tracker.all_flips}" for r in runs)),
        ("MFLOP a training step, useful", *(f"{r.flop / 1e6:.1f}" for r in runs)),
        ("  against dense", *(f"{r.flop / dense.flop:.3f}" for r in runs)),
        ("median time a step (ms)", *(f"{r.median_ms:.2f}" for r in runs)),
        ("  against dense", *(f"{r.median_ms / dense.median_ms:.3f}" for r in runs)),
    ]
    return tabulate(rows, headers=("", *(r.name for r in runs)), disable_numparse=True, colalign=("left", *("right" for _ in runs)))


def train_both(runs: list[Run], data: Data, epochs: int, max_steps: int | None) -> None:
    """The same batches to every model, one after the other; they take turns in going first, so that none always finds the warmer cache."""
    turn = 0
    for epoch in range(1, epochs + 1):
        results: dict[str, list[tuple[float, int, int]]] = {run.name: [] for run in runs}
        for run in runs:
            run.model.train()
        for batch in islice(progress(data.train(epoch), data.steps, f"epoch {epoch}"), max_steps):
            lr = learning_rate(turn, epochs * data.steps, LR)
            turn += 1
            for run in runs[:: 1 if turn % 2 else -1]:
                results[run.name].append((*run.step(batch, lr), len(batch[1])))
        for run in runs:
            run.epoch_end(epoch, results[run.name], data)
        told = (f"{run.name}: loss {run.scores['train_loss']:.4f}, top-1 {run.scores['top1']:.2f} %" for run in runs)
        print(f"epoch {epoch:2d}  " + "   ".join(told), flush=True)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("demo-output"))
    parser.add_argument("--smoke", action="store_true", help="a few steps only, to see that it runs")
    args = parser.parse_args(argv)
    check_folder(parser, "--out", args.out)
    return exit_code("demo.py", lambda: show(args))


def show(args: argparse.Namespace) -> None:
    """The demonstration, its files in a folder of its own."""
    with lock.held(args.out):
        demonstrate(args)


def demonstrate(args: argparse.Namespace) -> None:
    """All four parts of it."""
    began = time.perf_counter()
    torch.set_num_threads(1)  # these layers are too small for more, and on a busy machine more threads wait for each other
    data = load("digits", batch=BATCH)

    print("1. What the pass does\n")
    show_pass()

    torch.manual_seed(0)
    dense_model = ResMLP(PRESETS["digits"])
    masked_model = fxmask.apply(copy.deepcopy(dense_model), ratio=RATIO, block=BLOCK, include="blocks.*")
    ste_model = fxmask.apply(copy.deepcopy(dense_model), ratio=RATIO, block=BLOCK, include="blocks.*", backward="ste")
    print("2. What is masked\n")
    print(fxmask.explain(masked_model))

    epochs, max_steps = (2, 3) if args.smoke else (EPOCHS, None)
    print(f"\n3. Training on {data.name}, {epochs} epochs, batch {BATCH}, AdamW, cosine from {LR:g}, one thread\n")
    first = next(data.train(1))
    runs = [Run("dense", dense_model, args.out, first), Run("masked", masked_model, args.out, first), Run("masked-ste", ste_model, args.out, first)]
    train_both(runs, data, epochs, max_steps)

    print("\n4. Result\n")
    print(table(*runs))
    times = runs[1].median_ms / runs[0].median_ms
    print(
        "\nThe FLOP ratio is not a speed-up. Matmuls as small as these, in blocks of 16x16 at 50 %, gain nothing by skipping blocks, so the\n"
        "layers multiply densely by the masked weight; building the masks comes on top. docs/speed.md says from which sizes and ratios on a CPU gains.\n"
        f"Measured here, a masked step takes {times:.2f} times as long as a dense one.\n"
        "Masked weights get no gradient in mode masked, so few blocks, if any, change place; in mode ste they do, and their blocks can come back."
    )
    print("\nFiles:")
    for run in runs:
        for path in (run.out / "log.csv", *plot_run(run.out)):
            print(f"  {path}")
    print(f"\nThe demo took {time.perf_counter() - began:.0f} s.")


if __name__ == "__main__":
    sys.exit(main())
