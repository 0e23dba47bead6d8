"""What the scripts of Barley's table IV and figure 8 share: runs of train.py over mini-batches, pruned inputs and seeds, made and resumed as a sweep is.

Ours, because the sources at hand leave it open: the model (the thesis' CIFAR model, or with --model s12 ResMLP-S12 at 224 pixels from a folder of images),
AdamW, warm-up over one epoch, then a cosine, no MixUp and no CutMix, one learning rate for all mini-batches, the number of epochs. Runs of a seed and a
mini-batch see the same batches; accuracy is top-1 in percent on the test images after the last epoch.
"""

from __future__ import annotations

import argparse
import shlex
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from checked_arguments import check_numbers
from resmlp import PRESETS, ResMLP, ResMLPConfig
from train import DEFAULT_MODEL

import fxmask
from fxmask.analysis.barley import kept_blocks, resmlp_inputs
from thesis import lock, sweep, sweep_file, sweep_results
from thesis.barley_model import MIB, saved_by_autograd
from thesis.masked_model import activations
from thesis.side_by_side import GOES_ON, check_folder, exit_code
from thesis.sweep_checks import SweepError
from thesis.sweep_fixed import classes_of
from thesis.sweep_results import Ended

DATA = {"digits": "digits", "cifar10": "CIFAR-10", "folder": "images in a folder"}
NO_CIFAR = "digits are no CIFAR: 360 test images, each 0.28 points; this shows that the script works, and confirms nothing of the source"
DENSE = ""  # the value of train.py's --activations for a dense run
INDEX_BYTES = 2  # of a kept block's number, for up to 32,768 blocks a sample


def arguments(doc: str | None, argv: Sequence[str] | None, add: Callable[[argparse.ArgumentParser], Any]) -> Namespace:
    """The command line that these scripts share, and what `add` adds."""
    p = argparse.ArgumentParser(description=(doc or "").split("\n")[0])
    p.add_argument("--data", choices=tuple(DEFAULT_MODEL), default="cifar10", help="digits: the form that takes minutes on a small machine")
    p.add_argument("--root", type=Path, help="folder of the images; nothing is downloaded")
    p.add_argument("--model", choices=("digits", "cifar", "s12"), help="default: digits, or cifar")
    p.add_argument("--epochs", type=int, help="default: 20, for digits 8")
    p.add_argument("--seeds", type=int, nargs="+", default=[0, 1], help="default: 0 1")
    p.add_argument("--lr", default="0.005")
    p.add_argument("--jobs", type=int, default=1, help="processes at a time")
    p.add_argument("--at-once", type=int, metavar="K", help="in each process K runs in turns, images loaded once; default: one run a process")
    p.add_argument("--threads", type=int, default=1, help="of a run")
    p.add_argument("--runs", type=Path, help="where checkpoints and logs lie; default: runs/NAME/DATA")
    p.add_argument("--table", action="store_true", help="train nothing; what has ended is shown")
    p.add_argument("--out", type=Path, metavar="DIR", help="write csv files, and a png where the source plots")
    add(p)
    args = p.parse_args(argv)
    args.model = args.model or DEFAULT_MODEL[args.data]
    args.epochs = (8 if args.data == "digits" else 20) if args.epochs is None else args.epochs
    check_folder(p, "--out", args.out)
    check_folder(p, "--runs", args.runs)
    check_numbers(p, args)
    sizes = {"digits": ("digits",), "cifar10": ("cifar",), "folder": ("cifar", "s12")}[args.data]
    if args.model not in sizes:
        p.error(f"--model: expected {' or '.join(sizes)} with --data {args.data}, got {args.model}; images of 224 pixels for s12 come from --data folder")
    return args


def shape(args: Namespace) -> ResMLPConfig:
    """Sizes of the runs' model."""
    return replace(PRESETS[args.model], classes=classes_of(args) or 10)


def grid(args: Namespace, name: str, batches: Sequence[int], pruned: Sequence[str]) -> sweep_file.Sweep:
    """All runs: every mini-batch dense and with each of `pruned` (train.py's --activations, such as "0.5:16"), for every seed."""
    for one in pruned:
        formula_mib(shape(args), 1, one)  # raises now, and not in every run
    hp = {"model_config": [f"ResMLP{PRESETS[args.model].depth} @"], "batch": list(batches), "activations": ["none", *pruned], "seed": args.seeds}
    fixed = {"data_set": args.data, "epochs": args.epochs, "opt": "adamw", "lr": args.lr, "weight_decay": "1e-4", "mixup_prob": "0"}
    train = {"warmup": 1, "cooldown": 0, "masks_from": 0, "threads": args.threads, "model": args.model}
    if args.root:
        fixed["data_dir"] = str(args.root)
    return sweep_file.expand(Path(name), sweep_file.check({"hp": hp, "fixed": fixed, "train": train}))


def train_all(args: Namespace, name: str, batches: Sequence[int], pruned: Sequence[str]) -> tuple[list[Ended], int, int]:
    """Train what has not ended, unless `--table`: (runs that have ended, how many there are to be, how many failed).

    Raises: SweepError, DataMissing, lock.InUse. Stopped at any moment, the same call goes on.
    """
    plan, folder = grid(args, name, batches, pruned), args.runs or Path("runs") / name / args.data
    failed = 0
    if not args.table:
        with lock.held(folder):
            failed = sweep.run(plan, folder, Namespace(only=None, jobs=args.jobs, at_once=args.at_once))
    return sweep_results.collect(plan.jobs, folder), len(plan.jobs), failed


def command(args: Namespace, name: str, **own: Any) -> str:
    """The command that makes these results again, but for where files lie and how many runs go side by side; `own`: options of one script."""
    shared = {"data": args.data, "model": args.model, "epochs": args.epochs, "seeds": args.seeds, "lr": args.lr, "threads": args.threads}
    words = ["python", f"examples/thesis/{name}.py", *(["--root", "DIR"] if args.root else [])]
    for key, value in {**shared, **own}.items():
        words += [f"--{key}", *map(str, value if isinstance(value, list) else [value])]
    return shlex.join(words)


def guarded(name: str, work: Callable[[], int]) -> int:
    """The exit status of `work`; 2 with a message, in the words of these scripts' options, where the folder, the images or an option is not as it must be."""

    def said() -> int:
        try:
            return work()
        except fxmask.FxMaskError as error:
            text = str(error)
            for sweeps, ours in (("--out", "--runs"), ("fixed.data_dir", "--root"), ("fixed.", "--"), ("hp.", "--"), ("the sweep's file", "this command")):
                text = text.replace(sweeps, ours)
            raise SweepError(text) from None

    return exit_code(f"thesis/{name}.py", said, GOES_ON)


def cells(runs: Sequence[Ended]) -> dict[tuple[int, str], dict[int, Ended]]:
    """The runs by (mini-batch, pruned), then by seed."""
    found: dict[tuple[int, str], dict[int, Ended]] = {}
    for run in runs:
        found.setdefault((int(run.job.settings["batch"]), run.job.settings["activations"]), {})[int(run.job.settings["seed"])] = run
    return found


def top1(runs: dict[int, Ended]) -> float:
    """Mean over the seeds."""
    return fmean(run.top1 for run in runs.values())


def against_dense(pruned: dict[int, Ended], dense: dict[int, Ended]) -> float | None:
    """Mean of the differences over the seeds that both have, in points; None without one."""
    both = [pruned[seed].top1 - dense[seed].top1 for seed in pruned if seed in dense]
    return fmean(both) if both else None


def split(pruned: str) -> tuple[float, int]:
    """(sparsity, block) of "0.5:16", as train.py reads it."""
    try:
        config = activations(pruned)
    except ValueError as error:
        raise SweepError(f"pruned inputs: expected RATIO:BLOCK such as 0.5:16, got {pruned!r} ({error}).") from None
    assert config is not None
    return config.ratio, config.block


def formula_mib(config: ResMLPConfig, batch: int, pruned: str) -> tuple[float, float]:
    """(inputs of the blocks' linears as they are, and as their kept blocks with a 16-bit number each), MiB of a batch, closed form."""
    sparsity, block = split(pruned)
    inputs = resmlp_inputs(tokens=config.tokens, dim=config.dim, depth=config.depth, expansion=config.expansion)
    kept = sum(kept_blocks(*one, block, sparsity) for one in inputs) * (4 * block + INDEX_BYTES)
    return 4 * batch * sum(rows * cols for rows, cols in inputs) / MIB, batch * kept / MIB


def saved_mib(args: Namespace, batch: int, pruned: str) -> dict[str, str]:
    """What pruning saves of a batch, MiB: by formula, and of what autograd really holds."""
    config = shape(args)
    whole, kept = formula_mib(config, batch, pruned)
    measured = batch * (held_bytes(config, DENSE) - held_bytes(config, pruned)) / MIB
    return {"formula_saved_mib": f"{whole - kept:.3f}", "ours_saved_mib": f"{measured:.3f}"}


@cache
def held_bytes(config: ResMLPConfig, pruned: str) -> int:
    """Bytes that autograd really holds of one sample from the forward to the backward, without weights and images."""
    model = ResMLP(config)
    if pruned:
        fxmask.apply(model, fxmask.ActivationPruning(*split(pruned)), include="blocks.*")
    images, labels = torch.randn(1, config.channels, config.image, config.image), torch.full((1, config.classes), 1 / config.classes)
    return saved_by_autograd(model, images, labels)
