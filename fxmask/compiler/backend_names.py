"""Whether the names in a graph are those of the compiled model: behind a graph break in a submodule they begin there, and so does what goes by names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule
from torch.nn.parallel import DistributedDataParallel

from ..kernels.errors import message, warn
from ..passes.finding.candidate import Candidate, surround
from ..passes.finding.choose import Decision
from ..passes.finding.find import find
from ..passes.finding.patterns import as_patterns
from ..passes.frames import frames
from .backend_options import WHERE

CALLS = (nn.Module._wrapped_call_impl.__code__, nn.Module._call_impl.__code__)


def warn_of_parts(decisions: Sequence[Decision], options: Mapping[str, Any]) -> bool:
    """Warn where patterns or `criterion="random"` go by names that are not the model's, and say whether. `options`: the patterns, by the option with them."""
    by_name = [name for name, given in options.items() if any(not isinstance(p, type) for p in as_patterns(name, given) or [])]
    by_name += ["criterion='random'"] if any(d.config is not None and d.config.criterion == "random" for d in decisions) else []
    root = compiled_module() if by_name else None
    if root is None:
        return False
    names: dict[int, list[str]] = {}
    for name, p in root.named_parameters(remove_duplicate=False):
        names.setdefault(id(p), []).append(name)
    found = ((d.candidate.param_name, names.get(id(d.candidate.weight), [])) for d in decisions)
    others = [f"{here} for {model[0]}" for here, model in found if model and here not in model]
    if others:
        shown = "; ".join(others[:3]) + " ..." * (len(others) > 3)
        what = f"a graph begins inside of the compiled model, behind a graph break or code that Dynamo skips, and has names of its own: {shown}."
        what += f" {', '.join(by_name)} {'goes' if len(by_name) == 1 else 'go'} by these, alike in all layers that share the graph."
        fix = "remove the break (torch.compile(fullgraph=True) shows it), or use fxmask.apply(model, ...), which knows the whole model."
        warn(message(what, WHERE, fix))
    return bool(others)


def of_model() -> list[Candidate]:
    """The linears of the compiled model, whatever graphs they are in; none for a function."""
    root = compiled_module()
    found = [] if root is None else find(root)
    surround(found, root)
    return found


def split_by_ddp() -> tuple[GraphModule, Sequence[Any]] | None:
    """The graph that PyTorch's DDPOptimizer is compiling part by part, and its inputs; None where it is not."""
    for frame in frames():
        if frame.f_code.co_name == "compile_fn" and type(frame.f_locals.get("self")).__name__ == "DDPOptimizer":
            return frame.f_locals["gm"], frame.f_locals["example_inputs"]
    return None


def inside_ddp(m: Any) -> Any:
    """What DDP is around, whose own forward Dynamo skips; anything else as it is."""
    return m.module if isinstance(m, DistributedDataParallel) else m


def compiled_module() -> nn.Module | None:
    """The module whose call is being compiled, by the call itself; None for a function."""
    for frame in frames():
        m = frame.f_locals.get("self") if frame.f_code in CALLS else None
        if isinstance(m, torch._dynamo.OptimizedModule):
            root: nn.Module = inside_ddp(m._orig_mod)
            return root
        if isinstance(m, nn.Module) and m._compiled_call_impl is not None:
            return m
    return None


def class_of_frame() -> type[nn.Module] | None:
    """The class of the module whose own code is being compiled, which no node of a graph names: of the innermost one that is called."""
    found = (frame.f_locals.get("self") for frame in frames() if frame.f_code in CALLS)
    m = next((m for m in found if isinstance(m, nn.Module)), None)
    return type(m._orig_mod if isinstance(m, torch._dynamo.OptimizedModule) else m) if m is not None else None
