"""torch.jit.script compiles source, and cannot compile forwards that mask, prune or drop: each such module says so first, in clearer words."""

from __future__ import annotations

from typing import NoReturn

from torch import nn

from ...kernels.errors import UnsupportedError, message


def refuse_scripting(self: nn.Module) -> NoReturn:
    """`__prepare_scriptable__` of the modules of fxmask, which torch.jit.script calls first, for modules inside of a model, too."""
    name = getattr(self, "_fxmask_name", "") or type(self).__name__
    fix = "script a model whose masks are permanent (fxmask.finalize, or fxmask.restore for pruned and dropped inputs); or use torch.export or torch.compile."
    raise UnsupportedError(message("torch.jit.script cannot compile a layer that fxmask has changed: expected an ordinary module.", name, fix))
