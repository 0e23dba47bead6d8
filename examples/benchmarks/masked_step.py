"""Time of optimizer.step() with a dense step, under freeze, and with masked_step: AdamW or SGD over square linears, on the CPU or a GPU.

python examples/benchmarks/masked_step.py --optimizer adamw --block 64 --ratios 0.8 0.9
python examples/benchmarks/masked_step.py --device cuda --form fused --features 4096 --layers 8 --block 128 --csv masked_step.csv

Freeze by copies of whole tensors stands beside freeze of what is masked, by one kernel on a GPU, by gathers on a CPU. All are timed in turn, so that a busy
machine is busy for all of them; medians.
The masks are cached (refresh=0), unless --refresh says otherwise.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from unittest import mock

import torch
from torch import nn, optim

import fxmask
from fxmask.passes.stepping import gathered, set_aside

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # beside the other examples, from whatever folder it is started
from checked_arguments import check_numbers
from thesis.side_by_side import exit_code

from benchmarks import checked

OPTIMISERS = {
    "adamw": lambda p, **form: optim.AdamW(p, lr=1e-3, weight_decay=0.1, **form),
    "sgd": lambda p, **form: optim.SGD(p, lr=1e-3, momentum=0.9, **form),
}
MODES = ("no guard", "freeze", "clones", "masked_step")


def made(a: argparse.Namespace, ratio: float, mode: str) -> optim.Optimizer:
    """A guarded optimiser with gradients at hand."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(a.features, a.features, device=a.device) for _ in range(a.layers)))
    fxmask.apply(model, ratio=ratio, block=(a.block, a.block), refresh=a.refresh)
    form = {} if a.form == "default" else {a.form: True}
    optimizer: optim.Optimizer = OPTIMISERS[a.optimizer](model.parameters(), **form)
    if mode != "no guard":
        optimizer.handle = fxmask.guard(optimizer, model, masked_step=mode == "masked_step")  # type: ignore[attr-defined]
    else:
        fxmask.step(model, 0)
    model(torch.randn(64, a.features, device=a.device)).square().mean().backward()
    optimizer.model = model  # type: ignore[attr-defined]
    return optimizer


@contextmanager
def _by_clones() -> Iterator[None]:
    with mock.patch.object(set_aside, "fits", return_value=False), mock.patch.object(gathered, "fits", return_value=False):
        yield


def seconds(optimizer: optim.Optimizer, mode: str, on_gpu: bool) -> float:
    if on_gpu:
        torch.cuda.synchronize()
    with _by_clones() if mode == "clones" else nullcontext():
        start = time.perf_counter()
        optimizer.step()
        if on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter() - start


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--optimizer", choices=OPTIMISERS, default="adamw")
    p.add_argument("--form", choices=("default", "foreach", "fused"), default="default")
    p.add_argument("--features", type=int, default=1024)
    p.add_argument("--layers", type=int, default=4)
    p.add_argument("--block", type=int, default=64)
    p.add_argument("--ratios", type=float, nargs="+", default=[0.8, 0.9])
    p.add_argument("--refresh", type=int, default=0)
    p.add_argument("--repeats", type=int, default=30)
    p.add_argument("--threads", type=int, default=1)
    p.add_argument("--device", default="cpu")
    p.add_argument("--csv", type=Path, default=None, help="append rows there")
    a = p.parse_args(argv)
    check_numbers(p, a)
    return exit_code("masked_step.py", lambda: run(a))


def run(a: argparse.Namespace) -> None:
    """Measure, print and append."""
    checked.masks(a.block, a.ratios, refresh=a.refresh)
    settings = {k: v for k, v in vars(a).items() if k not in ("csv", "ratios")}
    on_gpu = checked.device_here(a.device).type == "cuda"
    where = {"gpu": torch.cuda.get_device_name(a.device)} if on_gpu else {}
    columns = [*settings, "ratio", "torch", *where, *(f"{mode.replace(' ', '_')}_ms" for mode in MODES), "command"]
    checked.table("--csv", a.csv, columns)
    torch.set_num_threads(a.threads)
    for ratio in a.ratios:
        runs = {mode: made(a, ratio, mode) for mode in MODES}
        times: dict[str, list[float]] = {mode: [] for mode in MODES}
        for _ in range(a.repeats + 3):
            for mode in MODES:
                times[mode].append(seconds(runs[mode], mode, on_gpu))
        ms = {mode: 1e3 * statistics.median(t[3:]) for mode, t in times.items()}  # the first three warm up
        said = ", ".join(f"{mode} {t:.2f} ms" for mode, t in ms.items())
        faster = ", ".join(f"{ms[mode] / ms['masked_step']:.2f}x as fast as {mode}" for mode in MODES[:-1])
        what = f"{a.optimizer} {a.form} {a.layers} x {a.features}^2, block {a.block}, ratio {ratio}, refresh {a.refresh}"
        print(f"{what}: {said}; masked_step is {faster}", flush=True)
        if a.csv is not None:
            row = [*settings.values(), ratio, torch.__version__, *where.values(), *(round(t, 3) for t in ms.values()), " ".join(["python", *sys.argv])]
            checked.append(a.csv, columns, [dict(zip(columns, row, strict=True))])


if __name__ == "__main__":
    sys.exit(main())
