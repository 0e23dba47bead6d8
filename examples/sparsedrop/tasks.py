"""The tasks of SparseDrop's table 1 and their data: two parts of the training set, to train on and to choose p by. Nothing is downloaded.

| task | where its data come from |
| --- | --- |
| digits | scikit-learn's 8x8 digits, each pixel repeated to 32x32: in MNIST's place where nothing else is at hand |
| mnist, fashion | torchvision's files under --root, padded to 32x32 |
| cifar10 | torchvision's files, or train/<class>/* image files, under --root |
| gpt | the text of Python's own help topics (pydoc_data), in pieces of `context` characters |
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import data
import torch
from image_folder import decoded, open_folder
from torch import Tensor
from torch.nn import functional as F

SIDE = 32


@dataclass(frozen=True)
class Task:
    """One row of the published settings; `size` of the network: width, depth, heads, patch or context."""

    name: str
    network: str
    train: int
    held: int
    batch: int
    lr: float
    weight_decay: float
    every: int  # steps between evaluations
    patience: int  # evaluations without a better loss before the run ends
    epochs: int
    size: tuple[tuple[str, int], ...] = ()


_VIT = {"network": "vit", "train": 16_384, "held": 4_096, "batch": 64, "lr": 1e-4, "weight_decay": 0.0, "every": 200, "epochs": 50}
FULL = {
    "digits": Task("digits", "mlp", 1_149, 288, 128, 1e-3, 0.0, 50, 5, 100),
    "mnist": Task("mnist", "mlp", 16_384, 4_096, 1_024, 1e-3, 0.0, 50, 5, 100),
    "fashion": Task("fashion", patience=5, **_VIT),  # type: ignore[arg-type]
    "cifar10": Task("cifar10", patience=10, **_VIT),  # type: ignore[arg-type]
    "gpt": Task("gpt", "gpt", 4_096, 1_024, 32, 3e-4, 0.1, 200, 5, 100),
}
# the same in minutes on two cores
_SMALL_GPT = (("width", 128), ("depth", 2), ("heads", 4), ("context", 64))
_SMALL_VIT = (("width", 128), ("depth", 2), ("heads", 4), ("patch", 4))
SMALL = {
    "digits": dataclasses.replace(FULL["digits"], every=10, epochs=40, size=(("width", 256),)),
    "mnist": dataclasses.replace(FULL["mnist"], train=4_096, held=1_024, batch=256, epochs=20, size=(("width", 256),)),
    "fashion": dataclasses.replace(FULL["fashion"], train=2_048, held=1_024, lr=1e-3, every=32, epochs=12, size=_SMALL_VIT),
    "cifar10": dataclasses.replace(FULL["cifar10"], train=2_048, held=1_024, lr=1e-3, every=32, epochs=12, size=_SMALL_VIT),
    "gpt": dataclasses.replace(FULL["gpt"], train=1_024, held=256, lr=1e-3, every=32, epochs=8, size=_SMALL_GPT),
}
TASKS = {"full": FULL, "small": SMALL}


@dataclass(frozen=True)
class Loaded:
    """A task's data in memory: images float [n, C, 32, 32] and labels [n], or characters [n, T] and those that follow them."""

    train: tuple[Tensor, Tensor]
    held: tuple[Tensor, Tensor]
    classes: int

    def to(self, device: str) -> Loaded:
        return Loaded(*(tuple(t.to(device) for t in part) for part in (self.train, self.held)), self.classes)  # type: ignore[arg-type]


def load(task: Task, root: Path | None) -> Loaded:
    """The same parts in every run; fewer where the data have fewer, in the same proportion. Raises: data.DataMissing."""
    x, y, classes = characters(dict(task.size).get("context", 128)) if task.network == "gpt" else images(task.name, root)
    share = min(1.0, len(y) / (task.train + task.held))
    train, held = int(share * task.train), int(share * task.held)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(data.HOLDOUT_SEED))
    first, then = order[:train], order[train : train + held]
    return Loaded((x[first], y[first]), (x[then], y[then]), classes)


def images(name: str, root: Path | None) -> tuple[Tensor, Tensor, int]:
    """All training images, normalised, at 32x32."""
    pixels = digits() if name == "digits" else stored(name, root)
    x = (pixels.images / pixels.top - pixels.mean) / pixels.std
    return x, pixels.labels, int(pixels.labels.max()) + 1


def digits() -> data.Pixels:
    pixels, _ = data.digits()
    return dataclasses.replace(pixels, images=F.interpolate(pixels.images, size=SIDE, mode="nearest"))


def stored(name: str, root: Path | None) -> data.Pixels:
    """What lies under `root`."""
    if root is None:
        raise data.DataMissing(f"task {name} needs --root, the folder where its images lie; digits and gpt need none.")
    if name == "cifar10":
        return data.cifar10(root)[0] if not (root / "train").is_dir() else image_folder(root / "train")
    vision = data.torchvision()
    kind = vision.datasets.MNIST if name == "mnist" else vision.datasets.FashionMNIST
    try:
        found = kind(str(root), train=True, download=False)
    except (RuntimeError, ValueError, AssertionError) as error:  # not there, or damaged
        why = str(error).split(" You can")[0] or type(error).__name__
        raise data.DataMissing(f"{kind.__name__} is not in {root}: expected torchvision's files there, got: {why}") from None
    x = F.pad(found.data[:, None], (2, 2, 2, 2))
    return data.Pixels(x, found.targets, x.float().mean() / 255, x.float().std() / 255)


def image_folder(root: Path) -> data.Pixels:
    vision = data.torchvision()
    shrink = vision.transforms.Compose([vision.transforms.Resize((SIDE, SIDE)), vision.transforms.PILToTensor()])
    return decoded(open_folder(root, shrink), data.CIFAR_STATS)


def characters(context: int) -> tuple[Tensor, Tensor, int]:
    """Pieces of Python's help topics, one after another, and the characters that follow: int64 [n, context] each."""
    from pydoc_data.topics import topics

    text = "".join(topics[name] for name in sorted(topics))
    number = {c: i for i, c in enumerate(sorted(set(text)))}
    flat = torch.tensor([number[c] for c in text])
    n = (len(flat) - 1) // context
    return flat[: n * context].view(n, context), flat[1 : n * context + 1].view(n, context), len(number)
