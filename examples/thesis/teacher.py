"""`--teacher DIR`: a second target for every image, the logits of a dense run that has ended (G. Hinton, O. Vinyals, J. Dean, 2015, arXiv:1503.02531).

`--teach-blocks` adds a third, what its blocks give (A. Romero et al., 2015, arXiv:1412.6550), for a pupil of its width and depth; `--from-teacher` gives the
pupil its weights to begin with. The teacher sees what the pupil sees, augmented alike. Its forward counts among the run's FLOPs; its own training does not:
add that run's.
"""

from __future__ import annotations

import argparse
from math import inf
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from thesis import checkpoint
from thesis.masked_model import build, preset_of

SAME = ("data", "holdout")  # or it has learnt what is held out from the pupil, which is the same for all seeds


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

    def __init__(self, args: argparse.Namespace, channels: int, classes: int) -> None:
        folder = Path(args.teacher)
        try:
            self.share, self.temperature = map(float, args.teach.split(":") if ":" in args.teach else (args.teach, 1))
        except ValueError:
            self.share, self.temperature = -1.0, 0.0
        if not (0 <= self.share <= 1 and 0 < self.temperature < inf):
            raise checkpoint.CheckpointError(f"--teach: expected a share of 0 to 1 and a temperature above 0, got {args.teach!r}.")
        self.blocks = args.teach_blocks
        if not 0 <= self.blocks < inf:
            raise checkpoint.CheckpointError(f"--teach-blocks: expected a weight of 0 or more, got {self.blocks}.")
        state = checkpoint.load(folder, "cpu") or {}
        theirs: dict[str, Any] = state.get("settings", {})
        wrong = [f"{key} {theirs.get(key)!r}, the pupil has {getattr(args, key)!r}" for key in SAME if theirs.get(key) != getattr(args, key)]
        wrong += [] if theirs.get("dense") else ["masks, or no run at all"]
        steps = checkpoint.facts_of(folder).get("steps")  # an epoch's, of the teacher's batches
        wanted = theirs["epochs"] * steps if isinstance(steps, int) and "epochs" in theirs else None
        if wrong or not wanted or state["progress"]["step"] != wanted:
            got = "; ".join(wrong) or f"{state['progress'].get('step')} of {wanted or 'an unknown number of'} steps"
            raise checkpoint.CheckpointError(f"--teacher {folder}: expected a dense run that has ended, on the same images, got {got}.")
        its = argparse.Namespace(**{**vars(args), "hidden": None, **theirs})  # older runs know no --hidden
        self.model = build(its, preset_of(its), channels, classes, steps)
        self.model.load_state_dict(state["model"])
        self.model.eval()

    def meet(self, pupil: nn.Module) -> None:
        """Raise CheckpointError where the pupil shall learn what the teacher's blocks give and its own give something else."""
        shapes = [(m.config.depth, m.config.tokens, m.config.dim) for m in (self.model, pupil)]  # type: ignore[union-attr]
        if self.blocks and shapes[0] != shapes[1]:
            what = f"expected a teacher with the pupil's (depth, tokens, width) {shapes[1]}, got {shapes[0]}"
            raise checkpoint.CheckpointError(f"--teach-blocks: {what}.")

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
