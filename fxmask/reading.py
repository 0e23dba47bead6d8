"""Whether the forward of a layer's owner runs, during which the layer's `.weight` is read as W∘M; of eager and compiled code, threads and checkpoints."""

from __future__ import annotations

import inspect
import threading
import warnings
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

import torch

from .kernels.errors import FxMaskWarning, StateError, message

if TYPE_CHECKING:
    from .swap import ReadWeight

_COUNTING = threading.Lock()
FORWARDS: set[CodeType] = set()  # the code of what owners' forwards are made of
_LATE: set[CodeType] = set()  # of these, generators and coroutines: they run after the forward has returned
_GENERATORS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def note_forward(codes: set[CodeType]) -> None:
    """Remember the code of an owner's forward."""
    FORWARDS.update(codes)
    _LATE.update(c for c in codes if c.co_flags & _GENERATORS)


def is_read(m: ReadWeight) -> bool:
    """Whether an owner's forward runs, or a part of it late or anew.

    A compiled forward does not look at what eager ones note: other threads may run the same model, and its guards would see them.
    """
    if m._fxmask_reading > 0 or m._fxmask_owned:
        return True
    if torch.compiler.is_dynamo_compiling():
        torch._dynamo.comptime.comptime(_refuse_part)
        return False
    return _runs_part(inspect.currentframe())


def _runs_part(frame: FrameType | None) -> bool:
    """Whether this is a generator or coroutine of an owner's forward, or a backward that has called a part of one, for a checkpoint."""
    parts = _parts()
    while frame is not None and parts:
        if frame.f_code in parts:
            return True
        if frame.f_globals.get("__name__") == "torch.autograd.graph":  # where a backward begins
            parts = _LATE
        frame = frame.f_back
    return False


def _parts() -> set[CodeType]:
    return _LATE if torch._C._current_graph_task_id() == -1 else FORWARDS


def _refuse_part(context: Any) -> None:
    """The same of code that is being compiled, as an error: compiled code cannot look for it, and serves all calls outside of a forward alike."""
    codes = _compiled_codes(context._i_will_not_complain_if_bc_breaks_InstructionTranslator())
    if _runs_part(inspect.currentframe()) or codes & _parts():
        what = "compiled code reads a masked weight for a forward that has ended: expected eager code in a checkpoint, and in a forward that is a generator."
        fix = "leave that code eager, or compile a checkpoint's whole model; or let the method call the layer instead of reading its weight."
        raise StateError(message(what, "a module that reads a weight", fix))
    if codes & FORWARDS:
        what = "a compiled part of a module's forward is called outside of it: it reads the dense weight, and by this code so would a checkpoint of it."
        fix = "call the module; or let that part call the layer instead of reading its weight."
        warnings.warn(message(what, "a module that reads a weight", fix), FxMaskWarning, stacklevel=2)


def _compiled_codes(tx: Any) -> set[CodeType]:
    """What is being compiled, with whatever it is inlined into."""
    known, found = torch._dynamo.resume_execution.ContinueExecutionCache.generated_code_metadata, set[CodeType]()
    while tx is not None:
        resumed = known.get(tx.f_code)  # behind a graph break
        found.add(tx.f_code if resumed is None else resumed.code)
        tx = getattr(tx, "parent", None)
    return found


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
