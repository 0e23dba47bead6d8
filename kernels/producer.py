"""Whether autograd holds a tensor for the op that made it, so that another op saves it for nothing."""

from __future__ import annotations

from torch import Tensor


def holds(x: Tensor) -> bool:
    """Whether the op that made x, or what x is a view of, saves its own result for its backward.

    As ReLU, tanh, sigmoid, softmax and scaled_dot_product_attention do (GELU and SiLU do not). Read from the names under which PyTorch's nodes show what they
    save; nodes of backwards call what they were given an output, too. Ops of others, and a Linear elsewhere that saves the same x, are not seen.
    """
    base = x._base if x._is_view() else x
    node = type(None if base is None else base.grad_fn)
    return hasattr(node, "_saved_result") or (hasattr(node, "_saved_output") and "Attention" in node.__name__)
