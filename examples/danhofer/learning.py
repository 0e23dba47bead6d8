"""Learning masks by the source's recipe: logits alone, AdamW with lr 1.0, beta 0.9, weight decay 1e-4, a tenth of the rate every 3 epochs, no warm-up.

Weights, biases, norms and what they have averaged rest; stochastic depth and dropout are off, because only masked layers are in train(). The source does not
say the batch, the second beta (0.999 here), nor how long: "at most 10 % of the original epochs" is 9 of a ResNet's 90, which is three times 3 epochs. For
digits the defaults are ours: 9 epochs are 810 steps there and 90,000 on ImageNet, so the logits begin at the masks by magnitude and move more slowly.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from data import DataMissing
from torch import Tensor, nn

from danhofer.networks import Task, masked

EPOCHS, BETAS, DECAY, EVERY = 9, (0.9, 0.999), 1e-4, 3
RECIPE: dict[str, Any] = {"lr": 1.0, "init": "glorot"}
FOR_DIGITS: dict[str, Any] = {"lr": 0.3, "init": "magnitude"}


def learn(task: Task, layers: str, epochs: int, seed: int, lr: float, state: Path | None = None, **options: Any) -> nn.Module:
    """A copy of the network whose masks have been learned, in eval(); goes on from the file `state`, which is written after every epoch, where it is there.

    All random numbers of an epoch hang on the seed and the epoch, so a run that goes on ends with the bits of one that was not stopped.
    """
    torch.manual_seed(seed)  # of the logits
    model = masked(task, layers, mode="learned", **options)
    logits: dict[str, Tensor] = {n: p for n, p in model.named_parameters() if n.endswith("nm_logits")}
    for p in model.parameters():
        p.requires_grad_(False)
    for p in logits.values():
        p.requires_grad_(True)
    optimizer = torch.optim.AdamW(logits.values(), lr=lr, betas=BETAS, weight_decay=DECAY)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, EVERY, 0.1)
    settings = {"model": task.name, "layers": layers, "seed": seed, "lr": lr, **options}
    first = _load(state, settings, logits, optimizer, schedule)
    for layer in (m for m in model.modules() if "nm_logits" in m._parameters):
        layer.train()
    for epoch in range(first, epochs):
        torch.manual_seed(seed * 1_000_003 + epoch)
        loss = _epoch(task, model, optimizer, epoch)
        schedule.step()
        print(f"epoch {epoch + 1} of {epochs}: loss {loss:.4f}", flush=True)
        if state is not None:
            _save(state, {"settings": settings, "epoch": epoch + 1, "logits": logits, "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()})
    return model.eval()


def _epoch(task: Task, model: nn.Module, optimizer: torch.optim.Optimizer, epoch: int) -> float:
    total, n, device = torch.zeros((), device=task.example.device), 0, task.example.device
    for x, y in task.train(epoch):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
        loss.backward()
        optimizer.step()
        total, n = total + loss.detach() * len(y), n + len(y)
    return float(total) / n


def _save(path: Path, state: dict[str, Any]) -> None:
    part = path.with_name(f".{path.name}.part")
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(state, part)
    os.replace(part, path)


def _load(path: Path | None, settings: dict[str, Any], logits: dict[str, Tensor], optimizer: torch.optim.Optimizer, schedule: Any) -> int:
    """The epoch to go on with."""
    if path is None or not path.is_file():
        return 0
    saved = torch.load(path, weights_only=True, map_location="cpu")
    if saved["settings"] != settings:
        raise DataMissing(f"--state {path}: expected {settings}, got a run of {saved['settings']}.\n  fix: another file, or the options of that run.")
    with torch.no_grad():
        for name, p in logits.items():
            p.copy_(saved["logits"][name])
    optimizer.load_state_dict(saved["optimizer"])
    schedule.load_state_dict(saved["schedule"])
    return int(saved["epoch"])
