"""A model in the form that it was given in: what is run of it, with which arguments, and the names that a trace recorded of the model behind it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from ...kernels.errors import ConfigError, UnsupportedError, message
from ..graphs.graph_calls import path_in_model
from ..graphs.input_sources import source_name

WRAPPERS = {"OptimizedModule": "_orig_mod", "DistributedDataParallel": "module", "DataParallel": "module"}  # where forwards go


def arguments(inputs: Any, kwargs: Mapping[str, Any] | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a forward is called with: `inputs` is one argument, a tuple or list of them, or a dict of keyword arguments, to which `kwargs` adds."""
    if kwargs is not None and not (isinstance(kwargs, Mapping) and all(isinstance(k, str) for k in kwargs)):
        raise ConfigError(f"kwargs: expected a dict of the forward's keyword arguments, or None, got {kwargs!r}.")
    if isinstance(inputs, Mapping):
        return (), {**inputs, **(kwargs or {})}
    return tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,), dict(kwargs or {})


def runnable(model: Any) -> tuple[fx.GraphModule | None, nn.Module]:
    """The graph module, where it is one, and the module that is run. Raises: ConfigError, UnsupportedError."""
    if isinstance(model, torch.export.ExportedProgram):
        model = model.module()
    if not isinstance(model, nn.Module):
        raise ConfigError(f"analyze takes an nn.Module, an fx.GraphModule or a torch.export.ExportedProgram: got {type(model).__name__}.")
    while (inner := WRAPPERS.get(type(model).__name__)) is not None:
        model = getattr(model, inner)
    scripted = next((name or "(model)" for name, m in model.named_modules() if isinstance(m, torch.jit.ScriptModule)), "")
    if scripted:
        what = "analyze runs Python modules on fake tensors: expected none that torch.jit has compiled."
        raise UnsupportedError(message(what, scripted, "analyse the model that was scripted or traced, or a graph of it by torch.export."))
    return model if isinstance(model, fx.GraphModule) else None, model


def backend_of(model: Any) -> str:
    """The name of the backend that `torch.compile` was given by name for this model; empty for Inductor, and where there is none."""
    backend = behind_callback(getattr(getattr(model, "dynamo_ctx", None), "callback", None))
    return str(getattr(backend, "compiler_name", ""))


def behind_callback(callback: Any) -> Any:
    """The backend that Dynamo's callback calls in the end."""
    while (inner := getattr(callback, "_torchdynamo_orig_backend", None)) is not None:
        callback = inner
    return callback


def placeholders(gm: fx.GraphModule | None, args: Sequence[Any]) -> list[tuple[str, Any]]:
    """The inputs of a graph by name; of a module none."""
    nodes = [] if gm is None else gm.graph.find_nodes(op="placeholder")
    return [(source_name(n) or n.target, a) for n, a in zip(nodes, args, strict=False)]


def traced_kinds(gm: fx.GraphModule) -> dict[str, str]:
    """Modules of the model that a graph was traced from, and their classes."""
    found = {"": ""}
    for n in gm.graph.nodes:
        for name, kind in (n.meta.get("nn_module_stack") or {}).values() if n.op != "placeholder" else ():
            found[path_in_model(name)] = kind.__name__ if isinstance(kind, type) else str(kind).rpartition(".")[2]
    return dict(sorted(found.items(), key=lambda p: p[0] != ""))


def traced_calls(gm: fx.GraphModule) -> dict[str, int]:
    """How often a graph calls the modules that it was traced from: every call has a key of its own."""
    keys = {(key, path_in_model(name)) for n in gm.graph.nodes if n.op != "placeholder" for key, (name, _) in (n.meta.get("nn_module_stack") or {}).items()}
    return dict(Counter(name for _, name in keys))


def module_of(n: fx.Node) -> str:
    """The innermost module of a node of Dynamo or export, as it is named in the model that was traced."""
    stack = n.meta.get("nn_module_stack") or {}
    name = next(reversed(stack.values()))[0] if stack else ""
    return path_in_model(name)
