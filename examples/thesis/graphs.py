"""`--graphs`: a run's steps by `fxmask.graphed`. Small models wait for the host in every step; a CUDA graph is launched at once."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

import fxmask


class GraphedRun:
    """Steps whose inputs lie where the graph reads them; smaller batches, as the last of an epoch, run as they are."""

    def __init__(self, compute: Callable[[Tensor, Tensor, Tensor], None], optimiser: Optimizer, models: list[nn.Module], classes: int, batch: int) -> None:
        self.compute, self.classes, self.batch = compute, classes, batch
        self.inputs: list[Tensor] = []
        self.step = fxmask.graphed(self._step, optimiser, models=models)

    def _step(self) -> None:
        self.compute(*self.inputs)

    def __call__(self, images: Tensor, targets: Tensor, labels: Tensor) -> None:
        """[B, C, H, W], [B] or [B, classes], [B]."""
        if targets.ndim == 1:  # a batch that is not mixed, among others that are
            targets = F.one_hot(targets, self.classes).float()
        batch = images, targets, labels
        if len(labels) != self.batch:
            self.compute(*batch)
            return
        if not self.inputs:
            self.inputs = [torch.empty_like(t) for t in batch]
        for ours, t in zip(self.inputs, batch, strict=True):
            ours.copy_(t)
        self.step()
