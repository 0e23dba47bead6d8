"""What an optimiser remembers of a weight, element by element: momenta, step sizes, and copies of the weight; and how an element of it begins."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ...kernels.errors import UnsupportedError, message
from ..state import ranks
from .held import is_torchs, states_of

if TYPE_CHECKING:
    from .guarded_weight import Guarded

STEP_SIZE, AVERAGE = "step_size", "ax"  # of Rprop, which begins at the lr, and of ASGD, at the weight
NO_MOMENTA = (STEP_SIZE, AVERAGE)
# averages and sums of gradients, by PyTorch's names, and the last one; a coupled decay alone brings them near the weight: SGD's to decay / (1 - momentum) of it
OF_GRADIENTS = frozenset({"momentum_buffer", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "square_avg", "grad_avg", "acc_delta", "sum", "prev"})


def momenta_of(optimizer: Optimizer, weight: Tensor) -> dict[str, Tensor]:
    """Tensors of the optimiser's state that have an element for each of the weight's; of a sharded weight, for each of this process's part.

    Integers are codes of values (8-bit optimisers), of which nobody here knows the scale: they are the optimiser's.
    """
    every = ((f"{i}:{k}" if i else k, t) for i, state in enumerate(states_of(optimizer, weight)) for k, t in state.items())  # a wrapped one's with a number
    found = {k: t for k, t in every if isinstance(t, Tensor) and t.is_floating_point()}
    if not ranks.is_shard(weight):
        return {k: t for k, t in found.items() if t.shape == weight.shape}
    shape, parts = ranks.part(weight).shape, {}
    for k, t in found.items():
        if ranks.is_shard(t) and t.shape == weight.shape and t.placements == weight.placements:  # type: ignore[attr-defined]
            parts[k] = ranks.part(t)
        elif not ranks.is_shard(t) and t.shape == shape:  # an optimiser that works on its own part
            parts[k] = t
        elif t.shape == weight.shape:
            what = f"the optimiser's {k!r} lies otherwise than its weight: expected it sharded as the weight is ({weight.placements})."  # type: ignore[attr-defined]
            raise UnsupportedError(message(what, type(optimizer).__name__, "use an optimiser that shards its state, or masked_weights='free'."))
    return parts


def averages_of(optimizer: Optimizer) -> frozenset[str]:
    """What the averages of gradients among its states are called, where PyTorch named them: AccSGD, of others, calls a copy of the weight so."""
    return OF_GRADIENTS if is_torchs(ranks.stepping(optimizer)) else frozenset()


def word(key: Any) -> Any:
    """What the optimiser that has a state calls it."""
    return key.rpartition(":")[2] if isinstance(key, str) else key  # some number their states


def is_copy(key: Any, t: Tensor, w: Tensor, averages: Collection[str]) -> Tensor:
    """Whether a state is a copy of the weight (slow weights, Schedule-Free's z), 0-d bool: not `averages` of gradients, ASGD's by name, others by values."""
    if word(key) in averages:
        return torch.zeros((), dtype=torch.bool, device=t.device)
    return ((t - w).norm() < 0.5 * w.norm()) | (word(key) == AVERAGE)


def start_anew(g: Guarded, key: Any, t: Tensor, where: Tensor, weight: Tensor) -> None:
    """Let elements of a state begin: at zero; at the weight where the state is a copy of it.

    No momentum of another name is near the weight there: the gradient was zero, a decay is a small part of it. What `g.clear` names is known to be one.
    """
    if word(key) == g.clear or word(key) in g.averages:
        t.masked_fill_(where, 0)
        return
    w = weight.to(t)
    copies = is_copy(key, torch.where(where, t, 0), torch.where(where, w, 0), g.averages)
    t.copy_(torch.where(where, torch.where(copies, w, 0), t))
