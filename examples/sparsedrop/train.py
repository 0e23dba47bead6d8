"""One run of table 1: a task by one method at one p, until the loss on the held-out part has not fallen for `patience` evaluations."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from benchmarks.checked import device_here
from torch import Tensor, nn
from torch.nn import functional as F

import fxmask
from fxmask.errors import ConfigError
from sparsedrop.models import NETWORKS, maker
from sparsedrop.tasks import SIDE, Loaded, Task

METHODS = ("dense", "dropout", "sparsedrop")


def build(task: Task, loaded: Loaded, method: str, p: float, block: int) -> nn.Module:
    """The network, with no dropout, a Dropout before every linear, or block dropout in every linear."""
    linear, size = maker(method, p), dict(task.size)
    channels = 1 if task.network == "gpt" else loaded.train[0].shape[1]
    where = {
        "mlp": {"inputs": channels * SIDE**2, "classes": loaded.classes},
        "vit": {"channels": channels, "side": SIDE, "classes": loaded.classes},
        "gpt": {"vocabulary": loaded.classes},
    }[task.network]
    model = NETWORKS[task.network](linear, **where, **size)
    if method != "sparsedrop":
        return model
    return fxmask.apply(model, fxmask.BlockDropout(p, (block, block)), exclude=())  # the output layer, too, which is left dense by default


def check(a: argparse.Namespace) -> None:
    """ConfigError for a rate, a block or a device of the command line that no run can have: before the first one."""
    for p in a.rates or (0.5,):
        fxmask.BlockDropout(p, (a.block, a.block))
    device_here(a.device)


def batches(part: tuple[Tensor, Tensor], size: int, order: torch.Generator | None = None) -> Iterator[tuple[Tensor, Tensor]]:
    x, y = part
    rows = torch.arange(len(y)) if order is None else torch.randperm(len(y), generator=order)
    for chosen in rows.to(y.device).split(size):
        yield x[chosen], y[chosen]


@torch.no_grad()
def evaluate(model: nn.Module, part: tuple[Tensor, Tensor], size: int) -> tuple[float, float]:
    """(mean loss, accuracy in percent) over a part."""
    model.eval()
    loss, right, seen = 0.0, 0, 0
    for x, y in batches(part, size):
        logits = model(x).flatten(0, -2)
        loss += float(F.cross_entropy(logits, y.flatten(), reduction="sum"))
        right += int((logits.argmax(-1) == y.flatten()).sum())
        seen += y.numel()
    return loss / seen, 100 * right / seen


def train(task: Task, loaded: Loaded, method: str, p: float, block: int, seed: int, device: str) -> dict[str, Any]:
    """Train and return what the table needs of the evaluation with the lowest loss. On CUDA in mixed float16, as the source does."""
    torch.manual_seed(seed)
    loaded, begin = loaded.to(device), time.perf_counter()
    model = build(task, loaded, method, p, block).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.lr, weight_decay=task.weight_decay)
    half = torch.device(device).type == "cuda"
    scaler = torch.amp.GradScaler(device, enabled=half)
    order, steps, worse, best = torch.Generator().manual_seed(seed), 0, 0, {"val_loss": float("inf"), "val_accuracy": 0.0, "best_step": 0}
    train_seconds = 0.0
    for x, y in chain.from_iterable(batches(loaded.train, task.batch, order) for _ in range(task.epochs)):
        at = time.perf_counter()
        model.train()
        with torch.autocast(torch.device(device).type, torch.float16, enabled=half):
            loss = F.cross_entropy(model(x).flatten(0, -2).float(), y.flatten())
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        steps += 1
        train_seconds += time.perf_counter() - at
        if steps % task.every == 0:
            held_loss, accuracy = evaluate(model, loaded.held, task.batch)
            worse = 0 if held_loss < best["val_loss"] else worse + 1
            if not worse:
                best = {"val_loss": held_loss, "val_accuracy": accuracy, "best_step": steps}
            if worse == task.patience:
                break
    if not best["best_step"]:
        what = f"expected an evaluation every {task.every} steps with a finite loss, got none in {steps} steps of {len(loaded.train[1])} images"
        raise ConfigError(f"task {task.name}: {what}.\n  fix: more images.")
    ended = "patience" if worse == task.patience else "epochs"
    return {**best, "steps": steps, "ended": ended, "train_seconds": train_seconds, "seconds": time.perf_counter() - begin}
