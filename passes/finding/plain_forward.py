"""What a forward computes, where its source says so in one expression: which subclasses of nn.Linear compute what nn.Linear computes, though they write it
anew (others are masked only where the user says how), and which modules are a product with a parameter."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import textwrap
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .per_class import per_class


@per_class
def computes_linear(cls: type[nn.Module]) -> bool:
    """Whether a forward is `return F.linear(x, self.weight, self.bias)` and nothing else, by its source; what only TorchScript runs is left out."""
    forward: Any = cls.forward
    if forward is nn.Linear.forward:
        return True
    if getattr(cls, "weight", None) is not None or getattr(forward, "__globals__", {}).get("F") is not F:
        return False
    return _returned(forward) == "return F.linear(x, self.weight, self.bias)"


def _returned(forward: Any) -> str:
    """The one statement of a forward of one input, which are called `self` and `x` in it; empty for any other."""
    if hasattr(forward, "__wrapped__"):  # the source would be that of what functools.wraps is around, and what is around it computes, too
        return ""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(forward))).body[0]
    except (OSError, TypeError, SyntaxError):  # typed in at a prompt, or made by exec
        return ""
    if not isinstance(tree, ast.FunctionDef) or tree.decorator_list or len(tree.args.args) != 2 or tree.args.vararg or tree.args.kwarg or tree.args.kwonlyargs:
        return ""
    names = dict(zip((a.arg for a in tree.args.args), ("self", "x"), strict=True))
    body = [s for s in tree.body if not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))]
    if body and isinstance(body[0], ast.If) and ast.unparse(body[0].test) == "torch.jit.is_scripting()":
        body = [*body[0].orelse, *body[1:]]
    if len(body) != 1 or not isinstance(body[0], ast.Return):
        return ""
    used = [n for n in ast.walk(body[0]) if isinstance(n, ast.Name)]
    if any(n.id in ("self", "x") and n.id not in names for n in used):
        return ""
    for n in used:
        n.id = names.get(n.id, n.id)
    return ast.unparse(body[0])


@dataclasses.dataclass(frozen=True)
class Product:
    """A forward that is y = a x (+ b): the names of the parameters, whether b is `torch.addcmul`'s, and the attribute that says whether x is overwritten."""

    a: str
    b: str = ""
    fused: bool = False
    inplace: str = ""


# the statement with its attributes in order of first appearance, and what they are
PRODUCTS: dict[str, tuple[str, ...]] = {
    "x * self.{0}": ("a",),
    "self.{0} * x": ("a",),
    "x * self.{0} + self.{1}": ("a", "b"),
    "self.{0} * x + self.{1}": ("a", "b"),
    "torch.addcmul(self.{0}, self.{1}, x)": ("b", "a"),
    "torch.addcmul(self.{0}, x, self.{1})": ("b", "a"),
    "x.mul_(self.{0}) if self.{1} else x * self.{0}": ("a", "inplace"),
}


@per_class
def product_of(cls: Any) -> Product | None:
    """The product that a class's forward is, by its source; None for any other."""
    forward = cls.forward
    if cls.__module__.startswith("torch.nn.modules") or cls.__call__ is not nn.Module.__call__:
        return None
    text = _returned(forward).removeprefix("return ")
    names = list(dict.fromkeys(re.findall(r"\bself\.(\w+)", text)))
    for form, roles in PRODUCTS.items():
        if len(names) == len(roles) and text == form.format(*names):
            fused = "addcmul" in form
            return None if fused and forward.__globals__.get("torch") is not torch else Product(**dict(zip(roles, names, strict=True)), fused=fused)
    return None
