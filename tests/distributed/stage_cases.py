"""Stages of torch.distributed.pipelining, a masked part of the model on each rank."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from distributed.common import batch_of, build
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, pipeline

import fxmask
from fxmask.errors import StateError

OPTIONS = dict(ratio=0.7, schedule=fxmask.Schedule("cubic", steps=4))


def train_alike(kind: type[ScheduleGPipe] | type[Schedule1F1B], steps: int = 6) -> None:
    """Micro-batches in any order count as one step: weights, to rounding, and masks are those of one process."""
    first = dist.get_rank() == 0
    parts, whole = (lambda m: (m[:2], m[2:]))(build()), fxmask.apply(build(), **OPTIONS)
    part = fxmask.apply(parts[0 if first else 1], **OPTIONS)
    stage = PipelineStage(part, dist.get_rank(), 2, torch.device("cpu"))
    pipe = kind(stage, 4, loss_fn=nn.functional.mse_loss)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=3e-3, weight_decay=0.05) for m in (part, whole)]
    for optimizer, m in zip(optimizers, (part, whole), strict=True):
        fxmask.guard(optimizer, m)
    for step in range(steps):
        x, y = batch_of(step)
        pipe.step(x) if first else pipe.step(target=y)
        nn.functional.mse_loss(whole(x), y).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    theirs = whole[:2] if first else whole[2:]
    assert len(list(part.parameters())) == len(list(theirs.parameters())) > 0
    for (name, p), q in zip(part.named_parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(p, q, rtol=1e-3, atol=1e-6), name
    assert all(torch.equal(a, b) for a, b in zip(fxmask.masks(part).values(), fxmask.masks(theirs).values(), strict=True))
    assert {row["step"] for row in fxmask.explain(part).rows} == {steps}


def graphs_are_refused() -> None:
    """What pipeline() traces has graphs that fxmask does not look into: a guard of a stage says so."""
    x = batch_of(0)[0]
    stages = pipeline(fxmask.apply(build(), ratio=0.7), mb_args=(x,), split_spec=None)
    part = stages.get_stage_module(0)
    with pytest.raises(StateError, match=r"guard does not look into graphs of torch\.export\.unflatten(.|\n)*PipelineStage"):
        fxmask.guard(torch.optim.SGD(part.parameters()), part)


CASES = {
    "stages-gpipe": partial(train_alike, ScheduleGPipe),
    "stages-1f1b": partial(train_alike, Schedule1F1B),
    "stages-graphs": graphs_are_refused,
}
