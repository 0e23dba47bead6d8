"""Function transforms around a compiled model: Dynamo skips its frames then, for good, and says nothing, so that this call and all later ones are dense."""

from __future__ import annotations

import dis
import functools
import gc
import inspect
import weakref
from collections.abc import Iterable, Iterator
from itertools import pairwise
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.callback import on_compile_start
from torch._dynamo.exc import BackendCompilerFailed, Unsupported
from torch._dynamo.types import FrameAction, FrameExecStrategy
from torch.nn.parallel import DistributedDataParallel

from ..decided import decided_by_apply, mark_again
from ..kernels.errors import UnsupportedError, first_of, message
from ..passes.counting.traced import behind_callback
from ..passes.frames import frames
from .backend_missed import chosen
from .backend_names import compiled_module
from .backend_options import WHERE, parse
from .shards import is_unread

FIX = "transform the model that torch.compile was given, masked by fxmask.apply(model, ...), compiled without backend or not at all"
UNSEEN = {"super", "locals", "eval", "exec"}  # what takes local variables without loading them


@functools.cache
def asked() -> None:
    """Look at what Dynamo begins to compile, from now on."""
    _look()


def _look() -> None:
    def nothing(_: Any) -> None:
        """What dies as torch._dynamo.reset lets go of it; an error that somebody keeps would keep what has raised it."""

    on_compile_start(nothing)
    on_compile_start(_refuse)
    weakref.finalize(nothing, _look).atexit = False


def _refuse(_: Any) -> None:
    """Before Dynamo captures a frame, or skips it. Raises: BackendCompilerFailed, as for what the backend refuses itself; Unsupported, by which Dynamo skips a
    frame that has no linear to mask this time only, and not for good: another model may share its code."""
    transform = torch._C._functorch.peek_interpreter_stack()
    if transform is None or transform.key() == torch._C._functorch.TransformType.Functionalize:  # which Dynamo captures
        return
    of_dynamo = (f for f in frames() if f.f_code.co_name == "_compile" and f.f_globals.get("__name__") == "torch._dynamo.convert_frame")
    if (frame := next(of_dynamo, None)) is None:  # what is compiled is a backward
        return
    backend = frame.f_locals["compiler_fn"]
    compiled = behind_callback(getattr(getattr(backend, "__self__", None), "backend_compile_fn", backend))  # DDP's splitting of graphs stands before it
    if getattr(getattr(compiled, "compiler_fn", None), "__module__", "") != f"{__package__}.backend":
        return
    names = list(dict.fromkeys(_dense(_found(_held(frame)), getattr(compiled, "kwargs", {}).get("options"))))
    if names:
        dense = f"would leave {first_of(names, 3)} dense, in this call and in all later ones."
        what = f"a function transform (torch.func, torch.vmap) around the compiled model {dense}"
        raise BackendCompilerFailed(backend, UnsupportedError(message(what, WHERE, f"{FIX}.")), None)
    skip = Unsupported("a function transform around a compiled model, which torch.compile(backend='fxmask') leaves as it is")
    skip.frame_exec_strategy = FrameExecStrategy(FrameAction.DEFAULT, FrameAction.DEFAULT)
    raise skip


def _held(frame: FrameType) -> Iterator[Any]:
    """What the code that Dynamo is given may run: of its arguments, of what it closes over, and of globals, the attributes that it takes, or all. Functions
    that it calls come to Dynamo by themselves."""
    code, around = frame.f_locals["code"], frame.f_locals["globals"]
    named = {name: around[name] for name in code.co_names if name in around}
    named |= {name: c.cell_contents for name, c in zip(code.co_freevars, frame.f_locals["closure"] or (), strict=False) if _is_filled(c)}
    named |= frame.f_locals["locals"]
    for name, value in named.items():
        taken = None if UNSEEN & {*code.co_names} else _taken(code, name)
        yield from [value] if taken is None else (_attribute(value, a) for a in taken)


def _taken(code: CodeType, name: str) -> set[str] | None:
    """The attributes that code takes of what it calls so, or so too; None where it does anything else with it."""
    names, found = [name], set()
    for known in names:  # which grows
        for this, after in pairwise(dis.get_instructions(code)):
            if this.argval == known and this.opname.startswith("LOAD_") and this.opname not in ("LOAD_ATTR", "LOAD_METHOD"):
                if after.opname in ("LOAD_ATTR", "LOAD_METHOD"):
                    found.add(after.argval)
                elif after.opname != "STORE_FAST":
                    return None
                elif after.argval not in names:
                    names.append(after.argval)
            elif isinstance(this.argval, tuple) and known in this.argval:  # two names in one instruction
                return None
    return found


def _attribute(value: Any, name: str) -> Any:
    """What an object holds by that name; the object itself where its class has it, as a method or a property, which are not looked into."""
    held = getattr(value, "__dict__", {})
    for place in (held, *(held.get(kind, {}) for kind in ("_modules", "_parameters", "_buffers"))):
        if name in place:
            return place[name]
    found = inspect.getattr_static(value, name, value)
    return value if hasattr(type(found), "__get__") else found


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _found(values: Iterable[Any]) -> Iterator[nn.Module | nn.Parameter]:
    """Modules and parameters among values, and in what holds them: lists, dicts, partials, methods, objects."""
    left, seen = list(values), set()
    while left:
        value = left.pop()
        if id(value) in seen or isinstance(value, (type, ModuleType, FunctionType)):
            continue
        seen.add(id(value))
        if isinstance(value, (nn.Module, nn.Parameter)):
            yield value
        elif not isinstance(value, Tensor):
            left += gc.get_referents(value)


def _dense(found: Iterable[nn.Module | nn.Parameter], options: Any) -> Iterator[str]:
    """The names of what the backend would mask of these."""
    mark_again()
    model = compiled_module()
    own = set() if model is None else {id(v) for v in (*model.modules(), *model.parameters())}
    for value in (v.module if isinstance(v, DistributedDataParallel) else v for v in found):
        weights = {id(p) for p in ([value] if isinstance(value, Tensor) else value.parameters()) if not decided_by_apply(p)}
        root = model if id(value) in own else value
        if isinstance(root, nn.Module):
            bare = not any(map(decided_by_apply, root.parameters()))
            decisions = chosen(root, parse(options), weights, is_unread(root), bare) if weights else []
            yield from (d.candidate.name or "the model itself" for d in decisions if id(d.candidate.weight) in weights)
        elif isinstance(root, Tensor) and weights and root.dim() == 2:
            yield f"a parameter of shape {tuple(root.shape)}"
