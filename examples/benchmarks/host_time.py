"""What a layer costs the host: Python and PyTorch of its forward, its backward and its part of the optimiser's step, in microseconds, without a GPU.

    python examples/benchmarks/host_time.py --contender dense
    python examples/benchmarks/host_time.py --contender freeze --refresh 10
    python examples/benchmarks/host_time.py --contender masked_step --refresh 10
    python examples/benchmarks/host_time.py --contender freeze --refresh 10 --criterion taylor --average 0.9

Small models wait for this on a GPU (docs/speed.md). The Triton path runs on CPU tensors with launches left out: Triton's own part, some ten microseconds and
more a launch, is missing, and results are nonsense. What is a launch of PyTorch's on a GPU is computed here on tiny tensors. Masks keep half of the blocks.
Of `--steps` steps the median; `calls`: PyTorch's calls in the optimiser's step that would launch on a GPU, a layer; where --refresh is 3 or more in a step that
neither rebuilds a mask nor comes right behind one.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import time
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

os.environ.update(TRITON_INTERPRET="1", FXMASK_INTERPRETER="1")  # before Triton is imported

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import fxmask
from fxmask.kernels.triton import device

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # beside the other examples, from whatever folder it is started
from checked_arguments import check_numbers
from thesis.side_by_side import exit_code

from benchmarks import checked

# no kernels: views, memory, and numbers that lie on the CPU here alone
NO_LAUNCH = ("view", "detach", "narrow", "slice", "split", "as_strided", "alias", "unbind", "empty", "lift_fresh", "local_scalar", "record_function")


class Calls(TorchDispatchMode):
    """Counts PyTorch's calls."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] += not any(word in str(func) for word in NO_LAUNCH)
        return func(*args, **(kwargs or {}))


def run(contender: str, layers: int, side: int, refresh: int, steps: int, **scores: Any) -> dict[str, Any]:
    """A row of figures."""
    launched = [0]
    device.launch = lambda *args, **constants: launched.__setitem__(0, launched[0] + 1)
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(layers)])
    optimiser = torch.optim.AdamW(model.parameters(), foreach=True)
    if contender != "dense":
        fxmask.apply(model, ratio=0.5, block=(side, side), impl="triton", refresh=refresh, **scores)
        fxmask.guard(optimiser, model, masked_step=contender == "masked_step")
    x, calls, times = torch.randn(4, 64), Calls(), []
    for i in range(steps + 11):
        if i == 11:
            launched[0] = 0
        optimiser.zero_grad()
        moments = [time.perf_counter()]
        loss = model(x).sum()
        moments.append(time.perf_counter())
        loss.backward()
        moments.append(time.perf_counter())
        optimiser.step()
        moments.append(time.perf_counter())
        times.append([(b - a) / layers * 1e6 for a, b in itertools.pairwise(moments)])
    ours = launched[0] / steps / layers
    for step in range(steps + 11, steps + 11 + 2 * max(1, refresh)):
        optimiser.zero_grad()
        model(x).sum().backward()
        shown = step % max(2, refresh) == 1  # the second behind a rebuild: the first finds what that has brought
        if shown:
            calls.counts.clear()
        with calls if shown else nullcontext():
            optimiser.step()
    medians = [round(statistics.median(column), 1) for column in zip(*times[11:], strict=True)]
    row = dict(zip(("forward_us", "backward_us", "step_us"), medians, strict=True))
    counted = {"launches_of_ours": round(ours, 2), "calls": round(sum(calls.counts.values()) / layers, 2)}
    return {"contender": contender, "refresh": refresh, **scores, **row, **counted}


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    p.add_argument("--contender", choices=("dense", "freeze", "masked_step"), default="freeze")
    p.add_argument("--layers", type=int, default=36)
    p.add_argument("--block", type=int, choices=(16, 32, 64), default=16)
    p.add_argument("--refresh", type=int, default=10)
    p.add_argument("--criterion", default="fro", help="fxmask.WeightMask's, as is --average")
    p.add_argument("--average", type=float, default=0.0)
    p.add_argument("--steps", type=int, default=100)
    args = p.parse_args(argv)
    check_numbers(p, args)
    return exit_code("host_time.py", lambda: print(measured(args)))


def measured(args: argparse.Namespace) -> dict[str, Any]:
    """The row that the command line asks for."""
    checked.masks(args.block, [0.5], refresh=args.refresh, criterion=args.criterion, average=args.average)
    torch.set_num_threads(1)
    return run(args.contender, args.layers, args.block, args.refresh, args.steps, criterion=args.criterion, average=args.average)


if __name__ == "__main__":
    sys.exit(main())
