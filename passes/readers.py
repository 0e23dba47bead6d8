"""Which modules read `.weight` of a Linear instead of calling it: those that PyTorch is known for, and those whose forward says so.

timm's BEiT and EVA-02, for one, compute `F.linear(x, weight=self.qkv.weight, bias=...)`. Such a read is found in the source of the owner's forward, of the
methods and properties that it uses, and of what these extend by `super()`. What no source shows is found when a model trains (`passes.bypass`).
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from functools import cache
from typing import Any

from torch import nn
from torch.fx import GraphModule

# a read that takes no values: the type, the place or the size of the weight; and a write in place, which is meant for the Parameter
FACTS = "dtype|device|shape|size|dim|ndim|numel|layout|requires_grad|is_cuda|is_meta|is_floating_point|element_size|stride|is_contiguous"
WRITE = r"\s*(?:\.data)?\s*(?:\[[^\]]*\])?\s*(?:\.[a-z]\w*_\(|[-+*/]?=[^=])"
READ = re.compile(rf"(?<!isinstance\()\bself\.([\w.]+)\.weight\b(?!\s*\.(?:{FACTS})\b)(?!{WRITE})(?!\s+is\b)")
WRITTEN = re.compile(rf"\bself\.([\w.]+)\.weight\b{WRITE}")
USE = re.compile(r"\bself\.(\w+)\b")


def weight_readers(model: nn.Module, kind: type[nn.Module] = nn.Linear) -> dict[int, list[nn.Module]]:
    """id of a layer, a Linear by default -> the modules that read its weight."""
    found: dict[int, list[nn.Module]] = {}
    for m in model.modules():
        for read in _read_by(m):
            if isinstance(read, kind):
                found.setdefault(id(read), []).append(m)
    return found


def _read_by(m: nn.Module) -> list[object]:
    if isinstance(m, nn.MultiheadAttention):  # never calls out_proj
        return [m.out_proj]
    if isinstance(m, nn.TransformerEncoderLayer):  # its fast path calls neither
        return [m.linear1, m.linear2]
    if isinstance(m, GraphModule):
        return []
    cls: Any = getattr(type(m), "_fxmask_base", type(m))
    return [_submodule(m, path) for path in _paths_read(cls)]


def ancestors(model: nn.Module, layer: nn.Module) -> list[nn.Module]:
    """Every module that holds a layer, however deep; any of them may be the one that reads it."""
    return [m for m in model.modules() if m is not layer and any(inner is layer for inner in m.modules())]


@cache
def _paths_read(cls: type[nn.Module]) -> tuple[str, ...]:
    """Paths p of `self.p.weight` that a class reads in its forward and in what this uses of the class.

    Not of a layer that it calls, too, and writes to: there the read is one of the Parameter, such as that of a norm to be kept.
    """
    source = "\n".join(forward_sources(cls))
    written = {path for path in WRITTEN.findall(source) if re.search(rf"\bself\.{re.escape(path)}\(", source)}
    return tuple(dict.fromkeys(path for path in READ.findall(source) if path not in written))


def forward_sources(cls: type[nn.Module]) -> Iterator[str]:
    """The source of a class's forward, and of the methods and properties of the class that it uses; nothing of PyTorch's own modules."""
    if cls.__module__.startswith("torch.nn.modules"):
        return
    seen, todo = set(), ["forward"]
    while todo:
        name = todo.pop()
        if name not in seen:
            seen.add(name)
            for source in _sources(cls, name):
                yield source
                todo += USE.findall(source)


def _sources(cls: type[nn.Module], name: str) -> Iterator[str]:
    """The source of a method or property of a class, and as long as that says `super()`, of those that it extends."""
    for base in cls.__mro__:
        value = base.__dict__.get(name)
        value = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        if value is None or not inspect.isfunction(inspect.unwrap(value)) or base.__module__.startswith("torch.nn.modules"):
            continue
        try:
            source = inspect.getsource(inspect.unwrap(value))
        except (OSError, TypeError):  # typed in at a prompt, or made by exec
            continue
        yield _said(source)
        if "super()" not in source:
            return


class _Plain(ast.NodeTransformer):
    """No docstrings, and `self` for what a method calls its first argument."""

    def __init__(self, first: str) -> None:
        self.first = first

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        return ast.Pass() if isinstance(node.value, ast.Constant) else self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Name("self", node.ctx) if node.id == self.first else node


def _said(source: str) -> str:
    """What a method's code says, without its comments: `self.a[0].weight` as `self.a.0.weight`. As it is, where it is no method alone, such as a lambda."""
    try:
        (method,) = ast.parse(textwrap.dedent(source)).body
    except (SyntaxError, ValueError):
        return source
    if not isinstance(method, ast.FunctionDef):
        return source
    first = [*method.args.posonlyargs, *method.args.args][:1]
    code = ast.unparse(_Plain(first[0].arg if first else "self").visit(method))
    return re.sub(r"(?<=\w)\[(\d+)\](?=\.weight\b|\()", r".\1", code)


def _submodule(m: nn.Module, path: str) -> object:
    try:
        return m.get_submodule(path)
    except AttributeError:
        return None
