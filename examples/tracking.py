"""What a run leaves behind: a csv row an epoch, and the life of every block of the masks.

Everything is counted on the device and read once an epoch, so that following the masks does not make a GPU wait. All counts are of training
steps: the mask asked for before a step is the mask that this step's forward uses.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import torch
from thesis import csv_files
from torch import Tensor, nn

import fxmask

COLUMNS = ("epoch", "train_loss", "val_loss", "train_acc", "top1", "top5", "ratio_achieved", "flips", "seconds")
FIGURE_LAYERS = {"XPatch": "blocks.0.patch_mix.weight", "XChannel1": "blocks.0.fc1.weight", "XChannel2": "blocks.0.fc2.weight"}


class CsvLog:
    """A csv file that is complete after every row, so that a run that was stopped still has its log."""

    def __init__(self, path: Path, columns: tuple[str, ...] = COLUMNS, append: bool = False) -> None:
        self.path, self.columns = path, columns
        if append and path.exists() and path.stat().st_size:
            return
        with path.open("w", newline="") as file:
            csv.writer(file).writerow(columns)

    def write(self, row: dict[str, Any]) -> None:
        with self.path.open("a", newline="") as file:
            csv.DictWriter(file, self.columns).writerow(row)


def keep_epochs(path: Path, last: int) -> None:
    """Cut a csv file with a column `epoch` to its rows up to `last`, as a run that goes on from there writes the others again."""
    rows = csv_files.read(path, ("epoch",), cut_off=True)
    whole = [row for row in rows if None not in row and None not in row.values()]
    csv_files.numbers(path, whole, "epoch", kind=int)
    if rows:  # one that is cut off goes, too, where it is the only one
        csv_files.write(path, [column for column in rows[0] if column is not None], (row for row in whole if int(row["epoch"]) <= last))


class MaskTracker:
    """Follows the masks of a model from step to step: in how many each block was active, and how many blocks changed place.

    With `counts` it also tells fxmask of every step, since `start`, `refresh` and schedules count them; `fxmask.guard` does so by itself.
    A dense model costs nothing.
    """

    def __init__(self, model: nn.Module, counts: bool = True) -> None:
        self.model, self.counts = model, counts
        self.masked = any(row["masked"] for row in fxmask.explain(model).rows)
        if self.masked and counts:
            fxmask.step(model, 0)  # announces that steps will be counted
        self.now = self.read()
        self.active = {name: torch.zeros_like(mask, dtype=torch.int64) for name, mask in self.now.items()}
        self.flip_count = torch.zeros((), dtype=torch.int64, device=next(iter(self.now.values())).device if self.now else None)
        self.all_flips = 0

    def read(self) -> dict[str, Tensor]:
        """The masks of the next forward: name -> bool [block rows, block columns]; empty for a dense model."""
        return fxmask.masks(self.model) if self.masked else {}

    def before_step(self) -> None:
        """Call before every training step. All is counted in place, so that a CUDA graph of the step may hold this."""
        for name, mask in self.read().items():
            self.active[name] += mask
            self.flip_count += (mask != self.now[name]).sum()
            self.now[name].copy_(mask)

    def after_step(self) -> None:
        """Call after every optimiser step."""
        if self.masked and self.counts:
            fxmask.step(self.model)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to count on; tensors and numbers."""
        return {"now": self.now, "active": self.active, "flip_count": self.flip_count, "all_flips": self.all_flips}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        device = self.flip_count.device  # the run may have begun on another
        self.now, self.active = ({name: t.to(device) for name, t in saved[key].items()} for key in ("now", "active"))
        self.flip_count, self.all_flips = torch.as_tensor(saved["flip_count"], device=device), saved["all_flips"]

    def take_flips(self) -> int:
        """Changes of place (kept to masked or back) since the last call."""
        flips = int(self.flip_count)
        self.flip_count.zero_()
        self.all_flips += flips
        return flips

    def ratio_achieved(self) -> float:
        """Fraction of the elements of the masked weights that the next forward leaves out; 0 for a dense model and before `start`."""
        rows = [row for row in fxmask.explain(self.model).rows if row["masked"]]
        sizes = [self.model.get_parameter(f"{row['name']}.weight").numel() for row in rows]
        return sum(row["achieved_ratio"] * size for row, size in zip(rows, sizes, strict=True)) / max(1, sum(sizes))


class ActiveBlocks:
    """Writes figure 6.6's numbers: for the linears of block 0, after every epoch, the steps in which each block was active so far."""

    def __init__(self, path: Path, tracker: MaskTracker, append: bool = False) -> None:
        self.tracker = tracker
        self.layers = {layer: name for layer, name in FIGURE_LAYERS.items() if name in tracker.active}
        if not append:
            path.unlink(missing_ok=True)
        self.log = CsvLog(path, ("epoch", "layer", "block_row", "block_col", "active_steps"), append) if self.layers else None

    def write(self, epoch: int) -> None:
        if self.log is None:
            return
        with self.log.path.open("a", newline="") as file:
            rows = csv.writer(file)
            for layer, name in self.layers.items():
                for r, counts in enumerate(self.tracker.active[name].tolist()):
                    rows.writerows((epoch, layer, r, c, count) for c, count in enumerate(counts))
