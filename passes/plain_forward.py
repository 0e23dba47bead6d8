"""Which subclasses of nn.Linear compute what nn.Linear computes, though they write the forward anew; others are masked only where the user says how."""

from __future__ import annotations

import ast
import inspect
import textwrap
from functools import cache

import torch.nn.functional as F
from torch import nn


@cache
def computes_linear(cls: type[nn.Module]) -> bool:
    """Whether a forward is `return F.linear(x, self.weight, self.bias)` and nothing else, by its source; what only TorchScript runs is left out."""
    forward = inspect.unwrap(cls.forward)
    if forward is nn.Linear.forward:
        return True
    if getattr(cls, "weight", None) is not None or getattr(forward, "__globals__", {}).get("F") is not F:
        return False
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(forward))).body[0]
    except (OSError, TypeError, SyntaxError):  # typed in at a prompt, or made by exec
        return False
    if not isinstance(tree, ast.FunctionDef) or tree.decorator_list or len(tree.args.args) != 2 or tree.args.vararg or tree.args.kwarg or tree.args.kwonlyargs:
        return False
    own, x = (a.arg for a in tree.args.args)
    body = [s for s in tree.body if not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))]
    if body and isinstance(body[0], ast.If) and ast.unparse(body[0].test) == "torch.jit.is_scripting()":
        body = [*body[0].orelse, *body[1:]]
    return len(body) == 1 and isinstance(body[0], ast.Return) and ast.unparse(body[0]) == f"return F.linear({x}, {own}.weight, {own}.bias)"
