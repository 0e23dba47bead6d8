"""Which gradients a backward is to make."""

from __future__ import annotations

from typing import Any

from torch import _C

_LEAF = "torch::autograd::AccumulateGrad"
_raised_in = -1  # the last backward in which a leaf did not say


def asked_of(ctx: Any) -> tuple[bool, bool]:
    """Of an op's first two operands, both tensors: whose gradient is required, and will be looked at.

    `ctx.needs_input_grad` alone knows what requires one. Of `torch.autograd.grad(loss, x)` (saliency, adversarial inputs, gradient penalties) a Linear's
    backward makes no dW, though the weight requires one, and of `grad(loss, last.weight)` no dX: the engine tells its own nodes.
    """
    required = ctx.needs_input_grad[:2]
    if not all(required):  # what is left is why the backward was called
        return required
    if _C._current_autograd_node() is not ctx:  # called by hand, maybe within a backward of another graph, which knows none of these nodes
        return required
    (first, _), (second, _) = ctx.next_functions[:2]
    by_second = _is_executed(second)  # before the first, a model's input maybe, which would raise
    return _is_executed(first), by_second


def _is_executed(node: Any) -> bool:
    """Whether the engine goes on to this node; true where it does not say: of a leaf that `torch.autograd.grad` names.

    It raises then, which takes as long as a small matmul: once a backward is enough, and the leaves after that one get their gradients unasked.
    """
    global _raised_in
    backward = _C._current_graph_task_id()
    if backward == _raised_in and node.name() == _LEAF:
        return True
    try:
        return bool(_C._will_engine_execute_node(node))
    except RuntimeError:
        _raised_in = backward
        return True
