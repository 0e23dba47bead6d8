"""The examples' data sets as one small object: `Data.train(epoch)` and `Data.test()` give batches (images [B, C, H, W], labels [B]).

Small images live in memory as bytes and are augmented a batch at a time, which keeps two cores busy with the model instead of with image
decoding. The order of the batches and the augmentation depend on nothing but the seed and the epoch, so that a run can be repeated, and two
models can be shown the same batches. Images in memory can lie on a device, where they are then augmented; what is drawn is drawn on the CPU, so that it is
the same everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from fxmask import FxMaskError

Batch = tuple[Tensor, Tensor]
IMAGENET_STATS = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
HOLDOUT_SEED = 5000
BATCHES_AT_ONCE = {"cuda": 16}  # that are augmented together: of one alone a GPU would wait for the launches
CIFAR_STATS = ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))


class DataMissing(FxMaskError):
    """The data set, or a package that reads it, is not here; the message says what and what to do."""

    def __init__(self, what: str) -> None:
        super().__init__(what.rpartition("data.DataMissing: ")[2].rstrip())  # a DataLoader's worker puts its traceback in front


@dataclass(frozen=True)
class Data:
    """A data set cut into batches. `steps` is the number of training batches an epoch, the last one possibly smaller.

    `held` gives the training images that were held out to choose recipes by; none where nothing is held out.
    """

    name: str
    image: int
    channels: int
    classes: int
    steps: int
    train: Callable[[int], Iterator[Batch]]
    test: Callable[[], Iterator[Batch]]
    held: Callable[[], Iterator[Batch]] | None = None
    of_seed: Callable[[int], Data] | None = None  # the same images, not loaded again, in the order of another seed; None: not in memory


@dataclass(frozen=True)
class Pixels:
    """Images in memory: uint8 [n, C, H, W] and labels [n], brought to `(x / top - mean) / std` a batch at a time."""

    images: Tensor
    labels: Tensor
    mean: Tensor
    std: Tensor
    top: float = 255.0

    def to(self, device: str) -> Pixels:
        return Pixels(*(t.to(device) for t in (self.images, self.labels, self.mean, self.std)), self.top)

    def split(self, out: int) -> tuple[Pixels, Pixels]:
        """All but `out` images, and those: the same ones in every run."""
        if not 0 < out < len(self.labels):
            raise DataMissing(f"holdout: expected fewer than the {len(self.labels)} training images and at least one, got {out}.")
        order = torch.randperm(len(self.labels), generator=torch.Generator().manual_seed(HOLDOUT_SEED))
        return tuple(replace(self, images=self.images[rows], labels=self.labels[rows]) for rows in (order[out:], order[:out]))  # type: ignore[return-value]

    def batches(self, size: int, generator: torch.Generator | None = None, augment: bool = False) -> Iterator[Batch]:
        """All images once: shuffled if there is a generator, flipped and cropped at random if `augment`."""
        n = len(self.labels)
        order = torch.arange(n) if generator is None else torch.randperm(n, generator=generator)
        drawn = draws(order.split(size), self.images.shape[2] // 8, generator) if augment and generator is not None else None
        # to the device once an epoch: a step that copies its few numbers there would wait for the step before it
        order, drawn = order.to(self.images.device), None if drawn is None else tuple(t.to(self.images.device) for t in drawn)
        several = size * BATCHES_AT_ONCE.get(self.images.device.type, 1)
        for at, rows in zip(range(0, max(n, 1), several), order.split(several), strict=True):
            x = self.images[rows]
            if drawn is not None:
                x = flip_and_crop(x, *(t[..., at : at + several] for t in drawn))
            x = (x / self.top - self.mean) / self.std
            yield from zip(x.split(size), self.labels[rows].split(size), strict=True)


def draws(batches: Iterable[Tensor], pad: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """What is drawn for all images of an epoch, batch by batch: whether each is mirrored, bool [n], and its shift, [2, n] in 0 to 2 pad."""
    flips, shifts = [], []
    for rows in batches:
        flips.append(torch.rand(len(rows), generator=generator) < 0.5)
        shifts.append(torch.randint(0, 2 * pad + 1, (2, len(rows)), generator=generator))
    return torch.cat(flips), torch.cat(shifts, 1)


def flip_and_crop(x: Tensor, flip: Tensor, shift: Tensor) -> Tensor:
    """Mirror images [n, C, H, W] where `flip`, bool [n], and shift each by up to an eighth of its side, filled with zeros (4 pixels at 32: ours)."""
    n, _, height, width = x.shape
    x = torch.where(flip[:, None, None, None], x.flip(3), x)
    pad = height // 8
    x = torch.nn.functional.pad(x, (pad, pad, pad, pad))
    top, left = shift
    rows, cols = top[:, None] + torch.arange(height, device=x.device), left[:, None] + torch.arange(width, device=x.device)
    # advanced indices around a slice move to the front: [n, height, width, C]
    return x[torch.arange(n, device=x.device)[:, None, None], :, rows[:, :, None], cols[:, None, :]].permute(0, 3, 1, 2)


def load(
    name: str, root: Path | None = None, *, batch: int, image: int = 32, seed: int = 0, workers: int = 0, holdout: int = 0, device: str = "cpu"
) -> Data:
    """Open the data set `name`: "digits", "cifar10" or "folder". `root` is where the last two lie.

    `image` is the side in pixels to which a folder's images are brought, `workers` the number of processes that decode large ones. `holdout` training images
    are kept from training, of sets that fit into memory; those lie on `device`, and their batches too.

    Raises:
        DataMissing: the files or a package are not here.
    """
    if name not in ("digits", "cifar10", "folder"):
        raise ValueError(f"data: expected digits, cifar10 or folder, got {name!r}.")
    if name == "digits":
        return in_memory(name, *digits(), batch=batch, seed=seed, augment=False, holdout=holdout, device=device)
    if root is None:
        raise DataMissing(f"--data {name} needs --root, the folder where the images lie.")
    if name == "cifar10":
        return in_memory(name, *cifar10(root), batch=batch, seed=seed, augment=True, holdout=holdout, device=device)
    from image_folder import folder

    return folder(root, batch=batch, image=image, seed=seed, workers=workers, holdout=holdout, device=device)


def in_memory(name: str, train: Pixels, test: Pixels, *, batch: int, seed: int, augment: bool, holdout: int = 0, device: str = "cpu") -> Data:
    """Batches of two sets of images in memory."""
    held = None
    if holdout:
        train, held = train.split(holdout)
        held = held.to(device)
    train, test = train.to(device), test.to(device)
    return seeded_data(name, train, test, held, batch, seed, augment)


def seeded_data(name: str, train: Pixels, test: Pixels, held: Pixels | None, batch: int, seed: int, augment: bool) -> Data:
    """Batches in the order of a seed."""
    n, channels, image, _ = train.images.shape
    return Data(
        name,
        image,
        channels,
        classes=int(max(part.labels.max() for part in (train, test))) + 1,  # few training images, where many are held out, may lack some
        steps=-(-n // batch),
        train=lambda epoch: train.batches(batch, seeded(seed, epoch), augment),
        test=lambda: test.batches(batch),
        held=None if held is None else lambda: held.batches(batch),
        of_seed=lambda seed: seeded_data(name, train, test, held, batch, seed, augment),
    )


def seeded(seed: int, epoch: int) -> torch.Generator:
    """A generator of its own for each epoch: what one model draws cannot change the batches of another."""
    return torch.Generator().manual_seed(seed * 1_000_003 + epoch)


def digits() -> tuple[Pixels, Pixels]:
    """scikit-learn's 1,797 handwritten digits, 8x8 grey levels from 0 to 16; a fixed stratified split, a fifth of it for testing."""
    try:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    except ImportError as error:
        raise DataMissing(f"--data digits comes with scikit-learn, which cannot be imported: {error}.\n  fix: pip install scikit-learn") from error
    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(images, labels, test_size=0.2, random_state=0, stratify=labels)
    train_x, test_x = (torch.tensor(x, dtype=torch.uint8).reshape(-1, 1, 8, 8) for x in parts[:2])
    train_y, test_y = (torch.tensor(y, dtype=torch.int64) for y in parts[2:])
    mean, std = train_x.float().mean() / 16, train_x.float().std() / 16
    return Pixels(train_x, train_y, mean, std, top=16.0), Pixels(test_x, test_y, mean, std, top=16.0)


def cifar10(root: Path) -> tuple[Pixels, Pixels]:
    """CIFAR-10 in its original binary form, read by torchvision; nothing is downloaded."""
    if not (root / "cifar-10-batches-py").is_dir():
        raise DataMissing(
            f"CIFAR-10 is not here: expected the folder {root / 'cifar-10-batches-py'}.\n"
            "  fix: unpack https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz there, or give --root the folder that holds it.\n"
            "       CIFAR-10 as image files, one folder a class: --data folder."
        )
    vision = torchvision()
    try:
        parts = [vision.datasets.CIFAR10(str(root), train=train, download=False) for train in (True, False)]
    except RuntimeError as error:
        raise DataMissing(f"{root / 'cifar-10-batches-py'}: expected CIFAR-10's files, got others, or not all.\n  fix: unpack the archive anew.") from error
    return tuple(colour(torch.from_numpy(p.data).permute(0, 3, 1, 2), p.targets, CIFAR_STATS) for p in parts)  # type: ignore[return-value]


def colour(images: Tensor, labels: list[int], stats: tuple[tuple[float, ...], tuple[float, ...]]) -> Pixels:
    """RGB bytes [n, 3, H, W] with the mean and spread of each channel."""
    mean, std = (torch.tensor(s).view(3, 1, 1) for s in stats)
    return Pixels(images, torch.tensor(labels), mean, std)


def torchvision() -> ModuleType:
    """torchvision; where it is missing, the shim's message says how to get it."""
    from torchvision_shim import import_torchvision

    try:
        return import_torchvision()
    except ImportError as error:
        raise DataMissing(str(error)) from error
