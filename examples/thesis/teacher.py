"""`--teacher DIR`: a second target for every image, the logits of a dense run that has ended (G. Hinton, O. Vinyals, J. Dean, 2015, arXiv:1503.02531).

`--teach-blocks` adds a third, what its blocks give (A. Romero et al., 2015, arXiv:1412.6550), for a pupil of its width and depth; `--from-teacher` gives the
pupil its weights to begin with. The teacher sees what the pupil sees, augmented alike. Its forward counts among the run's FLOPs; its own training does not:
add that run's.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from thesis import checkpoint
from thesis.masked_model import build

SAME = ("data", "seed", "holdout")  # or it has learnt what is held out from the pupil


def watched(model: nn.Module, images: Tensor) -> tuple[Tensor, list[Tensor]]:
    """(the model's logits [B, classes], what each of its `blocks` gives [B, T, C])."""
    given: list[Tensor] = []
    hooks = [block.register_forward_hook(lambda module, args, out: given.append(out)) for block in model.blocks]  # type: ignore[union-attr]
    try:
        return model(images), given
    finally:
        for hook in hooks:
            hook.remove()


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
        self.blocks = args.teach_blocks
        if not 0 <= self.blocks < float("inf"):
            raise checkpoint.CheckpointError(f"--teach-blocks: expected a weight of 0 or more, got {self.blocks}.")
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

    def meet(self, pupil: nn.Module, begin: bool) -> None:
        """Give the pupil the teacher's weights where it shall `begin` with them. Raises CheckpointError for one of another shape where that matters."""
        theirs, ours = ({name: tuple(t.shape) for name, t in model.state_dict().items()} for model in (self.model, pupil))
        differ = [name for name in theirs | ours if theirs.get(name) != ours.get(name)]
        if differ and (begin or self.blocks):
            what = f"{differ[0]} {theirs.get(differ[0], 'missing')}, the pupil has {ours.get(differ[0], 'none')}"
            raise checkpoint.CheckpointError(f"--from-teacher, --teach-blocks: expected a teacher of the pupil's shape, got {what}.")
        if begin:
            pupil.load_state_dict(self.model.state_dict())

    def loss(self, images: Tensor, logits: Tensor, blocks: list[Tensor], hard: Tensor) -> Tensor:
        """Part of the loss on the labels, part of the divergence from the teacher, times the square of the temperature; and how far the blocks are off.

        [B, C, H, W], [B, classes], a [B, T, C] of each block, [] -> []. The last is the mean over the blocks of |pupil - teacher|^2 / |teacher|^2.
        """
        with torch.no_grad():
            theirs, given = watched(self.model, images)
        wanted = F.log_softmax(theirs.float() / self.temperature, dim=-1)
        soft = F.kl_div(F.log_softmax(logits / self.temperature, dim=-1), wanted, reduction="batchmean", log_target=True)
        loss = (1 - self.share) * hard + self.share * self.temperature**2 * soft
        if not self.blocks:
            return loss
        far = [F.mse_loss(ours.float(), t.float()) / t.float().square().mean() for ours, t in zip(blocks, given, strict=True)]
        return loss + self.blocks * torch.stack(far).mean()
