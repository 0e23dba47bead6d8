"""Function transforms around a compiled model: Dynamo skips its frames then, for good, and says nothing, so that this call and all later ones are dense."""

from __future__ import annotations

import dis
from itertools import pairwise
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.callback import callback_handler, on_compile_start
from torch._dynamo.exc import BackendCompilerFailed

from ..decided import decided_by_apply, mark_again
from ..kernels.errors import UnsupportedError, first_of, message
from ..passes.counting.traced import behind_callback
from ..passes.frames import frames
from .backend_missed import chosen
from .backend_options import WHERE, parse
from .shards import is_unread

FIX = "transform the model that torch.compile was given, masked by fxmask.apply(model, ...), compiled without backend or not at all"


def asked() -> None:
    """Look at what Dynamo begins to compile, from now on; `torch._dynamo.reset` ends it."""
    if _refuse not in callback_handler.start_callbacks:
        on_compile_start(_refuse)


def _refuse(_: Any) -> None:
    """Before Dynamo captures a frame, or skips it. Raises: BackendCompilerFailed, as for what the backend refuses itself."""
    if not torch._C._are_functorch_transforms_active():
        return
    for frame in frames():
        if frame.f_code.co_name == "_compile" and frame.f_globals.get("__name__") == "torch._dynamo.convert_frame":
            backend = frame.f_locals.get("compiler_fn")
            compiled = behind_callback(backend)
            if getattr(getattr(compiled, "compiler_fn", None), "__module__", "") == f"{__package__}.backend":
                for module, taken in _modules(frame):
                    _refuse_module(module, taken, getattr(compiled, "kwargs", {}).get("options"), backend)
            return


def _modules(frame: FrameType) -> list[tuple[nn.Module, set[str] | None]]:
    """The modules that the code which Dynamo is given names, as its first argument, what it closes over, globals; and which of their attributes it takes, None
    where it may call them. A mask that a model makes by vmap names none."""
    given = frame.f_locals
    code, here, around = given.get("code"), given.get("locals"), given.get("globals") or {}
    if code is None:
        return []
    held = {name: around[name] for name in code.co_names if name in around}
    held |= {name: c.cell_contents for name, c in zip(code.co_freevars, given.get("closure") or (), strict=False) if _is_filled(c)}
    held |= {name: here[name] for name in code.co_varnames[:1] if here and name in here}
    found: list[tuple[nn.Module, set[str] | None]] = [(v, _taken(code, name)) for name, v in held.items() if isinstance(v, nn.Module)]
    return found + [(m, None) for v in held.values() if isinstance(m := getattr(v, "__self__", None), nn.Module)]


def _taken(code: CodeType, name: str) -> set[str] | None:
    """The attributes that code takes of what it calls so; None where it does anything else with it."""
    found = set()
    for this, after in pairwise(dis.get_instructions(code)):
        if this.argval == name and this.opname.startswith("LOAD_") and this.opname not in ("LOAD_ATTR", "LOAD_METHOD"):
            if after.opname not in ("LOAD_ATTR", "LOAD_METHOD"):
                return None
            found.add(after.argval)
        elif isinstance(this.argval, tuple) and name in this.argval:  # two names in one instruction
            return None
    return found


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _refuse_module(module: nn.Module, taken: set[str] | None, options: Any, backend: Any) -> None:
    mark_again()
    left = {id(p) for p in module.parameters() if not decided_by_apply(p)}
    linears = [d.candidate.name for d in chosen(module, parse(options), left, is_unread(module))] if left else []
    names = [name or "the model itself" for name in linears if taken is None or any(_reaches(module, attribute, name) for attribute in taken)]
    if names:
        dense = f"would leave {first_of(names, 3)} dense, in this call and in all later ones."
        what = f"a function transform (torch.func, torch.vmap) around the compiled model {dense}"
        raise BackendCompilerFailed(backend, UnsupportedError(message(what, WHERE, f"{FIX}.")), None)


def _reaches(module: nn.Module, attribute: str, name: str) -> bool:
    """Whether a linear may be run by what an attribute of a module gives: a child that has it, or a method, which is not looked into; not by a number."""
    child = module._modules.get(attribute)
    if child is not None:
        return f"{name}.".startswith(f"{attribute}.")
    plain = attribute in module._buffers or isinstance(module.__dict__.get(attribute), (int, float, str, Tensor))
    return not plain
