"""Folders of images, one a class, read by torchvision's ImageFolder: what is in them, and each image's augmentation by random numbers of its own."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from data import CIFAR_STATS, IMAGENET_STATS, Batch, Data, DataMissing, Pixels, colour, in_memory, seeded, torchvision
from torch.utils.data import DataLoader, Dataset

MEMORY_LIMIT_PX = 64  # folders of images up to this side are decoded once and kept in memory
Key = tuple[int, int]  # epoch, index


class Seeded(Dataset[Any]):
    """Images by (epoch, index), so that an epoch's number reaches workers that live on, and each image has random numbers of its own."""

    def __init__(self, images: Any, seed: int) -> None:
        self.images, self.seed = images, seed

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, key: Key) -> Any:
        digest = hashlib.blake2b(f"{self.seed} {key[0]} {key[1]}".encode(), digest_size=4).digest()
        number = int.from_bytes(digest, "big")
        random.seed(number)  # timm's transforms draw from it
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(number)
            return self.images[key[1]]


def folder(root: Path, *, batch: int, image: int, seed: int, workers: int, holdout: int = 0, device: str = "cpu") -> Data:
    """`root/train/<class>/*` and `root/test/<class>/*` (or `val`), any image files.

    Raises:
        DataMissing: no such folders, none with images, other classes in one than in the other, or a file that is no image.
    """
    test_dir = root / "test" if (root / "test").is_dir() else root / "val"
    if not (root / "train").is_dir() or not test_dir.is_dir():
        raise DataMissing(
            f"no image folders in {root}: expected {root / 'train'} and {root / 'test'} (or val), each with one folder a class.\n"
            "  fix: give --root the folder that holds them."
        )
    t = torchvision().transforms
    if image <= MEMORY_LIMIT_PX:
        crop = centre = t.Compose([t.Resize((image, image)), t.PILToTensor()])
    else:
        finish = [t.ToTensor(), t.Normalize(*IMAGENET_STATS)]
        crop = t.Compose([t.RandomResizedCrop(image), t.RandomHorizontalFlip(), *finish])
        centre = t.Compose([t.Resize(image * 8 // 7), t.CenterCrop(image), *finish])
    train, test = open_folder(root / "train", crop), open_folder(test_dir, centre)
    same_classes(root, ("train", test_dir.name), (train.classes, test.classes))
    if image <= MEMORY_LIMIT_PX:
        stats = CIFAR_STATS if image == 32 else IMAGENET_STATS
        return in_memory("folder", decoded(train, stats), decoded(test, stats), batch=batch, seed=seed, augment=True, holdout=holdout, device=device)
    if holdout:
        raise DataMissing(f"holdout={holdout} of images of {image} pixels: expected images of at most {MEMORY_LIMIT_PX}, or folders train and val.")

    def shuffled(epoch: int) -> Iterator[Batch]:
        generator = seeded(seed, epoch)
        keys: Any = [(epoch, index) for index in torch.randperm(len(train), generator=generator).tolist()]
        return iter(DataLoader(Seeded(train, seed), batch, sampler=keys, num_workers=workers, generator=generator))

    return Data(
        "folder",
        image,
        channels=3,
        classes=len(train.classes),
        steps=-(-len(train) // batch),
        train=shuffled,
        test=lambda: iter(DataLoader(test, batch, num_workers=workers)),
    )


def open_folder(path: Path, transform: Callable[[Any], Any]) -> Any:
    """An ImageFolder whose files are looked at when they are read."""
    try:
        return torchvision().datasets.ImageFolder(str(path), transform, loader=decode)
    except FileNotFoundError as error:
        raise DataMissing(f"{path.parent}: expected one folder a class with images in it, got: {error}") from error


def decode(path: str) -> Any:
    """torchvision's reader, with the file's name where it fails: one of a million images."""
    from torchvision.datasets.folder import default_loader

    try:
        return default_loader(path)
    except (OSError, SyntaxError, ValueError) as error:
        raise DataMissing(f"{path}: expected an image, got {type(error).__name__}: {error}.\n  fix: restore the file, or take it out of the folder.") from error


def same_classes(root: Path, names: Sequence[str], classes: Sequence[list[str]]) -> None:
    """Each folder is numbered on its own, so a class that one of the two lacks would shift the labels of those behind it."""
    if classes[0] == classes[1]:
        return
    only = [sorted(set(classes[i]) - set(classes[1 - i])) for i in (0, 1)]
    alone = "".join(f"; only in {name}: {', '.join(mine[:5])}" for name, mine in zip(names, only, strict=True) if mine)
    what = f"expected the same classes in {names[0]} and {names[1]}, got {len(classes[0])} and {len(classes[1])}{alone}"
    raise DataMissing(f"{root}: {what}.\n  fix: those folders.")


def decoded(dataset: Any, stats: tuple[tuple[float, ...], tuple[float, ...]]) -> Pixels:
    """Every image of an ImageFolder, decoded once."""
    images, labels = zip(*dataset, strict=True)
    return colour(torch.stack(images), list(labels), stats)
