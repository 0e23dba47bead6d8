"""What is running: the frames of the call stack, from the caller of this outwards."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType


def frames() -> Iterator[FrameType]:
    """From the frame that iterates outwards."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def makes_state() -> bool:
    """Whether torch.distributed.checkpoint steps an optimiser to make its state, with lr 0 and zero gradients, before it loads one: no step of a training."""
    made = ("torch.distributed.checkpoint.state_dict", "_init_optim_state")
    return any((f.f_globals.get("__name__"), f.f_code.co_name) == made for f in frames())
