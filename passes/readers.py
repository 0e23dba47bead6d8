"""Which modules read `.weight` of a Linear instead of calling it: those that PyTorch is known for, and those whose forward says so.

timm's BEiT and EVA-02, for one, compute `F.linear(x, weight=self.qkv.weight, bias=...)`. Such a read is found in the source of the owner's forward and of the
methods that it calls. What no source shows is found when a model trains (`passes.bypass`).
"""

from __future__ import annotations

import inspect
import re
from functools import cache
from typing import Any

from torch import nn
from torch.fx import GraphModule

# a read that takes no values: the type, the place or the size of the weight
FACTS = "dtype|device|shape|size|dim|ndim|numel|layout|requires_grad|is_cuda|is_meta|is_floating_point|element_size|stride|is_contiguous"
READ = re.compile(rf"(?<!isinstance\()\bself\.([\w.]+)\.weight\b(?!\s*\.(?:{FACTS})\b)(?!\s+is\b)(?!\s*=[^=])")
CALL = re.compile(r"\bself\.(\w+)\(")


def weight_readers(model: nn.Module) -> dict[int, nn.Module]:
    """id of a Linear -> the module that reads its weight."""
    found: dict[int, nn.Module] = {}
    for m in model.modules():
        if isinstance(m, nn.MultiheadAttention):  # never calls out_proj
            found[id(m.out_proj)] = m
        elif isinstance(m, nn.TransformerEncoderLayer):  # its fast path calls neither
            found[id(m.linear1)] = found[id(m.linear2)] = m
        elif "forward" not in m.__dict__ and not isinstance(m, GraphModule):
            cls: Any = getattr(type(m), "_fxmask_base", type(m))
            for path in _paths_read(cls):
                read = _submodule(m, path)
                if isinstance(read, nn.Linear):
                    found[id(read)] = m
    return found


def ancestors(model: nn.Module, layer: nn.Module) -> list[nn.Module]:
    """Every module that holds a layer, however deep; any of them may be the one that reads it."""
    return [m for m in model.modules() if m is not layer and any(inner is layer for inner in m.modules())]


@cache
def _paths_read(cls: type[nn.Module]) -> tuple[str, ...]:
    """Paths p of `self.p.weight` that a class reads in its forward and the methods that this calls."""
    if cls.__module__.startswith("torch.nn.modules"):
        return ()
    seen, todo, paths = set(), ["forward"], []
    while todo:
        name = todo.pop()
        method = getattr(cls, name, None)
        if name in seen or method is None or not inspect.isfunction(inspect.unwrap(method)):
            continue
        seen.add(name)
        try:
            source = inspect.getsource(inspect.unwrap(method))
        except (OSError, TypeError):  # typed in at a prompt, or made by exec
            continue
        paths += READ.findall(source)
        todo += CALL.findall(source)
    return tuple(dict.fromkeys(paths))


def _submodule(m: nn.Module, path: str) -> object:
    try:
        return m.get_submodule(path)
    except AttributeError:
        return None
