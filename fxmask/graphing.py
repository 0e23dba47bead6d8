"""`fxmask.graphed`: a whole training step as a CUDA graph, whose replays count as steps do. The work is `graphed_step`'s."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch.optim import Optimizer

from .graphed_step import Graphed
from .kernels.errors import ConfigError

T = TypeVar("T")


def graphed(step: Callable[[], T], *optimizers: Optimizer, warmup: int = 3) -> Graphed[T]:
    """A training step that a GPU launches as one CUDA graph: for models whose many small kernels wait for the host. Every call is one step.

        x, y = torch.empty(128, 784, device="cuda"), torch.empty(128, dtype=torch.int64, device="cuda")

        def train_step():
            optimizer.zero_grad(set_to_none=True)
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            return loss.detach()

        step = fxmask.graphed(train_step, optimizer)      # after apply and guard
        for images, labels in data:
            x.copy_(images), y.copy_(labels)
            loss = step()

    The first calls run `step` as it is. Then it is captured, and a call replays it and lets guards count: schedules, refresh intervals, feedback, rigl's dense
    steps and phases go on as they do without a graph, and what they change is written where the graph reads it. Where something changes that a graph holds
    fixed (a phase, the kernels that `impl="auto"` takes, whether the model trains, a number of the optimiser, tensors that a load has replaced), the next
    calls run `step` as it is, and it is captured anew. rigl's steps whose dense gradient regrowth reads are never captured.

    Args:
        step: makes gradients and lets all of `optimizers` step, once each. It reads its inputs from tensors that stay where they are, and decides nothing on
            the host that is to differ from call to call: no `.item()`, no numbers of the host that move. Its random numbers on the device go on.
        optimizers: those that step, guarded by `fxmask.guard` where they hold masked weights; dense ones do as well. `capturable=True` or `fused=True`, and the
            rate a tensor on the device, `lr=torch.tensor(1e-3, device="cuda")`, which torch's schedulers fill: a Python number that moves would be held
            fixed, so every change of one costs a capture, and a warning says so where they come often.
        warmup: calls that run as they are before a capture, at least 1. They are steps of the training like all others.

    Returns: a callable. It gives what `step` returns; of a replay the same tensors each time, which the next call overwrites.
    On a CPU every call runs `step` as it is.
    Raises: ConfigError; UnsupportedError where a step cannot be captured (masked_step, regrow by gradient in another mode than rigl, whatever PyTorch
    refuses; then `step` itself goes on working, and no step was taken).
    Cost: a replay, and on the host some microseconds a masked layer; masks that are due are rebuilt after it. The memory of a step stays allocated. Masks that
    are cached are rewritten in place from now on: a backward belongs before the next step.
    Not from a paper: CUDA graphs of PyTorch (`torch.cuda.graph`), which by themselves would replay the host's counts never.
    """
    if not callable(step):
        raise ConfigError(f"fxmask.graphed: expected a function without arguments that takes one training step, got {type(step).__name__}.")
    wrong = [type(o).__name__ for o in optimizers if not isinstance(o, Optimizer)]
    if wrong or not optimizers:
        raise ConfigError(f"fxmask.graphed: expected the torch.optim.Optimizers that the step steps, got {', '.join(wrong) or 'none'}.")
    if type(warmup) is not int or warmup < 1:
        raise ConfigError(f"fxmask.graphed: expected warmup, an int of at least 1, got {warmup!r}.")
    return Graphed(step, optimizers, warmup)
