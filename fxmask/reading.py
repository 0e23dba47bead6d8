"""Whether the forward of a layer's owner runs, during which the layer's `.weight` is read as W∘M; of eager and compiled code, threads and checkpoints."""

from __future__ import annotations

import inspect
import threading
from types import CodeType
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .swap import ReadWeight

_COUNTING = threading.Lock()
FORWARDS: set[CodeType] = set()  # the code of what owners' forwards are made of


def is_read(m: ReadWeight) -> bool:
    """Whether an owner's forward runs, or a part of it anew, for a checkpoint.

    A compiled forward does not look at what eager ones note: other threads may run the same model, and its guards would see them.
    """
    if m._fxmask_reading > 0 or m._fxmask_owned:
        return True
    return not torch.compiler.is_dynamo_compiling() and torch._C._current_graph_task_id() != -1 and _runs_anew()


def _runs_anew() -> bool:
    """Whether this backward has called a part of an owner's forward."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__") != "torch.autograd.graph":  # where a backward begins
        if frame.f_code in FORWARDS:
            return True
        frame = frame.f_back
    return False


def count(layers: list[ReadWeight], change: int, compiled: bool) -> None:
    """Note that an owner's forward begins (1) or ends (-1). `compiled`: it began in compiled code, which writes constants, and may go on in eager code."""
    if compiled:
        for m in layers:
            m._fxmask_reading = max(0, m._fxmask_reading + change)
        return
    with _COUNTING:
        for m in layers:
            m._fxmask_owners = max(0, m._fxmask_owners + change)
            m._fxmask_owned = m._fxmask_owners > 0
