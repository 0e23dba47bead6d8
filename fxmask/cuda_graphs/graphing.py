"""`fxmask.graphed`: a whole training step as a CUDA graph, whose replays count as steps do. The work is `graphed_step`'s."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from torch import nn
from torch.optim import Optimizer

from ..kernels.errors import ConfigError
from .graphed_step import Graphed

T = TypeVar("T")


def graphed(step: Callable[[], T], *optimizers: Optimizer, models: Iterable[nn.Module] = (), warmup: int = 3) -> Graphed[T]:
    """A training step that a GPU launches as one CUDA graph: for models whose many small kernels wait for the host. Every call is one step.

        optimizer = AdamW(model.parameters(), lr=torch.tensor(1e-3, device="cuda"), fused=True, capturable=True)
        fxmask.guard(optimizer, model)
        x, y = torch.empty(128, 784, device="cuda"), torch.empty(128, dtype=torch.int64, device="cuda")

        def train_step():
            optimizer.zero_grad(set_to_none=True)
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            return loss.detach()

        step = fxmask.graphed(train_step, optimizer)
        for images, labels in data:
            x.copy_(images), y.copy_(labels)
            loss = step()
            scheduler.step()

    The first calls run `step` as it is. Then it is captured, and a call replays it and lets guards count: schedules, refresh intervals, feedback, rigl's dense
    steps and phases go on as they do without a graph, and what they change is written where the graph reads it. Before every call the tensors of optimisers,
    guarded models and `models` are compared with those that were captured, and so is what a graph holds fixed of them: phases, modes and kernels of masks,
    children, classes, forwards and train() or eval() of modules, hooks of modules, parameters and optimisers, block dropout, which parameters train, groups
    of the optimisers and numbers in them, autocast, the default dtype, deterministic algorithms, the precision of products, what attention may run on. After a
    change some calls run `step` as it is, and it is captured anew. rigl's steps whose dense gradients regrowth reads are never captured. Not looked at, and so
    held as they were captured: plain attributes of modules and other objects, such as nn.Dropout's p or a GradScaler's growth factor.

    Args:
        step: makes all gradients that it uses, and lets each of `optimizers` step once. It reads its inputs from tensors that stay where they are, and nothing
            in it may differ from call to call but what lies on the device: no `.item()`, no scheduler's step, no hooks of the optimiser that count, no numbers
            of the host that move. Random numbers of the device go on. Counts, and masks that are due, follow behind all of it: no layer whose mask moves by
            steps may run behind its optimiser's step, and `fxmask.masks` there would give those of before.
        optimizers: those that step, guarded by `fxmask.guard` where they hold masked weights; dense ones do as well. capturable=True where they know it, and
            the rate a tensor on the device, which torch's schedulers fill: of a Python number the graph would hold the value, and every change costs a capture.
        models: what else the step runs, such as a dense model, a teacher, or the other half of a GAN. Masked, pruned, dropping and N:M layers that it runs
            outside of compiled code are found without being named; a dense model that is not named may not go from train() to eval(), nor be masked or given
            hooks, and its buffers must stay in place.
        warmup: calls that run as they are before a capture, at least 1. They are steps of the training like all others.

    Returns: a callable. It gives what `step` returns; of a replay the same tensors each time, which the next call overwrites. On a CPU every call runs `step`
    as it is.
    Raises: ConfigError (an optimiser without capturable=True; a step that steps a guarded optimiser other than once); UnsupportedError where a step cannot be
    captured (masked_step; a layer behind the step that moves its mask; regrow by gradient in another mode than rigl; an optimiser that counts on the host;
    state or buffers that are made anew; whatever PyTorch refuses). Then no step was taken, and `step` itself can go on. Warns after 50 calls where fewer than
    half were replays, with the reason.
    Cost: a replay, and on the host ten to twenty microseconds a masked layer; masks that are due are rebuilt after it. The memory of a step
    stays allocated. Masks, lists, scores and scalars of watched layers are rewritten in place from now on: a backward belongs before the next step.
    Not from a paper: CUDA graphs of PyTorch (`torch.cuda.graph`), which by themselves would never replay the host's counts.
    """
    if (isinstance(models, nn.Module) and not isinstance(models, nn.ModuleList)) or not isinstance(models, Iterable):  # an nn.Sequential would be taken apart
        raise ConfigError(f"fxmask.graphed: expected models, a list of nn.Modules that the step runs, got {type(models).__name__}.")
    named = tuple(models)
    if not callable(step):
        raise ConfigError(f"fxmask.graphed: expected a function without arguments that takes one training step, got {type(step).__name__}.")
    wrong = [type(o).__name__ for o in optimizers if not isinstance(o, Optimizer)]
    if wrong or not optimizers:
        raise ConfigError(f"fxmask.graphed: expected the torch.optim.Optimizers that the step steps, got {', '.join(wrong) or 'none'}.")
    wrong = [type(m).__name__ for m in named if not isinstance(m, nn.Module)]
    if wrong:
        raise ConfigError(f"fxmask.graphed: expected models, a list of nn.Modules that the step runs, got {', '.join(wrong)}.")
    if type(warmup) is not int or warmup < 1:
        raise ConfigError(f"fxmask.graphed: expected warmup, an int of at least 1, got {warmup!r}.")
    return Graphed(step, optimizers, named, warmup)
