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
