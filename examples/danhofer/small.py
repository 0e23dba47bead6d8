"""Small networks that the scripts train themselves, for digits and for CIFAR-10: three or five convolutions with batch norm, and a linear.

A part of the training images, the same for all seeds, is held out of everything but the choice of recipes (`choose.py`), which reads no test image.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import data
import torch
from data import Data, DataMissing
from torch import nn

from danhofer.networks import Task


@dataclass(frozen=True)
class Small:
    """A network: channels of its images, width and stride of its convolutions, epochs and batch of its training; batch of mask learning; images held out."""

    channels: int
    convolutions: tuple[tuple[int, int], ...]
    epochs: int
    batch: int
    learning_batch: int
    held: int


SMALL = {
    "digits": Small(1, ((8, 1), (8, 2), (16, 2)), epochs=100, batch=128, learning_batch=16, held=287),
    "cifar10": Small(3, ((8, 2), (16, 2), (16, 1), (32, 2), (64, 1)), epochs=8, batch=128, learning_batch=128, held=5000),
}


def network(name: str) -> nn.Sequential:
    """3x3 convolutions, batch norm and ReLU; the mean over pixels; a linear. No quadruple fills the rows of the first convolution: they have 9, or 27."""
    of, found = SMALL[name], list[nn.Module]()
    inputs = of.channels
    for outputs, stride in of.convolutions:
        found += [nn.Conv2d(inputs, outputs, 3, padding=1, stride=stride, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
        inputs = outputs
    return nn.Sequential(*found, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 10))


@cache
def images(name: str, root: Path | None, batch: int) -> Data:
    """The set in batches, without what is held out; loaded once. CIFAR-10 in its binary form, or as image files, one folder a class. Raises: DataMissing."""
    if name != "digits" and root is None:
        raise DataMissing(f"--model {name}: expected --data FOLDER with its images: nothing is downloaded.")
    files = name if name == "digits" or root is None or (root / "cifar-10-batches-py").is_dir() else "folder"
    try:
        return data.load(files, root, batch=batch, holdout=SMALL[name].held)
    except DataMissing as error:
        raise DataMissing(str(error).replace("--root", "--data").replace("holdout:", f"--data {root}: holdout:")) from None  # as it is called here


def of_seed(found: Data, seed: int) -> Data:
    assert found.of_seed is not None  # in memory
    return found.of_seed(seed)


def trained(name: str, seed: int, root: Path | None = None, batch: int | None = None, epochs: int | None = None) -> Task:
    """The network, trained now: AdamW, a cosine from 0.01. batch: of mask learning. Raises: DataMissing."""
    of = SMALL[name]
    shown, again = (of_seed(images(name, root, size), seed) for size in (of.batch, batch or of.learning_batch))
    epochs = of.epochs if epochs is None else epochs
    torch.manual_seed(seed)
    model = network(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    for epoch in range(epochs):
        for x, y in shown.train(epoch):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        schedule.step()
    return Task(name, model.eval(), again.train, again.test, epochs, next(iter(again.train(0)))[0][:1], again.held)
