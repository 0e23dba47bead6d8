"""Costs of ops that are not ours, given by users: one formula for the analysis and for PyTorch's counter."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import flop_registry, register_flop_formula

from ...kernels.errors import ConfigError
from .calls import Call, Place
from .moves import stream_of
from .work import REGISTERED, RULES, Target, Work, phase_of

_registered: dict[Any, bool] = {}  # ops that were registered here, which may be again, as by a notebook's cell, and whether PyTorch's counter has that formula


def register_cost(op: Any) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Decorator: give an op a cost, for `analyze` and for `torch.utils.flop_counter.FlopCounterMode` alike.

    op: `torch.ops.lib.name`. The function gets the op's arguments with a shape (a tuple) for every tensor, and `out_shape`, and gives the useful FLOP, an int;
    bytes are those of the operands, each once.
    Another function for the same op takes the place of the first. Raises ConfigError for what is no op, and for one that `analyze` itself knows.

        @fxmask.register_cost(torch.ops.mylib.norm_matmul)
        def _(x_shape, w_shape, *, out_shape): return 2 * x_shape[0] * x_shape[1] * w_shape[0]
    """
    packet = op.overloadpacket if isinstance(op, torch._ops.OpOverload) else op
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        raise ConfigError(f"register_cost: expected an op such as torch.ops.mylib.name, got {op!r}.")
    name = str(packet)
    if name in RULES and packet not in _registered:
        raise ConfigError(f"register_cost: {name} has a cost already: expected an op that `analyze` lists as unknown.")

    def decorate(formula: Callable[..., int]) -> Callable[..., int]:
        if not callable(formula):
            raise ConfigError(f"register_cost: expected a function of the arguments of {name} that gives its FLOP, got {formula!r}.")

        try:
            signature = inspect.signature(formula, follow_wrapped=False)  # a decorator may take other arguments than what it wraps
        except (TypeError, ValueError):  # a builtin that tells nothing of its arguments
            signature = None

        def checked(*args: Any, **named: Any) -> int:
            try:
                flop: Any = (formula if signature is None else signature.bind)(*args, **named)  # a builtin says what it takes when it is called
            except TypeError as e:
                got = f"{len(args)} positional arguments and {', '.join(named)}"
                raise ConfigError(f"the registered cost of {name} does not take the op's arguments: {e}; it was given {got}.") from e
            if signature is not None:
                flop = formula(*args, **named)
            if isinstance(flop, bool) or not isinstance(flop, int) or flop < 0:
                raise ConfigError(f"the registered cost of {name} must give FLOP: expected an int of at least 0, got {flop!r}.")
            return flop

        def rule(call: Call, t: Target) -> list[Work]:
            args, kwargs = tree_map(lambda a: a.shape if isinstance(a, Place) else a, (call.args, call.kwargs))
            outs = [p.shape for p in call.outputs]
            flop = checked(*args, **{**kwargs, "out_shape": outs[0] if len(outs) == 1 else tuple(outs)})
            cost = stream_of(call).with_flop(flop, flop)
            dtype = next((p.dtype for p in (*call.outputs, *call.inputs)), None)
            return [Work(call, phase_of(call), REGISTERED, cost, dtype=dtype, weight="+".join(sorted(call.weights)))]

        RULES[name] = rule
        if packet not in flop_registry or _registered.get(packet):
            flop_registry.pop(packet, None)
            register_flop_formula(packet)(checked)
            _registered[packet] = True
        _registered.setdefault(packet, False)
        return formula

    return decorate
