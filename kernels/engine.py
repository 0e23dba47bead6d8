"""Which gradients a backward is to make."""

from __future__ import annotations

from typing import Any

from torch import _C


def asked_of(ctx: Any) -> tuple[bool, bool]:
    """Of an op's first two operands, both tensors: whose gradient is required, and will be looked at.

    `ctx.needs_input_grad` alone knows what requires one. Of `torch.autograd.grad(loss, x)` (saliency, adversarial inputs, gradient penalties) a Linear's
    backward makes no dW, though the weight requires one, and of `grad(loss, last.weight)` no dX: the engine tells its own nodes.
    """
    required = ctx.needs_input_grad[:2]
    if not all(required):  # what is left is why the backward was called
        return required
    first, second = (_is_executed(node) for node, _ in ctx.next_functions[:2])
    return first, second


def _is_executed(node: Any) -> bool:
    """Whether the engine goes on to this node; true where it does not say: of a leaf that `torch.autograd.grad` names, and where a backward is traced."""
    try:
        return bool(_C._will_engine_execute_node(node))
    except RuntimeError:
        return True
