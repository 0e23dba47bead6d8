"""`--teacher DIR`: a second target for every image, the logits of a dense run that has ended (G. Hinton, O. Vinyals, J. Dean, 2015, arXiv:1503.02531).

The teacher sees what the pupil sees, augmented alike. Its forward counts among the run's FLOPs; its own training does not: add that run's.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from thesis import checkpoint
from thesis.masked_model import build

SAME = ("data", "seed", "holdout")  # or it has learnt what is held out from the pupil


class Teacher:
    """A frozen dense model. `teach`, "0.7:2": the teacher's share of the loss, and the temperature of both sides' softmax."""

    def __init__(self, args: argparse.Namespace, preset: str, channels: int, classes: int, steps: int) -> None:
        folder = Path(args.teacher)
        try:
            self.share, self.temperature = map(float, args.teach.split(":") if ":" in args.teach else (args.teach, 1))
        except ValueError:
            self.share, self.temperature = -1.0, 0.0
        if not (0 <= self.share <= 1 and self.temperature > 0):
            raise checkpoint.CheckpointError(f"--teach: expected a share of 0 to 1 and a temperature above 0, got {args.teach!r}.")
        state = checkpoint.load(folder) or {}
        theirs: dict[str, Any] = state.get("settings", {})
        wrong = [f"{key} {theirs.get(key)!r}, the pupil has {getattr(args, key)!r}" for key in SAME if theirs.get(key) != getattr(args, key)]
        wrong += [] if theirs.get("dense") else ["masks, or no run at all"]
        if wrong or state["progress"]["step"] != theirs["epochs"] * steps:
            got = "; ".join(wrong) or f"{state['progress']['step']} of {theirs['epochs'] * steps} steps"
            raise checkpoint.CheckpointError(f"--teacher {folder}: expected a dense run that has ended, on the same images, got {got}.")
        self.model = build(argparse.Namespace(**{**vars(args), **theirs}), preset, channels, classes, steps)
        self.model.load_state_dict(state["model"])
        self.model.eval()

    def loss(self, images: Tensor, logits: Tensor, hard: Tensor) -> Tensor:
        """Part of the loss on the labels, part of the divergence from the teacher, times the square of the temperature. [B, C, H, W], [B, classes] -> []."""
        with torch.no_grad():
            wanted = F.log_softmax(self.model(images) / self.temperature, dim=-1)
        soft = F.kl_div(F.log_softmax(logits / self.temperature, dim=-1), wanted, reduction="batchmean", log_target=True)
        return (1 - self.share) * hard + self.share * self.temperature**2 * soft
