"""The section `fixed` of a sweep file: the thesis' names of what all runs share, as options of train.py, or compared with the model and the data."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from resmlp import PRESETS

from thesis.masked_model import preset_of
from thesis.sweep_checks import SweepError, number, place, whole

NUMBERS = {"weight_decay": "weight-decay", "lr": "lr", "warmup_lr": "warmup-lr", "mixup": "mixup", "cutmix": "cutmix", "mixup_prob": "mix-prob"}
WHOLE = {"batch_size": "batch", "epochs": "epochs", "embedding_dim": "dim"}
COMPARED = {"image_size": "image", "patch_size": "patch"}  # with the fields of the model
DATA_SETS = {"digits": ("digits",), "cifar10": ("cifar10",), "folder": ("folder",), "imagenet": ("folder", "--recipe", "imagenet")}
KEYS = (*NUMBERS, *WHOLE, *COMPARED, "data_dir", "data_set", "opt", "num_classes", "pretrained_classes")


def arguments_of(fixed: dict[str, str]) -> list[str]:
    """Options of train.py for all that are options of it."""
    if "data_set" not in fixed:
        raise SweepError(f"fixed: expected data_set, one of {', '.join(DATA_SETS)}, got none.")
    name = fixed["data_set"].lower().replace("-", "").replace("_", "")
    if name not in DATA_SETS:
        raise SweepError(f"fixed.data_set: expected one of {', '.join(DATA_SETS)}, got {fixed['data_set']!r}.")
    words = ["--data", *DATA_SETS[name]]
    if "data_dir" in fixed:
        words += ["--root", str(place(fixed["data_dir"]).absolute())]
    if "opt" in fixed:
        words += ["--opt", fixed["opt"].lower()]
    for key, option in NUMBERS.items():
        words += [f"--{option}", number(f"fixed.{key}", fixed[key])] if key in fixed else []
    for key, option in WHOLE.items():
        words += [f"--{option}", str(whole(f"fixed.{key}", fixed[key], 1))] if key in fixed else []
    return words


def agree(fixed: dict[str, str], run: Namespace) -> None:
    """What train.py takes from the model and the data has the values that the file expects."""
    name = preset_of(run)
    for key, field in COMPARED.items():
        same(fixed, key, getattr(PRESETS[name], field), f"of the model {name}", "leave it out, or choose another model by train.model")
    classes = classes_of(run)
    if classes is not None:
        same(fixed, "num_classes", classes, f"of the data set {run.data}", "leave it out, or choose another data_set")
    if "pretrained_classes" in fixed:
        raise SweepError(
            f"fixed.pretrained_classes: expected none, got {fixed['pretrained_classes']!r}: every run begins with random weights.\n  fix: leave it out."
        )


def same(fixed: dict[str, str], key: str, value: int, of: str, fix: str) -> None:
    if key in fixed and whole(f"fixed.{key}", fixed[key]) != value:
        raise SweepError(f"fixed.{key}: expected {value}, that {of}, got {fixed[key]}.\n  fix: {fix}.")


def classes_of(run: Namespace) -> int | None:
    """Classes of the data; None for a folder that is not here."""
    if run.data != "folder":
        return 10
    train_dir = Path(run.root or "") / "train"
    return sum(d.is_dir() for d in train_dir.iterdir()) if run.root and train_dir.is_dir() else None
