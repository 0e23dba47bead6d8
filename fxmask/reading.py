"""Whether the forward of a layer's owner runs, during which the layer's `.weight` is read as W∘M; of eager and compiled code, threads and checkpoints."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from itertools import takewhile
from types import CodeType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .kernels.errors import StateError, message, warn
from .passes.frames import frames

if TYPE_CHECKING:
    from .swap import ReadWeight

_COUNTING = threading.Lock()
FORWARDS: set[CodeType] = set()  # the code of what owners' forwards are made of
_READERS = {"fxmask.swap", "fxmask.late_forwards"}  # files that call a whole forward
Called = tuple[CodeType, dict[str, Any]]  # the code of a frame and its globals


def is_read(m: ReadWeight) -> bool:
    """Whether an owner's forward runs, or a part of it anew.

    A compiled forward does not look at what eager ones note: other threads may run the same model, and its guards would see them.
    """
    if m._fxmask_reading > 0 or m._fxmask_owned:
        return True
    if torch.compiler.is_dynamo_compiling():
        torch._dynamo.comptime.comptime(_refuse_part)
        return False
    return torch._C._current_graph_task_id() != -1 and _is_part(_callers())


def _is_part(calls: Iterable[Called]) -> bool:
    """Whether these frames, the innermost first, are a piece of an owner's forward that something else calls, as a checkpoint does in a backward."""
    part = False
    for code, names in calls:
        part = code in FORWARDS or (part and names.get("__name__") not in _READERS)
    return part


def _callers() -> Iterator[Called]:
    """As far as the backward that has called this, for a checkpoint."""
    return ((f.f_code, f.f_globals) for f in takewhile(lambda f: f.f_globals.get("__name__") != "torch.autograd.graph", frames()))


def _refuse_part(context: Any) -> None:
    """The same of code that is being compiled, as an error: compiled code cannot look for it, and serves all calls outside of a forward alike."""
    tx = context._i_will_not_complain_if_bc_breaks_InstructionTranslator()
    compiled = _compiled(tx)
    if torch._C._current_graph_task_id() != -1 and _is_part([*compiled, *_callers()]):
        what = "compiled code reads a masked weight for a forward that has ended: expected eager code in a checkpoint."
        fix = "leave that code eager, or compile a checkpoint's whole model; or let the method call the layer instead of reading its weight."
        raise StateError(message(what, "a module that reads a weight", fix))
    if _is_part(compiled) and not _is_of_another(tx):
        what = "a compiled part of a module's forward is called outside of it: it reads the dense weight, and by this code so would a checkpoint of it."
        fix = "call the module; or let that part call the layer instead of reading its weight."
        warn(message(what, "a module that reads a weight", fix))


def _compiled(tx: Any) -> list[Called]:
    """What is being compiled, with whatever it is inlined into."""
    known, found = torch._dynamo.resume_execution.ContinueExecutionCache.generated_code_metadata, list[Called]()
    while tx is not None:
        resumed = known.get(tx.f_code)  # behind a graph break
        found.append((tx.f_code if resumed is None else resumed.code, tx.f_globals))
        tx = getattr(tx, "parent", None)
    return found


def _is_of_another(tx: Any) -> bool:
    """Whether the outermost compiled code is of an owner of other layers, as behind a graph break of a forward that looks at a teacher's weight."""
    layer = getattr(tx.symbolic_locals.get("m"), "value", None)  # `is_read`'s
    while getattr(tx, "parent", None) is not None:
        tx = tx.parent
    held = [v for v in tx.f_locals.values() if isinstance(v, nn.Module)]
    return layer is not None and bool(held) and not any(inner is layer for v in held for inner in v.modules())


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
