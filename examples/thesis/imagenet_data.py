"""ImageNet, or any folder like it: `root/train/<class>/*` and `root/val/<class>/*`, shared out among ranks, from any step of any epoch on.

The order of an epoch hangs on the seed and the epoch, an image's augmentation on the seed, the epoch and its index: not on ranks, workers or on where a run
was broken off. Step i of an epoch shows the same images to any number of ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from data import IMAGENET_STATS, Batch, DataMissing, torchvision
from image_folder import Key, Seeded, open_folder, same_classes
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from thesis.ranks import Ranks


@dataclass(frozen=True)
class Images:
    """`train(epoch, step)` gives this rank's batches of an epoch from that step on; `test()` its share of the test images, each of them on one rank alone."""

    classes: list[str]
    train_images: int
    test_images: int
    steps: int
    train: Callable[[int, int], Iterator[Batch]]
    test: Callable[[], Iterator[Batch]]


class Order(DistributedSampler[Any]):
    """This rank's images of an epoch as (epoch, index), from the `start`-th on: those before it are not read."""

    start = 0

    def __iter__(self) -> Iterator[Key]:
        return ((self.epoch, index) for index in itertools.islice(super().__iter__(), self.start, None))

    def __len__(self) -> int:
        return self.num_samples - self.start

    def begin(self, epoch: int, start: int) -> None:
        self.set_epoch(epoch)
        self.start = start


class Listed(Dataset[Any]):
    """A Seeded whose i-th image is the i-th of `keys`, for loaders that bring their own sampler and set a transform."""

    def __init__(self, images: Seeded, keys: list[Key]) -> None:
        self.seeded, self.keys = images, keys

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, i: int) -> Any:
        return self.seeded[self.keys[i]]

    @property
    def transform(self) -> Any:
        return self.seeded.images.transform

    @transform.setter
    def transform(self, how: Any) -> None:
        self.seeded.images.transform = how


def open_images(root: Path, ranks: Ranks, *, image: int, batch: int, seed: int, workers: int, loader: str = "torchvision") -> Images:
    """Open the folder; `batch` is the number of training images of a step on all ranks. An epoch's incomplete last batch is left out, as timm and DeiT do.

    Raises:
        DataMissing: no such folder, other classes in val than in train, too few images, or a package is not here.
    """
    missing = [name for name in ("train", "val") if not (root / name).is_dir()]
    if missing:
        what = f"no ImageFolder in {root}: expected folders train and val, each with one folder a class, got no {' and no '.join(missing)}."
        raise DataMissing(f"{what}\n  fix: give --root the folder that holds them; ImageNet's validation images must be sorted into class folders first.")
    if loader == "timm":
        train, test, classes = timm_sets(root)
    else:
        train, test, classes = torchvision_sets(root, image)
    same_classes(root, ("train", "val"), classes)
    order = Order(train, ranks.world, ranks.rank, shuffle=True, seed=seed * 1_000_003, drop_last=True)
    local = batch // ranks.world
    steps = order.num_samples // local
    if not steps:
        raise DataMissing(f"{root / 'train'}: expected at least one batch of {batch} images, got {len(train)}.\n  fix: a smaller --batch, or other images.")
    mine = range(ranks.rank, len(test), ranks.world)  # no padding: an image is counted on one rank alone
    options: dict[str, Any] = {"image": image, "batch": local, "workers": workers, "ranks": ranks}
    make = timm_batches if loader == "timm" else torchvision_batches
    first, second = make(Seeded(train, seed), order, list(mine), test, **options)
    return Images(classes[0], len(train), len(test), steps, first, second)


def torchvision_sets(root: Path, image: int) -> tuple[Any, Any, tuple[list[str], list[str]]]:
    """ImageFolder with table 5.2's augmentation: random resized crop, flip, ImageNet's normalisation. The test's crop is the usual 7/8 of the short side."""
    torchvision()
    from torchvision.transforms import v2

    finish = [v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(*IMAGENET_STATS)]
    crop = v2.Compose([v2.RandomResizedCrop(image), v2.RandomHorizontalFlip(), *finish])
    centre = v2.Compose([v2.Resize(image * 8 // 7), v2.CenterCrop(image), *finish])
    train, test = open_folder(root / "train", crop), open_folder(root / "val", centre)
    return train, test, (train.classes, test.classes)


def torchvision_batches(train: Seeded, order: Order, mine: list[int], test: Any, *, image: int, batch: int, workers: int, ranks: Ranks) -> tuple[Any, Any]:
    """Loaders whose workers live from epoch to epoch."""
    options: dict[str, Any] = {"num_workers": workers, "pin_memory": ranks.device.type == "cuda", "persistent_workers": workers > 0}
    batches = DataLoader(train, batch, sampler=order, drop_last=True, **options)
    tests = DataLoader(test, batch, sampler=mine, **options)

    def from_step(epoch: int, step: int) -> Iterator[Batch]:
        order.begin(epoch, step * batch)
        return iter(batches)

    return from_step, lambda: iter(tests)


def timm_sets(root: Path) -> tuple[Any, Any, tuple[list[str], list[str]]]:
    """timm's create_dataset; `create_loader` gives it timm's transforms."""
    from timm.data import create_dataset

    train, test = (create_dataset("", root=str(root), split=name, is_training=name == "train") for name in ("train", "val"))
    return train, test, tuple(list(part.reader.class_to_idx) for part in (train, test))  # type: ignore[return-value]


def timm_batches(train: Seeded, order: Order, mine: list[int], test: Any, *, image: int, batch: int, workers: int, ranks: Ranks) -> tuple[Any, Any]:
    """timm's create_loader, which normalises on the device. It is made anew for each epoch: its samplers cannot begin in the middle, so it gets a list."""
    from timm.data import create_loader, create_transform

    size = (3, image, image)
    look: dict[str, Any] = {"mean": IMAGENET_STATS[0], "std": IMAGENET_STATS[1]}
    options: dict[str, Any] = {**look, "num_workers": workers, "persistent_workers": False, "pin_memory": ranks.device.type == "cuda", "device": ranks.device}

    def from_step(epoch: int, step: int) -> Iterator[Batch]:
        order.begin(epoch, step * batch)
        keys = list(order)
        listed: Any = Listed(train, keys[: len(keys) // batch * batch])
        loader = create_loader(listed, size, batch, is_training=False, **options)  # is_training would shuffle the list
        listed.transform = create_transform(size, is_training=True, color_jitter=0.0, use_prefetcher=True, **look)
        return iter(loader)

    tests: Any = Listed(Seeded(test, 0), [(0, i) for i in mine])
    return from_step, lambda: iter(create_loader(tests, size, batch, is_training=False, crop_pct=7 / 8, **options))
