"""The networks: torchvision's with weights from a file (`small.py` has those that are trained here); which of their layers are masked, how accurate they are.

The source masks convolutions without groups and leaves linears dense. Of a ConvNeXt, whose blocks are depthwise convolutions and linears, that is the stem and
the three down-sampling convolutions. The first convolution of a ResNet stays dense here: its rows have 147 elements, no multiple of 4, and the source's
quadruples straddle them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import data
import torch
from data import DataMissing, torchvision
from image_folder import open_folder
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import fxmask

CROP = 224
LAYERS: dict[str, Any] = {"conv": nn.Conv2d, "linear": nn.Linear, "all": None}  # `include` of fxmask.apply


@dataclass(frozen=True)
class Published:
    """What torchvision's V1 weights are evaluated with, and were trained for; shares in percent that the source gives of a ConvNeXt's masked layers."""

    resize: int
    epochs: int
    parameters: float | None = None
    macs: float | None = None


NETWORKS = {
    "resnet18": Published(256, 90),
    "resnet34": Published(256, 90),
    "resnet50": Published(256, 90),
    "convnext_tiny": Published(236, 600, 5.4, 4.2),
    "convnext_small": Published(230, 600, 3.1, 2.2),
}


@dataclass(frozen=True)
class Task:
    """A trained network in eval(), its images, and how long it was trained. `train(epoch)` gives training batches, `test()` all test images, `held()` the
    images that neither the network nor masks are trained with, by which recipes are chosen; None where nothing is held out.
    """

    name: str
    model: nn.Module
    train: Callable[[int], Any]
    test: Callable[[], Any]
    epochs: int
    example: Tensor
    held: Callable[[], Any] | None = None
    batch: int | None = None  # of `train`, and the most images that are read of a folder: where a run that is stopped may go on
    limit: int | None = None


def pretrained(name: str, checkpoint: Path, root: Path, *, seed: int, batch: int, workers: int, limit: int | None, device: str) -> Task:
    """A network of torchvision with weights from `checkpoint` (a state_dict), and the images of `root/val`, for learning also `root/train`.

    Raises: DataMissing for a file that is not there or does not fit, or folders that are not there.
    """
    vision = torchvision()
    if not checkpoint.is_file():
        raise DataMissing(f"--checkpoint: expected torchvision's {name} (IMAGENET1K_V1) as a state_dict in a file, got no file {checkpoint}.")
    model = getattr(vision.models, name)()
    try:
        model.load_state_dict(torch.load(checkpoint, weights_only=True, map_location="cpu"))
    except Exception as error:  # whatever bytes that are none raise
        raise DataMissing(f"--checkpoint {checkpoint}: expected the state_dict of {name}, got {type(error).__name__}: {str(error)[:300]}") from error
    t = vision.transforms
    finish = [t.ToTensor(), t.Normalize(*data.IMAGENET_STATS)]
    resize = NETWORKS[name].resize
    how = {"val": t.Compose([t.Resize(resize), t.CenterCrop(CROP), *finish]), "train": t.Compose([t.Resize(resize), t.RandomCrop(CROP), *finish])}

    def batches(part: str, generator: torch.Generator | None) -> Any:
        if not (root / part).is_dir():
            raise DataMissing(f"--data {root}: expected a folder {part} with one folder a class in it, got none.")
        images = open_folder(root / part, how[part])
        chosen = images if limit is None else torch.utils.data.Subset(images, range(0, len(images), -(-len(images) // limit)))  # of all classes
        return torch.utils.data.DataLoader(chosen, batch, shuffle=generator is not None, generator=generator, num_workers=workers)

    return Task(
        name,
        model.eval().to(device),
        train=lambda epoch: batches("train", data.seeded(seed, epoch)),
        test=lambda: batches("val", None),
        epochs=NETWORKS[name].epochs,
        example=torch.zeros(1, 3, CROP, CROP, device=device),
        batch=batch,
        limit=limit,
    )


def masked(task: Task, layers: str, **options: Any) -> nn.Module:
    """A masked copy of the network, in eval(). Narrow layers are masked, too, which fxmask leaves alone by default."""
    return fxmask.apply(copy.deepcopy(task.model), fxmask.NMMask(**options), include=LAYERS[layers], exclude=()).eval()


@torch.no_grad()
def accuracy(model: nn.Module, batches: Any) -> dict[str, float]:
    """Top-1 and top-5 in percent of all images, in eval()."""
    model.eval()
    device = next(model.parameters()).device
    hits, n = {1: 0, 5: 0}, 0
    for x, y in batches:
        best = model(x.to(device)).topk(5, 1).indices == y.to(device)[:, None]
        n += len(y)
        for k in hits:
            hits[k] += int(best[:, :k].sum())
    return {f"top{k}": 100 * hit / n for k, hit in hits.items()}


def shares(task: Task, layers: str) -> dict[str, float]:
    """Percent of the parameters, and of one image's multiply-adds, in layers that are masked (kept or not); how many these are, and how many stay dense."""
    model = masked(task, layers)
    rows = fxmask.explain(model).rows  # of weights without values, too
    names = {f"{type(task.model).__name__}.{r['name']}" for r in rows if r["masked"]}
    weights = sum(model.get_parameter(f"{r['name']}.weight").numel() for r in rows if r["masked"])
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        task.model(task.example)
    flop = {name: sum(ops.values()) for name, ops in counter.get_flop_counts().items()}
    return {
        "parameters_pct": 100 * weights / sum(p.numel() for p in task.model.parameters()),
        "macs_pct": 100 * sum(flop.get(name, 0) for name in names) / flop["Global"],
        "layers": len(names),
        "dense": sum(not r["masked"] for r in rows),
    }
