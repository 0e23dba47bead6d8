"""Page faults of training steps on a CPU: a step whose memory the allocator gave back to the system faults it in again.

    python examples/benchmarks/page_faults.py --model mlp --block 64 --ratio 0.9 --threads 1
    MALLOC_TRIM_THRESHOLD_=17179869184 MALLOC_MMAP_THRESHOLD_=33554432 python examples/benchmarks/page_faults.py ...

Medians of the steps of train_step.py's contenders dense_eager and fxmask_eager (masks rebuilt on every second step), in turns.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # beside the other examples, from whatever folder it is started

import torch
from checked_arguments import check_numbers
from tabulate import tabulate
from thesis.side_by_side import exit_code

from benchmarks import checked, step_models
from benchmarks.step_contenders import Setting, runner
from fxmask.advice.step import usage
from fxmask.bench.provenance import allocator
from fxmask.bench.stopwatch import Stopwatch


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    p.add_argument("--model", choices=tuple(step_models.MODELS), default="mlp")
    p.add_argument("--block", type=int, default=64)
    p.add_argument("--ratio", type=float, default=0.9)
    p.add_argument("--threads", type=int, default=torch.get_num_threads())
    p.add_argument("--turns", type=int, default=6)
    a = p.parse_args(argv)
    check_numbers(p, a)
    return exit_code("page_faults.py", lambda: run(a))


def run(a: argparse.Namespace) -> None:
    """Measure and print."""
    checked.masks(a.block, [a.ratio])
    torch.set_num_threads(a.threads)
    device = torch.device("cpu")
    spec = step_models.Spec(a.model, device, step_models.MODELS[a.model].batches[1])
    s = Setting(spec, a.block, a.ratio, "fp32", "adamw", True, "auto", "default", "inductor", a.threads)
    batch, watch = step_models.data(spec), Stopwatch(device)
    runners = [runner(s, "dense_eager", None, batch), runner(s, "fxmask_eager", 2, batch)]
    found: dict[str, list[tuple[float, float, int]]] = {r.name: [] for r in runners}
    for turn in range(-2, a.turns):  # two that do not count
        for r in runners:
            before = usage()
            took = watch(r.step)
            after = usage()
            if turn >= 0:
                found[r.name].append((1e3 * took, 1e3 * (after[1] - before[1]), after[2] - before[2]))
    rows = [(name, *(statistics.median(column) for column in zip(*of, strict=True))) for name, of in found.items()]
    print(f"{a.model}, {a.block}x{a.block} at {100 * a.ratio:g} %, {watch.name} time; {allocator() or 'the allocator as it is'}")
    print(tabulate(rows, headers=("contender", "ms", "of the system, ms", "page faults"), floatfmt=".4g", tablefmt="github"))


if __name__ == "__main__":
    sys.exit(main())
