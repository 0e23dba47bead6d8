"""The autograd kernel of an op without what PyTorch's own spends on every call: it reads the schema's defaults anew, some 90 us for ten arguments.

Same dispatch, same semantics: with a gradient to come an `autograd.Function` around the op below autograd, else the op alone. Arguments that equal their
defaults arrive left out, as the dispatcher does it, and are filled in from a list that is made once. Where nothing lies between autograd and the device's
kernel (no mode, no tensor subclass), the op's body is called instead of the dispatcher, which would take the arguments apart and put them together again; so
PyTorch's check that no result is an argument is left out there (none is), and a CPU or CUDA kernel that somebody else registers is not asked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import _C
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy  # as in PyTorch 2.11 to 2.15

_VIEWS = _C.DispatchKeySet(_C.DispatchKey.ADInplaceOrView)
_BELOW = _C._after_autograd_keyset - _VIEWS
_DEVICES = (_C.DispatchKey.CPU, _C.DispatchKey.CUDA)
_SWITCHED_OFF = _VIEWS  # and what `_C._AutoDispatchBelowAutograd` switches off: one guard in the place of two
for _key in (_C.DispatchKey.AutogradFunctionality, _C.DispatchKey.AutogradOther, _C.DispatchKey.AutogradNestedTensor):
    _SWITCHED_OFF = _SWITCHED_OFF | _C.DispatchKeySet(_key)
_LIBRARY = torch.library.Library("fxmask", "FRAGMENT")
_last: dict[int, bool] = {}


def register_autograd(op: Any, backward: Callable[..., Any], setup_context: Callable[..., None]) -> None:
    """As `op.register_autograd(backward, setup_context=setup_context)` of `torch.library.custom_op`, with a leaner kernel in front."""
    op.register_autograd(backward, setup_context=setup_context)
    overload, below = op._opoverload, _below_autograd(op)
    defaults = tuple(a.default_value for a in overload._schema.arguments)
    count = len(defaults)

    class Lean(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            *args, keyset = inputs
            result = below(keyset, tuple(args))
            ctx.given = len(args)
            setup_context(ctx=ctx, inputs=(*args, *defaults[len(args) : count]), output=result)
            return result

        @staticmethod
        @_unseen
        def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
            return (*backward(ctx, *grads)[: ctx.given], None)

    Lean.__name__ = f"LeanBackwardFor_{overload._opname}"

    def kernel(keyset: Any, *args: Any) -> Any:
        if _C.is_grad_enabled() and _C._any_requires_grad(*args):
            return Lean.apply(*args, keyset)
        return below(keyset, args)

    _register(overload, kernel)


def without_gradient(op: Any) -> None:
    """A leaner kernel for an op whose result has no gradient, such as a mask."""
    below = _below_autograd(op)
    _register(op._opoverload, lambda keyset, *args: below(keyset, args))


def _below_autograd(op: Any) -> Callable[[Any, tuple[Any, ...]], Any]:
    """What calls an op with autograd switched off: its body, or the dispatcher where a mode or a subclass waits."""
    overload, body = op._opoverload, op._init_fn

    def below(keyset: Any, args: tuple[Any, ...]) -> Any:
        # views are not noted: an output that the op has reshaped is a tensor of its own, and may be written in place (ReLU(inplace=True) behind a layer)
        with _C._ExcludeDispatchKeyGuard(_SWITCHED_OFF):
            if _is_last(keyset):
                return body(*args)
            return overload.redispatch(keyset & _C._after_autograd_keyset, *args)

    return below


def _is_last(keyset: Any) -> bool:
    """Whether nothing lies between autograd and the device's kernel."""
    found = _last.get(keyset.raw_repr())
    if found is None:
        found = _last[keyset.raw_repr()] = (keyset & _BELOW).highestPriorityTypeId() in _DEVICES
    return found


def _register(overload: Any, kernel: Callable[..., Any]) -> None:
    kernel = _unseen(kernel)
    for key in ("AutogradCPU", "AutogradCUDA"):  # each goes before the kernel that PyTorch has made for all devices
        _LIBRARY.impl(overload._opname, kernel, key, with_keyset=True)


def _unseen(function: Any) -> Any:
    """A function whose frames, and those of what it calls, the compiler leaves alone: it knows PyTorch's own by their folder, and would compile this one's.

    Marked in its code, which costs a call nothing; `torch._disable_dynamo` does it at every call.
    """
    set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
    return function
