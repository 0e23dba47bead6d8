"""What a benchmark is asked for, checked before anything runs: one line and exit code 2 where it cannot be meant."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import fxmask
from fxmask.errors import ConfigError
from fxmask.kernels.errors import message


def masks(block: int, ratios: Sequence[float], **options: Any) -> None:
    """A block, ratios and options that no mask can have are errors."""
    for ratio in ratios:
        fxmask.WeightMask(ratio=ratio, block=(block, block), **options)


def device_here(name: str) -> torch.device:
    """The device that `--device` names; ConfigError where it is not here."""
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError):  # no name of a device, or none that is here
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ConfigError(message(f"--device: expected cpu, or cuda where there is a GPU, got {name!r}.", fix="use --device cpu."))
    return device


def append(path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, Any]], end: str = "\n") -> None:
    """Rows behind those that a csv has."""
    held = path.read_bytes() if path.exists() else b""
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, lineterminator=end)
        if not held:
            writer.writeheader()
        elif not held.endswith(b"\n"):  # a killed run left half a row
            file.write(end)
        writer.writerows(rows)


def table(option: str, path: Path | None, columns: Sequence[str]) -> None:
    """Make the csv that rows are appended to, and its folder, if one was given; ConfigError where that cannot be, or the csv has other columns."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+", newline="", encoding="utf-8-sig", errors="replace") as file:  # which a spreadsheet begins by a mark
            file.seek(0)
            there = next(csv.reader(file), list(columns))
    except (OSError, csv.Error) as error:
        raise ConfigError(f"{option} {path}: cannot be written: {getattr(error, 'strerror', None) or error}; name another file.") from None
    if there != list(columns):
        raise ConfigError(f"{option} {path}: expected the columns {', '.join(columns)}, got {', '.join(there)}; name another file.")
