"""Whether autograd holds a tensor for the op that made it, so that another op saves it for nothing."""

from __future__ import annotations

from torch import Tensor


def holds(x: Tensor) -> bool:
    """Whether the op that made x, or what x is a view of, saves its own result for its backward, as ReLU, tanh, sigmoid and softmax do (GELU and SiLU do not).

    Read from the name under which PyTorch's nodes show what they save. Ops of others, and a Linear elsewhere that saves the same x, are not seen.
    """
    base = x._base if x._is_view() else x
    return base is not None and hasattr(type(base.grad_fn), "_saved_result")
