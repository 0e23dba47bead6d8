"""Train a ResMLP, dense or masked, and keep a csv log and the thesis' two figures of the run.

    python examples/train.py                            # handwritten digits: nothing to download, about a second an epoch on a CPU
    python examples/train.py --ratio 0.8 --block 16 16 --epochs 30
    python examples/train.py --data cifar10 --root DIR --opt adam --lr 0.01 --weight-decay 1e-4 --warmup 5 --smoothing 0.1 --batch 128 \\
        --epochs 200 --config "ResMLP5 @ XPatch = masked 0.8 (32, 32); XChannel = masked 0.8 (32, 32);"

On a CPU the same arguments and the same number of threads give the same numbers. Accuracies are in percent, with the masks active.
There is no guard here, as in the thesis' code: weight decay, and the momenta of blocks that were kept before, move masked weights. thesis/train.py has --guard.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from checked_arguments import check_device, check_model, check_numbers
from data import Batch, Data, load
from plots import plot_run
from resmlp import PRESETS, ResMLP
from thesis import lock
from thesis.config import parse
from thesis.side_by_side import exit_code
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from tracking import ActiveBlocks, CsvLog, MaskTracker

import fxmask
from fxmask.errors import ConfigError
from fxmask.kernels.reference import MODES
from fxmask.kernels.score import CRITERIA

OPTIMISERS: dict[str, Callable[..., Optimizer]] = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": partial(torch.optim.SGD, momentum=0.9)}
DEFAULT_MODEL = {"digits": "digits", "cifar10": "cifar", "folder": "cifar"}


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    p = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    p.add_argument("--data", choices=tuple(DEFAULT_MODEL), default="digits")
    p.add_argument("--root", type=Path, help="folder of the images; nothing is downloaded")
    p.add_argument("--model", choices=tuple(PRESETS), help="default: digits for digits, else cifar")
    p.add_argument("--config", help='a configuration string of the thesis, e.g. "ResMLP5 @ XPatch = masked 0.9 (16, 16);"')
    p.add_argument("--dense", action="store_true", help="no masks")
    p.add_argument("--ratio", type=float, help="fraction of blocks that are masked, default 0.5")
    p.add_argument("--block", type=int, nargs=2, metavar=("OUT", "IN"), help="default 16 16")
    p.add_argument("--backward", choices=MODES, default="masked")
    p.add_argument("--criterion", choices=CRITERIA, default="fro")
    p.add_argument("--start", default="0", metavar="STEPS", help="first optimiser step with masks; 10ep: after ten epochs")
    p.add_argument("--refresh", type=int, default=1, metavar="STEPS", help="steps between rebuilds of the masks; 0: built once")
    p.add_argument("--schedule", metavar="KIND:STEPS", help="ramp of the ratio, such as cubic:1000, cubic:5ep,warmup=1ep or cyclic:9ep,cycles=3")
    p.add_argument("--epochs", type=int, default=20)
    p.add_argument("--batch", type=int, default=32)
    p.add_argument("--opt", choices=tuple(OPTIMISERS), default="adamw")
    p.add_argument("--lr", type=float, default=5e-3)
    p.add_argument("--min-lr", type=float, default=1e-5, help="end of the cosine")
    p.add_argument("--warmup", type=float, default=0.0, metavar="EPOCHS", help="linear warm-up from lr / 10")
    p.add_argument("--weight-decay", type=float, default=0.0)
    p.add_argument("--smoothing", type=float, default=0.0, help="label smoothing of the training loss")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--out", type=Path, default=Path("train-output"))
    p.add_argument("--threads", type=int, help="default: PyTorch's choice")
    p.add_argument("--workers", type=int, default=0, help="processes that decode large images")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = p.parse_args(argv)
    if args.config and (args.dense or args.ratio is not None or args.block):
        p.error("--config says which layers are masked and how: leave out --dense, --ratio and --block")
    if args.dense and (args.ratio is not None or args.block):
        p.error("--dense has no masks: leave out --ratio and --block")
    check_numbers(p, args)
    check_device(p, args.device)
    return args


@contextmanager
def flushed_denormals() -> Iterator[None]:
    """Inside, denormal numbers count as zero: momenta without gradients fade into them, and a CPU is many times slower on them."""
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


def steps(text: str, per_epoch: int) -> int:
    """A number of optimiser steps: "500", or in epochs "10ep"; epochs may be parts of one."""
    try:
        if text.endswith("ep") and 0 <= float(text[:-2]) < 1e9:
            return round(float(text[:-2]) * per_epoch)
        if text.isdigit():
            return int(text)
    except ValueError:
        pass
    raise fxmask.FxMaskError(f"expected a number of optimiser steps such as 500, or of epochs such as 10ep, got {text!r}.")


def number(text: str, where: str) -> float:
    """A number in an option's text."""
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{where}: expected a number, got {text!r}.") from None


def schedule(text: str | None, per_epoch: int) -> fxmask.Schedule | None:
    """`--schedule`: "cubic:1000", "linear:5ep", "cyclic:10ep,cycles=2,warmup=1ep,cooldown=2ep,initial=0.3", or nothing."""
    if text is None or text == "constant":
        return None
    kind, _, rest = text.partition(":")
    length, *more = rest.split(",")
    options: dict[str, Any] = {}
    for item in more:
        key, _, value = item.partition("=")
        if key in ("warmup", "cooldown"):
            options[key] = steps(value, per_epoch)
        elif key in ("cycles", "initial") and value:
            options[key] = int(value) if value.isdigit() else number(value, f"--schedule: {key}=")
        else:
            raise fxmask.FxMaskError(f"--schedule: expected warmup=, cooldown=, cycles= or initial= after the length, got {item!r}.")
    return fxmask.Schedule(kind=kind, steps=steps(length, per_epoch), **options)


def build(args: argparse.Namespace, data: Data) -> nn.Module:
    """The model that the command line asks for, with its masks."""
    preset = PRESETS[args.model or DEFAULT_MODEL[args.data]]
    thesis = parse(args.config) if args.config else None
    config = replace(preset, channels=data.channels, classes=data.classes, depth=thesis.depth if thesis else preset.depth)
    torch.manual_seed(args.seed)
    model = ResMLP(config).to(args.device)

    if thesis:
        masks: dict[str, Any] = thesis.apply_arguments()
    elif args.dense:
        masks = {}
    else:
        # as in the thesis, patch embedding and head stay dense
        masks = {"ratio": 0.5 if args.ratio is None else args.ratio, "block": tuple(args.block or (16, 16)), "include": "blocks.*"}
    if masks:
        masks |= {"backward": args.backward, "criterion": args.criterion, "refresh": args.refresh, "seed": args.seed}
        masks |= {"start": steps(args.start, data.steps), "schedule": schedule(args.schedule, data.steps)}
        fxmask.apply(model, **masks)
    return model


def learning_rate(step: int, total: int, lr: float, min_lr: float = 1e-5, warmup: float = 0.0) -> float:
    """Rate of one of `total` steps: a linear warm-up from lr / 10 over the first `warmup` steps, then a cosine down to min_lr."""
    if step < warmup:
        return lr * (0.1 + 0.9 * step / warmup)
    low = min(min_lr, lr)
    return low + (lr - low) * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))


def train_step(model: nn.Module, optimiser: Optimizer, lr: float, batch: Batch, smoothing: float = 0.0) -> tuple[Tensor, Tensor]:
    """One optimiser step; returns the mean loss and the number of right answers, both left on the device."""
    images, labels = batch
    for group in optimiser.param_groups:
        group["lr"] = lr
    logits = model(images)
    loss = F.cross_entropy(logits, labels, label_smoothing=smoothing)
    optimiser.zero_grad(set_to_none=True)
    loss.backward()
    optimiser.step()
    return loss.detach(), (logits.detach().argmax(1) == labels).sum()


@torch.no_grad()
def evaluate(model: nn.Module, batches: Iterable[Batch], device: str = "cpu") -> dict[str, float]:
    """Mean loss, top-1 and top-5 accuracy in percent (fewer than five classes: top-1 of as many as there are)."""
    model.eval()
    n, sums = 0, torch.zeros(3, dtype=torch.float64, device=device)  # read once, so that a GPU is not waited for at every batch
    for images, labels in batches:
        images, labels = images.to(device), labels.to(device)
        logits = model(images)
        best = logits.topk(min(5, logits.shape[1]), dim=1).indices == labels[:, None]
        n += len(labels)
        sums += torch.stack([F.cross_entropy(logits, labels, reduction="sum"), best[:, 0].sum(), best.sum()]).double()
    loss, top1, top5 = (sums / n).tolist()
    return {"val_loss": loss, "top1": 100 * top1, "top5": 100 * top5}


def progress(batches: Iterable[Batch], total: int, text: str) -> Iterable[Batch]:
    """The batches behind a progress bar, if tqdm is installed and somebody is watching."""
    try:
        from tqdm import tqdm
    except ImportError:
        return batches
    return tqdm(batches, total=total, desc=text, leave=False, disable=None)


def fit(model: nn.Module, tracker: MaskTracker, data: Data, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Train for `args.epochs`, one csv row an epoch; returns the rows."""
    optimiser = OPTIMISERS[args.opt](model.parameters(), lr=args.lr, weight_decay=args.weight_decay)
    log, blocks = CsvLog(args.out / "log.csv"), ActiveBlocks(args.out / "active_blocks.csv", tracker)
    rows, step = [], 0
    for epoch in range(1, args.epochs + 1):
        began, n = time.perf_counter(), 0
        loss_sum, right = torch.zeros((), device=args.device), torch.zeros((), dtype=torch.int64, device=args.device)
        model.train()
        for images, labels in progress(data.train(epoch), data.steps, f"epoch {epoch}"):
            lr = learning_rate(step, args.epochs * data.steps, args.lr, args.min_lr, args.warmup * data.steps)
            tracker.before_step()
            loss, hits = train_step(model, optimiser, lr, (images.to(args.device), labels.to(args.device)), args.smoothing)
            tracker.after_step()
            n, step = n + len(labels), step + 1
            loss_sum, right = loss_sum + loss * len(labels), right + hits
        scores = {"train_loss": float(loss_sum) / n, "train_acc": 100 * int(right) / n, **evaluate(model, data.test(), args.device)}
        masks = {"ratio_achieved": tracker.ratio_achieved(), "flips": tracker.take_flips()}
        rows.append({"epoch": epoch, **scores, **masks, "seconds": time.perf_counter() - began})
        log.write({k: round(v, 6) for k, v in rows[-1].items()})
        blocks.write(epoch)
        print(
            f"epoch {epoch:3d}  train loss {scores['train_loss']:.4f}  val loss {scores['val_loss']:.4f}  top-1 {scores['top1']:6.2f} %"
            f"  top-5 {scores['top5']:6.2f} %  masked {masks['ratio_achieved']:.1%}  flips {masks['flips']}  {rows[-1]['seconds']:.1f} s",
            flush=True,
        )
    return rows


def write_run(args: argparse.Namespace, data: Data, model: nn.Module) -> None:
    """Train, and leave the run's files in its folder."""
    for figure in ("accuracy.png", "active_blocks.png"):
        (args.out / figure).unlink(missing_ok=True)  # of an earlier run, whose csv files are written anew
    facts = {"parameters": sum(p.numel() for p in model.parameters()), "torch": torch.__version__, "threads": torch.get_num_threads()}
    (args.out / "run.json").write_text(json.dumps({**vars(args), **facts}, indent=1, default=str) + "\n")
    tracker = MaskTracker(model)
    if tracker.masked:
        print(fxmask.explain(model))
    fit(model, tracker, data, args)
    for path in (args.out / "log.csv", *plot_run(args.out)):
        print(path)


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status: 2 where data, a package or an argument is not as it must be."""
    args = arguments(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    return exit_code("train.py", lambda: run(args))


def run(args: argparse.Namespace) -> None:
    """One run, its folder held."""
    name = args.model or DEFAULT_MODEL[args.data]
    check_model(name, args.data)
    data = load(args.data, args.root, batch=args.batch, image=PRESETS[name].image, seed=args.seed, workers=args.workers)
    model = build(args, data)
    with lock.held(args.out):
        write_run(args, data, model)


if __name__ == "__main__":
    sys.exit(main())
