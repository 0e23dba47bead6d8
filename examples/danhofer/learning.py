"""Learning masks by the source's recipe: logits alone, AdamW with lr 1.0, beta 0.9, weight decay 1e-4, a tenth of the rate every 3 epochs, no warm-up.

Weights, biases, norms and what they have averaged rest; stochastic depth and dropout are off, because only masked layers are in train(). The source does not
say the batch, the second beta (0.999 here), nor how long: "at most 10 % of the original epochs" is 9 of a ResNet's 90, which is three times 3 epochs; a
tenth of the rate comes here with every third of the epochs.

Ours are three options, and what a recipe for small networks has of them is chosen by `choose.py`: `init="magnitude"`, where the likeliest masks begin as those
by magnitude; `loss="dense"`, which compares with the dense network's predictions instead of labels; and `keep`: of the likeliest masks at the beginning and
after each epoch, those with the least loss on training images are the result. `permute=True` learns in the order of columns of permuted masks.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from data import DataMissing
from thesis import checkpoint
from thesis.csv_files import replacing
from torch import Tensor, nn
from torch.nn import functional as F

from danhofer.networks import Task, masked

BETAS, DECAY = (0.9, 0.999), 1e-4
Recipe = dict[str, Any]
SOURCE: Recipe = {"epochs": 9, "lr": 1.0, "init": "glorot", "tau": 0.1, "soft": False, "loss": "labels", "keep": False}
RECIPES: dict[str, Recipe] = {  # of the small networks: those that `choose.py` found; of all others the source's
    "digits": SOURCE | {"lr": 0.3, "tau": 3.0, "init": "magnitude", "keep": True},
    "cifar10": SOURCE | {"epochs": 3, "lr": 0.3, "tau": 1.0, "init": "magnitude", "loss": "dense", "keep": True},
}
OF_MASK = ("init", "tau", "soft", "permute")  # of a recipe: options of NMMask
SCORED = 5_000  # training images, about, that masks are compared on: the same ones after every epoch


def learn(task: Task, layers: str, seed: int, recipe: Recipe, state: Path | None = None) -> nn.Module:
    """A copy of the network whose masks have been learned, in eval(); goes on from the file `state`, which is written after every epoch, where it is there.

    All random numbers of an epoch hang on the seed and the epoch, so a run that goes on ends with the bits of one that was not stopped.
    """
    epochs = recipe["epochs"]
    torch.manual_seed(seed)  # of the logits
    model = masked(task, layers, mode="learned", **{name: v for name, v in recipe.items() if name in OF_MASK})
    logits: dict[str, Tensor] = {n: p for n, p in model.named_parameters() if n.endswith("nm_logits")}
    for p in model.parameters():
        p.requires_grad_(False)
    for p in logits.values():
        p.requires_grad_(True)
    optimizer = torch.optim.AdamW(logits.values(), lr=recipe["lr"], betas=BETAS, weight_decay=DECAY)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, max(1, epochs // 3), 0.1)
    loss = _losses(task)[recipe["loss"]]
    settings = {"model": task.name, "layers": layers, "seed": seed, "batch": task.batch, "limit": task.limit, **recipe}
    run = {"settings": settings, "epoch": 0, "logits": logits, "best": None}
    _load(state, run, optimizer, schedule)
    if recipe["keep"] and run["best"] is None:
        _compare(task, model, loss, run)
    for epoch in range(run["epoch"], epochs):
        torch.manual_seed(seed * 1_000_003 + epoch)
        print(f"epoch {epoch + 1} of {epochs}: loss {_epoch(task, model, loss, optimizer, epoch):.4f}", flush=True)
        schedule.step()
        run["epoch"] = epoch + 1
        if recipe["keep"]:
            _compare(task, model, loss, run)
        if state is not None:
            _save(state, {**run, "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()})
    if recipe["keep"]:
        _write(logits, run["best"]["logits"])
        print(f"kept: the masks after epoch {run['best']['epoch']}", flush=True)
    return model.eval()


def _losses(task: Task) -> dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]]:
    """(predictions, images, labels) -> loss. `labels` is the source's; `dense`: the divergence (Kullback and Leibler) from the dense network's predictions."""

    def dense(found: Tensor, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = task.model(x).log_softmax(1)
        return F.kl_div(found.log_softmax(1), wanted, reduction="batchmean", log_target=True)

    return {"labels": lambda found, x, y: F.cross_entropy(found, y), "dense": dense}


def _epoch(task: Task, model: nn.Module, loss_of: Callable[..., Tensor], optimizer: torch.optim.Optimizer, epoch: int) -> float:
    for layer in (m for m in model.modules() if "nm_logits" in m._parameters):
        layer.train()
    total, n, device = torch.zeros((), device=task.example.device), 0, task.example.device
    for x, y in task.train(epoch):
        x, y = x.to(device), y.to(device)
        optimizer.zero_grad()
        loss = loss_of(model(x), x, y)
        loss.backward()
        optimizer.step()
        total, n = total + loss.detach() * len(y), n + len(y)
    return float(total) / n


@torch.no_grad()
def _compare(task: Task, model: nn.Module, loss_of: Callable[..., Tensor], run: dict[str, Any]) -> None:
    """Keep the logits of `run` as its best where their likeliest masks have less loss than any before them."""
    model.eval()
    torch.manual_seed(0)  # of random crops
    total, n, device = torch.zeros((), device=task.example.device), 0, task.example.device
    for x, y in task.train(0):
        x, y = x.to(device), y.to(device)
        total, n = total + loss_of(model(x), x, y) * len(y), n + len(y)
        if n >= SCORED:
            break
    loss, best = float(total) / n, run["best"]
    print(f"  likeliest masks: loss {loss:.4f}", flush=True)
    if best is None or loss < best["loss"]:
        run["best"] = {"loss": loss, "epoch": run["epoch"], "logits": {name: p.detach().clone() for name, p in run["logits"].items()}}


@torch.no_grad()
def _write(logits: dict[str, Tensor], values: dict[str, Tensor]) -> None:
    for name, p in logits.items():
        p.copy_(values[name])


def _save(path: Path, state: dict[str, Any]) -> None:
    with replacing(path) as part:
        checkpoint.write(part, state)


def _load(path: Path | None, run: dict[str, Any], optimizer: torch.optim.Optimizer, schedule: Any) -> None:
    """Take up a run that was stopped, if there is one."""
    if path is None or not path.exists():
        return
    try:
        saved = torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:  # whatever bytes that are none raise
        raise DataMissing(f"--state {path}: expected a run's file, got {type(error).__name__}: {str(error)[:100]}.\n  fix: another file.") from None
    if not isinstance(saved, dict) or "settings" not in saved:
        raise DataMissing(f"--state {path}: expected a run's file, got another one.\n  fix: another file.")
    if run["settings"] != run["settings"] | saved["settings"]:  # older files do not say the batch
        what = f"--state {path}: expected {run['settings']}, got a run of {saved['settings']}."
        raise DataMissing(f"{what}\n  fix: another file, or the options of that run.")
    _write(run["logits"], saved["logits"])
    optimizer.load_state_dict(saved["optimizer"])
    schedule.load_state_dict(saved["schedule"])
    run["epoch"], run["best"] = saved["epoch"], saved["best"]
