"""Function transforms around a compiled model: Dynamo skips its frames then, for good, and says nothing, so that this call and all later ones are dense."""

from __future__ import annotations

import dis
import functools
import gc
import inspect
import weakref
from collections.abc import Iterable, Iterator
from itertools import pairwise
from types import FrameType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.callback import on_compile_start
from torch._dynamo.convert_frame import _compile
from torch._dynamo.exc import BackendCompilerFailed, Unsupported
from torch._dynamo.types import FrameAction, FrameExecStrategy

from ..decided import decided_by_apply, mark_again
from ..kernels.errors import UnsupportedError, first_of, message
from ..passes.frames import frames
from .backend_missed import chosen
from .backend_names import compiled_module, inside_ddp
from .backend_options import WHERE, given_to, parse
from .shards import is_unread

FIX = "transform the model that torch.compile was given, masked by fxmask.apply(model, ...), compiled without backend or not at all"
ATTRIBUTE = ("LOAD_ATTR", "LOAD_METHOD")
UNSEEN = {"super", "locals", "eval", "exec"}  # what takes local variables without loading them


@functools.cache
def asked() -> None:
    """Look at what Dynamo begins to compile, from now on."""
    # disabled, or Dynamo would compile them where a compiled function calls backward(), whose compilation asks them with a lock held: that waits for ever
    on_compile_start(nothing := torch.compiler.disable(lambda _: None))  # dies as torch._dynamo.reset lets go of it; an error would keep what has raised it
    on_compile_start(torch.compiler.disable(_refuse))
    weakref.finalize(nothing, asked.__wrapped__).atexit = False


def _refuse(_: Any) -> None:
    """Before Dynamo captures a frame, or skips it. Raises: BackendCompilerFailed, as for what the backend refuses itself; Unsupported, by which Dynamo skips a
    frame that has no linear to mask this time only, and not for good: another model may share its code."""
    transform = torch._C._functorch.peek_interpreter_stack()
    if transform is None or transform.key() == torch._C._functorch.TransformType.Functionalize:  # which Dynamo captures
        return
    frame = next((f for f in frames() if f.f_code is _compile.__code__), None)
    if frame is None:  # what is compiled is a backward
        return
    backend = frame.f_locals["compiler_fn"]
    ours, options = given_to(getattr(getattr(backend, "__self__", None), "backend_compile_fn", backend))  # DDP's splitting of graphs stands before it
    if not ours:
        return
    names = list(dict.fromkeys(_dense(_modules_in(_used(frame)), options)))
    if names:
        dense = f"would leave {first_of(names, 3)} dense, in this call and in all later ones."
        what = f"a function transform (torch.func, torch.vmap) around the compiled model {dense}"
        raise BackendCompilerFailed(backend, UnsupportedError(message(what, WHERE, f"{FIX}.")), None)
    skip = Unsupported("a function transform around a compiled model, which torch.compile(backend='fxmask') leaves as it is")
    skip.frame_exec_strategy = FrameExecStrategy(FrameAction.DEFAULT, FrameAction.DEFAULT)
    raise skip


def _used(frame: FrameType) -> Iterator[Any]:
    """What the code that Dynamo is given may run: of locals, what it closes over among them, and of globals, the attributes that it takes, or all. Functions
    that it calls come to Dynamo by themselves."""
    code, around = frame.f_locals["code"], frame.f_locals["globals"]
    named = {name: around[name] for name in code.co_names if name in around} | frame.f_locals["locals"]
    pairs = list(pairwise(dis.get_instructions(code)))
    for name, value in named.items():
        taken = None if UNSEEN & {*code.co_names} else _attributes(pairs, name)
        yield from [value] if taken is None else (_attribute(value, a) for a in taken)


def _attributes(pairs: list[tuple[dis.Instruction, dis.Instruction]], name: str) -> set[str] | None:
    """The attributes that code, by its instructions and the next ones, takes of what it calls so; None where it does anything else with it."""
    taken = set()
    for this, after in pairs:
        loaded = this.argval == name and this.opname.startswith("LOAD_") and this.opname not in ATTRIBUTE
        if loaded and after.opname in ATTRIBUTE:
            taken.add(after.argval)
        elif loaded or (isinstance(this.argval, tuple) and name in this.argval):  # two names in one instruction
            return None
    return taken


def _attribute(value: Any, name: str) -> Any:
    """What an object holds by that name; the object itself where its class has a method or a property of that name, which are not looked into."""
    if hasattr(type(inspect.getattr_static(type(value), name, None)), "__get__"):
        return value
    of_module = {**value._modules, **value._parameters, **value._buffers} if issubclass(type(value), nn.Module) else {}
    return of_module.get(name, inspect.getattr_static(value, name, value))


def _modules_in(values: Iterable[Any]) -> Iterator[nn.Module | nn.Parameter]:
    """Modules and parameters among values, and in what holds them: lists, dicts, partials, methods, objects."""
    left, seen = list(values), set()
    while left:
        value = left.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if _is_module_or_parameter(value):
            yield value
        elif not issubclass(type(value), (Tensor, type, ModuleType, FunctionType)):
            left += filter(gc.is_tracked, gc.get_referents(value))  # not the numbers of a long list


def _is_module_or_parameter(value: Any) -> bool:
    try:
        return isinstance(value, (nn.Module, nn.Parameter))
    except Exception:  # a proxy of what is gone, or not there yet
        return False


def _dense(found: Iterable[nn.Module | nn.Parameter], options: Any) -> Iterator[str]:
    """The names of what the backend would mask of these."""
    mark_again()
    model = compiled_module()
    own = {} if model is None else {id(v): model for v in (*model.modules(), *model.parameters())}
    given = [*map(inside_ddp, found)]
    weights = {id(p) for v in given for p in ([v] if isinstance(v, Tensor) else v.parameters()) if not decided_by_apply(p)}
    roots = {id(r): r for r in (own.get(id(v), v) for v in given)}
    for root in roots.values() if weights else ():
        if isinstance(root, nn.Module):
            applied = any(map(decided_by_apply, root.parameters()))  # which says by itself what is masked, and masks nothing in other forwards
            decisions = chosen(root, parse(options), weights, is_unread(root), any_forward=not applied)
            yield from (d.candidate.name or "the model itself" for d in decisions if id(d.candidate.weight) in weights)
        elif id(root) in weights and root.dim() == 2:
            yield f"a parameter of shape {tuple(root.shape)}"
