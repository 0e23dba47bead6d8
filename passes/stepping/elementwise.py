"""Which optimisers, and which calls of `step`, a step on kept blocks alone can be made of; everything else raises and says what to do."""

from __future__ import annotations

from functools import cache
from itertools import dropwhile
from typing import Any

import torch
from torch import Tensor, optim
from torch.optim import Optimizer

from ...kernels.errors import UnsupportedError, message
from ..frames import frames
from ..state import ranks
from .guarded_weight import EVERY
from .held import find_wrapped

ELEMENTWISE = (
    optim.SGD, optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax, optim.Adagrad, optim.Adadelta, optim.RMSprop, optim.Rprop, optim.ASGD,
)  # fmt: skip


def _is_muon(optimizer: Optimizer) -> bool:
    """Whether it is torch.optim's, or by its name somebody else's: timm's, Keller Jordan's, whose momentum has the same name."""
    return any("muon" in c.__name__.lower() for c in type(optimizer).__mro__)


def looks_at_others(optimizer: Optimizer) -> bool:
    """Whether this is a Muon, or one of torch.optim, or made from one, that moves an element by the gradients and momenta of others: Adafactor, LBFGS."""
    theirs = [c for c in type(optimizer).__mro__ if c.__module__.startswith("torch.optim") and c is not Optimizer and issubclass(c, Optimizer)]
    return _is_muon(optimizer) or any(c not in ELEMENTWISE for c in theirs)


def cleared_while_masked(optimizer: Optimizer, returning: str) -> str:
    """Which state of a frozen weight is zero while masked: none where each element is its own, Muon's momentum, or all where `returning` says so."""
    chain = find_wrapped(optimizer)
    if returning == "zero" and any(type(o) not in ELEMENTWISE for o in chain):
        return EVERY
    return "momentum_buffer" if any(map(_is_muon, chain)) else ""


def refuse(optimizer: Optimizer, vouched: bool) -> None:
    """Raise UnsupportedError where a step on kept elements alone is not the step on all, or is not known to be; `vouched`: somebody said that it is."""
    kind = type(optimizer)
    if ranks.stepping(optimizer) is not optimizer:
        what = "masked_step of an optimiser that shares its state out among processes: expected one that holds all of it."
        raise UnsupportedError(message(what, kind.__name__, "leave masked_step out: freeze works there."))
    if len(find_wrapped(optimizer)) > 1:
        what = f"masked_step of {kind.__name__}, which wraps another optimiser: expected one that steps by itself, from its own param_groups and state."
        fix = "leave masked_step out; or guard the optimiser inside, where the wrapper leaves masked weights alone."
        raise UnsupportedError(message(what, kind.__name__, fix))
    if looks_at_others(optimizer):
        what = f"masked_step of {kind.__name__}: expected an optimiser that moves each element by its own gradient and state, and this one looks at others."
        raise UnsupportedError(message(what, kind.__name__, f"leave masked_step out, or use one of {', '.join(c.__name__ for c in ELEMENTWISE)}."))
    if kind not in ELEMENTWISE and not vouched:
        what = f"masked_step of {kind.__name__}, which fxmask does not know: expected one of {', '.join(c.__name__ for c in ELEMENTWISE)}."
        fix = "masked_step='elementwise' says that this class moves each element by its own gradient and state, from param_groups and self.state alone."
        raise UnsupportedError(message(what, kind.__name__, fix))
    if any(g.get("differentiable") for g in optimizer.param_groups):
        what = "masked_step of an optimiser with differentiable=True: expected a step that nobody differentiates."
        raise UnsupportedError(message(what, kind.__name__, "leave masked_step out."))


def refuse_shard(name: str, weight: Tensor) -> None:
    """Raise UnsupportedError for a weight of which this process holds a part."""
    if ranks.is_shard(weight):
        what = "masked_step of a weight that fully_shard has shared out: expected a whole one."
        raise UnsupportedError(message(what, name, "leave masked_step out: freeze works there."))


STEP = Optimizer.profile_hook_step(lambda: None).__code__  # of the frame that runs the hooks of a step


@cache
def _codes() -> tuple[Any, Any]:
    """Code objects of the frames that enter compiled code, and of those that enter what `torch.compiler.disable` leaves out."""
    return torch.compile(_codes, backend="eager").__code__, torch.compiler.disable(_codes).__code__


def _in_compiled_code() -> bool:
    """Whether the step that runs was called from compiled code. Asked inside a hook, which the compiler leaves alone: so nothing else knows."""
    around = dropwhile(lambda frame: frame.f_code is not STEP, frames())
    return next((frame.f_code for frame in around if frame.f_code in _codes()), None) is _codes()[0]


def refuse_call(optimizer: Optimizer, closure: bool, hook: int) -> None:
    """Raise UnsupportedError for a call of `optimizer.step` that cannot be a masked one; `hook` is the id of the guard's own."""
    kind = type(optimizer).__name__
    if closure:
        what = "masked_step with a closure, which makes the gradients inside the step: expected them before it."
        raise UnsupportedError(message(what, kind, "call backward before optimizer.step(), or leave masked_step out."))
    if _in_compiled_code():
        what = "masked_step inside torch.compile, which would compile every step anew: expected an optimizer.step() that runs as it is."
        raise UnsupportedError(message(what, kind, "compile the model alone, put the step behind torch.compiler.disable, or leave masked_step out."))
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        what = "masked_step inside a CUDA graph: expected a step outside of one, because a replay would step the blocks that were kept when it was captured."
        raise UnsupportedError(message(what, kind, "capture forward and backward alone, or leave masked_step out."))
    if next(reversed(optimizer._optimizer_step_pre_hooks)) != hook:
        what = "a step pre-hook that was registered after fxmask.guard(masked_step=...): expected the guard last, or what it does to gradients is lost."
        raise UnsupportedError(message(what, kind, "register it before fxmask.guard."))
