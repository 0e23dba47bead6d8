"""One training step of a whole model: forward, loss, backward and optimiser, masks rebuilt every 1, 10 or 100 steps, against dense and masked-dense.

    python examples/benchmarks/train_step.py --model cifar --block 32 --ratio 0.8 0.9 --threads 1 --csv bench-output/train_step.csv
    python examples/benchmarks/train_step.py --model gpt --dtype bf16 --block 64 128 --ratio 0.9 --impl triton       # on a GPU
    python examples/benchmarks/train_step.py --plot bench-output/train_step.csv                                     # a bar chart beside the csv

The contenders of one model, batch, block and ratio take their steps in turns, so that whatever slows the machine down slows all of them. Masks of refresh 1
are built in every forward. Those of refresh N are timed on steps that rebuild them and on steps that do not (`ms_rebuild`, `ms_plain`), in alternation, and the
row has plain + (rebuild - plain) / N; its p10 and p90 are made so of the percentiles. `x_dense` is the faster of the dense contenders over this one.
`*_graphed`: a step as one CUDA graph (`fxmask.graphed`, the optimiser fused), by `--contenders` alone; on a CPU it runs as it is. `taylor_*`, too: masks by
Taylor's scores with an average of 0.9, which every step takes in, and which are rebuilt behind it (docs/accuracy.md).

Rows of a group are written together: a run that is stopped keeps finished groups, and the same command goes on. A row of a machine that was busy says so
(`busy`, `verdict`) and counts; `--again` measures it anew. Without a source of its own a column is empty: energy without NVML, bytes measured always.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # beside the other examples, from whatever folder it is started

from checked_arguments import check_numbers
from thesis.side_by_side import GOES_ON, exit_code

from benchmarks import checked, step_models, train_step_plot
from benchmarks.step_contenders import CONTENDERS, DEFAULT, NAMES, Setting, hungriest, instances, planned
from benchmarks.step_group import COLUMNS, measure, said, the_best
from fxmask.bench.provenance import provenance
from fxmask.bench.table import Row, Table, key
from fxmask.errors import ConfigError
from fxmask.kernels.errors import message


def arguments(argv: list[str] | None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", nargs="+", default=["cifar"], help=", ".join(step_models.MODELS))
    p.add_argument("--batch", type=int, help="samples; default: by model and device")
    p.add_argument("--width", type=int, help="of gpt; default: 4096 on a GPU, 512 on a CPU")
    p.add_argument("--depth", type=int, help="of gpt; default: what 80 %% of the free memory takes on a GPU, 4 on a CPU")
    p.add_argument("--sequence", type=int, help="tokens of a sample of gpt; default: 1024 on a GPU, 128 on a CPU")
    p.add_argument("--block", type=int, nargs="+", default=[64])
    p.add_argument("--ratio", type=float, nargs="+", default=[0.9])
    p.add_argument("--refresh", type=int, nargs="+", default=[1, 10, 100], metavar="N")
    p.add_argument("--contenders", nargs="+", default=list(DEFAULT), help=", ".join(CONTENDERS))
    p.add_argument("--impl", default="auto", help="of the fxmask contenders; auto takes kernels on a GPU where they are predicted to pay")
    p.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32", help="bf16: autocast")
    p.add_argument("--optimizer", choices=("adamw", "sgd"), default="adamw")
    p.add_argument("--masked-step", choices=("auto", "on", "off"), default="on", help="guard's, of the fxmask contenders; auto: on from a ratio of 0.7")
    p.add_argument("--compile-mode", default="default")
    p.add_argument("--compile-backend", default="inductor")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--threads", type=int, default=torch.get_num_threads())
    p.add_argument("--repeats", type=int, default=20, help="turns")
    p.add_argument("--seconds", type=float, default=120.0, help="limit of a group's turns, of which there are at least 3")
    p.add_argument("--warm-up", type=int, default=2, help="steps of each contender before, the first of which compiles")
    p.add_argument("--energy", type=float, default=5.0, metavar="SECONDS", help="window of each contender on a GPU with NVML; 0: none")
    p.add_argument("--one-at-a-time", action="store_true", help="only one contender in memory, and so not in turns")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--csv", type=Path, default=Path("bench-output/train_step.csv"))
    p.add_argument("--again", action="store_true", help="measure rows of a busy machine anew")
    p.add_argument("--plot", type=Path, metavar="CSV", help="draw a bar chart of that csv, and measure nothing")
    a = p.parse_args(argv)
    check_numbers(p, a)
    return a


def check(a: argparse.Namespace) -> torch.device:
    """The device; ConfigError for what cannot be measured."""
    for what, given, known in (("--model", a.model, step_models.MODELS), ("--contenders", a.contenders, CONTENDERS)):
        unknown = [name for name in given if name not in known]
        if unknown:
            raise ConfigError(message(f"{what}: expected names of {', '.join(known)}, got {', '.join(unknown)}.", fix="choose among these."))
    device = checked.device_here(a.device)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
    for block in a.block:
        checked.masks(block, a.ratio)
    if a.width is not None and a.width % max(1, a.width // 128):
        raise ConfigError(f"--width: expected a multiple of its {a.width // 128} heads, one for each 128, got {a.width}.")
    if min(a.refresh) < 1:
        raise ConfigError(f"--refresh: expected numbers of steps of at least 1, got {min(a.refresh)}; masks that are never rebuilt cost ms_plain.")
    try:
        torch.compile(torch.nn.Identity(), mode=a.compile_mode, backend=a.compile_backend)  # which compiles nothing yet
    except RuntimeError as error:
        raise ConfigError(f"--compile-backend {a.compile_backend}, --compile-mode {a.compile_mode}: {str(error).splitlines()[0]}") from None
    return device


def settings(a: argparse.Namespace, device: torch.device) -> Iterator[Setting]:
    """A group for each model, block and ratio."""
    cuda, depths = device.type == "cuda", dict[str, int]()
    for name in a.model:
        batch = a.batch or step_models.MODELS[name].batches[0 if cuda else 1]
        spec = step_models.Spec(name, device, batch, a.width or (4096 if cuda else 512), a.depth or 4, a.sequence or (1024 if cuda else 128), a.seed)
        for block in a.block:
            for ratio in a.ratio:
                masked_step = a.masked_step == "on" or (a.masked_step == "auto" and ratio >= 0.7)
                s = Setting(spec, block, ratio, a.dtype, a.optimizer, masked_step, a.impl, a.compile_mode, a.compile_backend, a.threads)
                if name == "gpt" and a.depth is None and cuda:
                    if name not in depths:  # once, as a model of another depth would be another group
                        depths[name] = step_models.depth_on_cuda(spec, 1 if a.one_at_a_time else len(instances(a.contenders, a.refresh)), hungriest(s))
                    s = replace(s, spec=replace(spec, depth=depths[name]))
                yield s


def run(a: argparse.Namespace) -> list[Row]:
    """Measure what the csv lacks; the rows of all groups, those that it had included."""
    device = check(a)
    torch.set_num_threads(a.threads)
    shared = {**provenance(device), "threads": str(a.threads)}  # of a GPU's host, too
    table, all_rows = Table(a.csv, COLUMNS, NAMES), []
    if a.again:
        latest = {key(row, NAMES): row for row in table.rows}
        table.keys -= {k for k, row in latest.items() if row["busy"] == "1"}
    for s in settings(a, device):
        wanted = [{**shared, **row} for row in planned(s, a.contenders, a.refresh)]
        if all(row in table for row in wanted):
            keys = {key(row, NAMES) for row in wanted}
            rows = list({key(row, NAMES): row for row in table.rows if key(row, NAMES) in keys}.values())
            print(f"{s.title}: measured already")
        else:
            try:
                rows = measure(s, a, shared)
            except torch.OutOfMemoryError as e:
                print(f"{s.title}: no rows, memory ran out: {str(e).splitlines()[0]}\n  fix: --one-at-a-time, or a smaller --batch, --depth or --sequence.")
                continue
            table.extend(rows)
        print(said(s, rows), flush=True)
        all_rows += rows
    print(the_best(all_rows))
    return all_rows


def main(argv: list[str] | None = None) -> int:
    """0, or 2 for a use that cannot be measured, or a csv that cannot be read or written."""
    a = arguments(argv)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler, which is asked for memory, says when it starts and stops
    return exit_code("train_step.py", lambda: run(a) if a.plot is None else print(train_step_plot.plot(a.plot)), GOES_ON)


if __name__ == "__main__":
    sys.exit(main())
