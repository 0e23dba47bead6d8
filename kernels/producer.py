"""Whether autograd holds a tensor for the op that made it, so that another op saves it for nothing."""

from __future__ import annotations

from torch import Tensor

RESULTS = ("_saved_result", "_saved_output")  # under which PyTorch's nodes show that they save what they return; the second is attention's


def holds(x: Tensor) -> bool:
    """Whether the op that made x, or what x is a view of, saves its own result for its backward.

    As ReLU, tanh, sigmoid, softmax and scaled_dot_product_attention do (GELU and SiLU do not). Ops of others, and a Linear elsewhere that saves the same x,
    are not seen.
    """
    base = x._base if x._is_view() else x
    node = None if base is None else base.grad_fn
    if type(node).__name__ == "PowBackward1":  # for the gradient of its exponent alone
        return node is not None and node.next_functions[1][0] is not None
    return any(hasattr(type(node), name) for name in RESULTS)
