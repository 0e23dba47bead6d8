"""What an input of a Dynamo graph is, by Dynamo's own word for where it comes from: a parameter and its path, a buffer, a part of an object, an argument."""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor, nn
from torch.fx import Node

from .graph_calls import ROOT

PARTS = re.compile(r"""\['([^']+)'\]|\["([^"]+)"\]|\.([A-Za-z_]\w*)|\[(\d+)\]""")
CONTAINERS = ("__dict__", "_modules", "_parameters", "_buffers")


def source_name(node: Node) -> str:
    """Path of a lifted parameter in its model, from Dynamo's own name for where it comes from; empty for what is no attribute of a module."""
    source = _source_of(node)
    if source is None:
        return ""
    root = ROOT.match(source.name)
    rest = source.name.partition("]")[2] if root is None else source.name[root.end() :]
    parts = ["".join(found) for found in PARTS.findall(rest)]
    if "cell_contents" in parts:  # of a closure
        parts = parts[parts.index("cell_contents") + 1 :]
    return ".".join(p for p in parts if p not in CONTAINERS)


def is_trainable_input(value: Any, source: Node) -> bool:
    """Whether an input may be a parameter, or its view, as FSDP1 has them in modules. What an earlier graph made has a gradient in training alone."""
    if not isinstance(value, Tensor):
        return value is None
    whole = value if value._base is None else value._base
    of_a_module = source_name(source) != "" and not _is_of_an_object(source)
    return isinstance(whole, nn.Parameter) or (whole.requires_grad and (whole.is_leaf or of_a_module))


def untrained(source: Node, value: Any) -> str:
    """Why nobody can train an input. Of what a dict or a list holds that a function is given nothing says it: `torch.func` is given detached parameters so."""
    if is_buffer(source):
        return "its weight is a buffer, not a parameter"
    held = _held_by(source)
    alone = _source_of(source) is not None and not source_name(source)  # an argument, or what a graph before a break has made
    plain = type(value) is Tensor and "_parameters" not in held and (alone or bool(held - {"cell_contents"}))
    trained = is_trainable_input(value, source)
    return "its weight is a plain tensor, not a parameter" if plain and not trained else ""


def _held_by(source: Node) -> set[str]:
    """The attributes by which an input is held; none of what a call is given."""
    found = {attribute for _, _, attribute, _ in PARTS.findall(getattr(_source_of(source), "name", ""))}
    return {attribute for attribute in found if attribute and not attribute.startswith("__")}


def is_held(source: Node) -> bool:
    """Whether a module or a closure holds an input, and no call is given it."""
    return bool(_held_by(source)) and not _is_of_an_object(source)


def _is_of_an_object(source: Node) -> bool:
    """Whether an input is an attribute of an object that is no module, as of a named tuple or a dataclass that a call is given."""
    where = getattr(_source_of(source), "guard_source", None)
    where = where() if callable(where) else where  # a method or an attribute, as PyTorch's version has it
    return bool(_held_by(source) - {"cell_contents"}) and "MODULE" not in getattr(where, "name", "MODULE")


def is_buffer(source: Node) -> bool:
    """Whether an input is a module's buffer."""
    name = getattr(_source_of(source), "name", "")
    return "._buffers[" in name or ".__dict__['_buffers'][" in name  # the table; an object may hold a tensor by that name


def _source_of(node: Node) -> Any:
    """Where an input of a Dynamo graph comes from; None where nothing says it."""
    return getattr(node.meta.get("grapharg"), "source", None)
