"""SparseDrop's figure 4: seconds of a training step of whole models against p: dense, dropout before every linear, block dropout in every linear.

    python examples/sparsedrop/figure_4.py --size small --threads 1 --out examples/results/sparsedrop
    python examples/sparsedrop/figure_4.py --out DIR          # the published networks: a GPU

Data are noise of the task's shapes, forward and backward without an optimiser step, in turns in one run; medians; on one CPU thread process time. The
published figure: block dropout is faster than dropout from 20 % on. Rows where it is slower are printed like the others.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from benchmarks.block_dropout import medians
from checked_arguments import check_numbers
from thesis.side_by_side import check_folder, exit_code, save, show
from torch import Tensor
from torch.nn import functional as F

from fxmask.bench.clock import load_average
from fxmask.bench.provenance import provenance, utc
from fxmask.bench.stopwatch import Stopwatch
from sparsedrop.tasks import SIDE, TASKS, Loaded, Task
from sparsedrop.train import METHODS, build, check

RATES = (0.1, 0.2, 0.3, 0.5, 0.7)
VOCABULARY = 103  # characters of the text that tasks.py takes


def noise(task: Task) -> Loaded:
    """One batch of the task's shapes."""
    draw = torch.Generator().manual_seed(0)
    if task.network == "gpt":
        tokens = torch.randint(VOCABULARY, (2, task.batch, dict(task.size).get("context", 128)), generator=draw)
        part = (tokens[0], tokens[1])
        return Loaded(part, part, VOCABULARY)
    channels = 1 if task.name in ("digits", "mnist", "fashion") else 3
    part = (torch.randn(task.batch, channels, SIDE, SIDE, generator=draw), torch.randint(10, (task.batch,), generator=draw))
    return Loaded(part, part, 10)


def step(task: Task, loaded: Loaded, method: str, p: float, block: int, device: str, half: bool) -> Callable[[], None]:
    """A call of forward and backward."""
    torch.manual_seed(0)
    model, (x, y) = build(task, loaded, method, p, block).to(device), (t.to(device) for t in loaded.train)

    def call() -> None:
        model.zero_grad()
        with torch.autocast(torch.device(device).type, torch.float16, enabled=half):
            logits: Tensor = model(x)
        F.cross_entropy(logits.flatten(0, -2).float(), y.flatten()).backward()

    return call


def measure(a: argparse.Namespace, task: Task) -> list[dict[str, Any]]:
    """A row for every method and p."""
    loaded, rows, half = noise(task), [], torch.device(a.device).type == "cuda"
    watch = Stopwatch(torch.device(a.device))
    for p in a.rates:
        calls = {method: step(task, loaded, method, p, a.block, a.device, half) for method in METHODS}
        ms = medians(watch, calls, a.repeats)
        for method, t in ms.items():
            ratios = {"x_dense": f"{ms['dense'] / t:.3f}", "x_dropout": f"{ms['dropout'] / t:.3f}"}
            row = {"task": task.name, "size": a.size, "p": p, "block": a.block, "method": method, "ms": f"{t:.4g}", **ratios}
            rows.append({**row, "load": load_average(), "utc": utc()})
    return rows


def figure(rows: list[dict[str, Any]]) -> Any:
    from plots import new_figure

    tasks = list(dict.fromkeys(r["task"] for r in rows))
    drawn = new_figure(4.2 * len(tasks), 3.2)
    for i, task in enumerate(tasks):
        axes = drawn.add_subplot(1, len(tasks), i + 1, title=task, xlabel="p", ylabel="ms of forward and backward")
        for method in METHODS:
            line = [(r["p"], float(r["ms"])) for r in rows if r["task"] == task and r["method"] == method]
            axes.plot([p for p, _ in line], [t for _, t in line], marker="o", label={"dropout": "dropout + dense"}.get(method, method))
        axes.set_ylim(bottom=0)
        axes.legend()
    return drawn


def main(argv: list[str] | None = None) -> int:
    """0, or 2 for a use that cannot be measured."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--tasks", nargs="+", choices=tuple(TASKS["full"]), default=["mnist", "cifar10", "gpt"])
    p.add_argument("--size", choices=tuple(TASKS), default="full")
    p.add_argument("--rates", type=float, nargs="+", default=list(RATES))
    p.add_argument("--block", type=int, help="side of a block; default: 128, of --size small 32")
    p.add_argument("--repeats", type=int, default=11)
    p.add_argument("--threads", type=int)
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--out", type=Path, metavar="DIR", help="write csv and png there")
    a = p.parse_args(argv)
    check_numbers(p, a)
    check_folder(p, "--out", a.out)
    a.block = {"full": 128, "small": 32}[a.size] if a.block is None else a.block
    return exit_code("figure_4.py", lambda: run(a))


def run(a: argparse.Namespace) -> None:
    """Measure, print, write."""
    check(a)
    if a.threads:
        torch.set_num_threads(a.threads)
    rows = [row for name in a.tasks for row in measure(a, TASKS[a.size][name])]
    show(f"A training step, {a.size} networks, blocks of {a.block}", [{k: v for k, v in r.items() if k not in ("load", "utc", "size", "block")} for r in rows])
    for name in a.tasks:
        won = [rate for rate in a.rates if all(float(r["x_dropout"]) > 1 for r in rows if r["task"] == name and r["method"] == "sparsedrop" and r["p"] >= rate)]
        print(f"{name}: " + (f"faster than dropout + dense from p = {won[0]:g} on" if won else "not faster than dropout + dense at the highest p"))
    shared = provenance(torch.device(a.device))
    save(a.out, "figure_4", [{**shared, **r} for r in rows], lambda: figure(rows))


if __name__ == "__main__":
    sys.exit(main())
