"""Function transforms around a compiled model: Dynamo skips its frames then, for good, and says nothing, so that this call and all later ones are dense."""

from __future__ import annotations

from types import FrameType
from typing import Any

import torch
from torch import nn
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
                for module in _modules(frame):
                    _refuse_module(module, getattr(compiled, "kwargs", {}).get("options"), backend)
            return


def _modules(frame: FrameType) -> list[nn.Module]:
    """The modules that the code which Dynamo is given names: its first argument, what it closes over, globals. A mask that a model makes by vmap names none."""
    given = frame.f_locals
    code, here, around = given.get("code"), given.get("locals"), given.get("globals") or {}
    held = [] if code is None or not here else [here.get(code.co_varnames[0])] if code.co_varnames else []
    held += [cell.cell_contents for cell in given.get("closure") or () if _is_filled(cell)]
    held += [around[name] for name in getattr(code, "co_names", ()) if name in around]
    return [m for v in held for m in (v, getattr(v, "__self__", None)) if isinstance(m, nn.Module)]


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _refuse_module(module: nn.Module, options: Any, backend: Any) -> None:
    mark_again()
    left = {id(p) for p in module.parameters() if not decided_by_apply(p)}
    names = [d.candidate.name or "the model itself" for d in chosen(module, parse(options), left, is_unread(module))] if left else []
    if names:
        dense = f"would leave {first_of(names, 3)} dense, in this call and in all later ones."
        what = f"a function transform (torch.func, torch.vmap) around the compiled model {dense}"
        raise BackendCompilerFailed(backend, UnsupportedError(message(what, WHERE, f"{FIX}.")), None)
