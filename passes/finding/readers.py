"""Which modules read `.weight` of a Linear instead of calling it: those that PyTorch is known for, and those whose forward says so.

timm's BEiT and EVA-02, for one, compute `F.linear(x, weight=self.qkv.weight, bias=...)`. Such a read is found in the source of the owner's forward, of the
methods and properties that it uses, and of what these extend by `super()`. What no source shows is found when a model trains (`passes.stepping.bypass`).
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from fnmatch import fnmatchcase
from types import CodeType, FunctionType
from typing import Any

from torch import nn
from torch.fx import GraphModule

from .candidate import base_of
from .naming import Path
from .per_class import per_class
from .said import Said, said

OF_TORCH = (nn.TransformerEncoderLayer, nn.MultiheadAttention)  # modules of PyTorch's that read weights
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
    if isinstance(m, nn.TransformerEncoderLayer):  # its fast path calls none of them
        return [m.linear1, m.linear2, *([m.self_attn.out_proj] if isinstance(m.self_attn, nn.MultiheadAttention) else [])]
    if isinstance(m, GraphModule):
        return []
    return [read for path in _paths_read(base_of(m)) for read in _modules_at(m, path)]


def writes_to(owner: nn.Module, layer: nn.Module) -> bool:
    """Whether what a module's forward uses writes to the weight of a layer that it reads, by this name or another: W∘M would take the write and be gone."""
    return any(inner is layer for path in _said_by(base_of(owner)).writes for inner in _modules_at(owner, path))


def calls(owner: nn.Module, layer: nn.Module) -> bool:
    """Whether what a module's forward uses calls a layer, or a part that holds it."""
    return any(inner is layer for path in _said_by(base_of(owner)).calls if path for part in _modules_at(owner, path) for inner in part.modules())


def ancestors(model: nn.Module, layer: nn.Module) -> list[nn.Module]:
    """Every module that holds a layer, however deep; any of them may be the one that reads it."""
    return [m for m in model.modules() if m is not layer and any(inner is layer for inner in m.modules())]


@per_class
def _said_by(cls: Any) -> Said:
    return said(forward_sources(cls))


def _paths_read(cls: Any) -> tuple[Path, ...]:
    """Paths of the layers whose weight a class reads in its forward and in what this uses of the class.

    Not of a layer that it calls, too, or a part that holds it, and writes to: there the read is one of the Parameter, such as that of a norm to be kept.
    """
    reads, writes, calls = _said_by(cls)
    return tuple(p for p in reads if not any(_alike(p, w) for w in writes) or not any(c and _alike(p[: len(c)], c) for c in calls))


def _alike(a: Path, b: Path) -> bool:
    return len(a) == len(b) and all(fnmatchcase(x, y) or fnmatchcase(y, x) for x, y in zip(a, b, strict=True))


def forward_sources(cls: type[nn.Module]) -> Iterator[str]:
    """The source of a class's forward, and of the methods and properties of the class that it uses; nothing of PyTorch's own modules."""
    return (source for _, source in _forward_parts(cls))


def forward_codes(cls: type[nn.Module]) -> set[CodeType]:
    """The code of the same, with that of functions inside it."""
    found, todo = set[CodeType](), [function.__code__ for function, _ in _forward_parts(cls)]
    while todo:
        code = todo.pop()
        found.add(code)
        todo += [c for c in code.co_consts if isinstance(c, CodeType)]
    return found


def _forward_parts(cls: type[nn.Module]) -> Iterator[tuple[FunctionType, str]]:
    if cls.__module__.startswith("torch.nn.modules"):
        return
    seen, todo = set(), ["forward"]
    while todo:
        name = todo.pop()
        if name not in seen:
            seen.add(name)
            for function, source in _sources(cls, name):
                yield function, source
                todo += USE.findall(source)


def _sources(cls: type[nn.Module], name: str) -> Iterator[tuple[FunctionType, str]]:
    """A method or property of a class with its source, and as long as that says `super()`, those that it extends."""
    for base in cls.__mro__:
        value = base.__dict__.get(name)
        value = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        while inner := getattr(value, "__marked_compile_region_fn__", None):  # torch.compiler.nested_compile_region
            value = inner
        function = None if value is None else inspect.unwrap(value)
        if not inspect.isfunction(function) or base.__module__.startswith("torch.nn.modules"):
            continue
        try:
            source = inspect.getsource(function)
        except OSError:  # typed in at a prompt, or made by exec
            continue
        yield function, _said(source)
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
    """A method's code without its comments, its first argument `self`. As it is, where it is no method alone, such as a lambda."""
    try:
        (method,) = ast.parse(textwrap.dedent(source)).body
    except (SyntaxError, ValueError):
        return source
    if not isinstance(method, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return source
    first = [*method.args.posonlyargs, *method.args.args][:1]
    return ast.unparse(_Plain(first[0].arg if first else "self").visit(method))


def _modules_at(m: nn.Module, path: Path) -> list[nn.Module]:
    """The modules at a path, all children where it says "*"."""
    found = [m]
    for part in path:
        found = [inner for outer in found for inner in _children(outer, part)]
    return found


def _children(m: nn.Module, part: str) -> list[nn.Module]:
    if "*" in part:
        return [inner for name, inner in m._modules.items() if inner is not None and fnmatchcase(name, part)]
    if re.fullmatch(r"-\d+", part) and len(m._modules) >= -int(part):
        part = [*m._modules][int(part)]
    try:
        return [m.get_submodule(part)]
    except AttributeError:
        return []
