"""What tracers cannot take, said in clearer words: torch.jit.script compiles source, in which no forward masks; a symbolic trace would freeze what moves."""

from __future__ import annotations

from typing import NoReturn

from torch import nn
from torch.fx import Proxy

from ...kernels.errors import UnsupportedError, message


def refuse_scripting(self: nn.Module) -> NoReturn:
    """`__prepare_scriptable__` of the modules of fxmask, which torch.jit.script calls first, for modules inside of a model, too."""
    name = getattr(self, "_fxmask_name", "") or type(self).__name__
    fix = "script a model whose masks are permanent (fxmask.finalize, or fxmask.restore for pruned and dropped inputs); or use torch.export or torch.compile."
    raise UnsupportedError(message("torch.jit.script cannot compile a layer that fxmask has changed: expected an ordinary module.", name, fix))


def refuse_symbolic(m: nn.Module, input: object, layer: str, config: str) -> None:
    """UnsupportedError where a symbolic trace runs a layer whose input is pruned or dropped, or such a call of a graph."""
    if isinstance(input, Proxy):
        what = f"torch.fx.symbolic_trace cannot look into {layer}: expected a dense model."
        where = getattr(m, "_fxmask_name", "") or type(m).__name__
        raise UnsupportedError(message(what, where, f"trace first, then fxmask.apply(traced, {config}(...)); fxmask.restore makes it dense again."))
