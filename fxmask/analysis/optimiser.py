"""The optimiser's step: one pass over the parameters that are trained, their gradients and its state."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import ConfigError
from ..kernels import dense_cost
from ..passes.capture import Recording
from ..passes.work import EXACT, Work

# tensors of a parameter's size that an optimiser keeps, by the class's name in torch.optim
STATES = {"adamw": 2, "adam": 2, "nadam": 2, "radam": 2, "adamax": 2, "adadelta": 2, "sgd": 0, "sgd_momentum": 1, "adagrad": 1, "rmsprop": 1, "lion": 1}


def states_of(optimizer: str | torch.optim.Optimizer | None) -> tuple[str, int]:
    """(name, tensors of state a parameter); ConfigError for one that is not known. An instance of SGD has momentum where any of its groups has."""
    if optimizer is None:
        return "none", 0
    if isinstance(optimizer, torch.optim.Optimizer):
        name = type(optimizer).__name__.lower()
        if name == "sgd" and any(g.get("momentum") for g in optimizer.param_groups):
            name = "sgd_momentum"
        extra = int(any(g.get("amsgrad") for g in optimizer.param_groups)) + int(name == "rmsprop" and any(g.get("momentum") for g in optimizer.param_groups))
    else:
        name, extra = str(optimizer).lower(), 0
    if name not in STATES:
        raise ConfigError(f"optimizer: expected one of {', '.join(STATES)}, an instance of one of them, or None, got {optimizer!r}.")
    return name, STATES[name] + extra


def step(recording: Recording, optimizer: str | torch.optim.Optimizer | None) -> list[Work]:
    """A row for each parameter: reads it, its gradient and its state, writes it and the state; all of the parameter's dtype, masked weights included.

    An instance steps what it was given, a name all parameters; those without a gradient stay, as torch.optim leaves them.
    """
    name, states = states_of(optimizer)
    if optimizer is None:
        return []
    found = []
    given = {id(p) for g in optimizer.param_groups for p in g["params"]} if isinstance(optimizer, torch.optim.Optimizer) else None
    for parameter, p in recording.parameters.items():
        if parameter in recording.trained and (given is None or id(p) in given):
            size, dtype = recording.size(p), recording.dtype if recording.dtype and p.is_floating_point() else p.dtype
            reads = {"w": size, "dw": size} | ({"opt_state": states * size} if states else {})
            writes = {"w": size} | ({"opt_state": states * size} if states else {})
            found.append(Work(None, "opt", EXACT, dense_cost.stream(reads, writes), dtype=dtype, weight=parameter, elements=p.numel(), name=f"optim.{name}"))
    return found


def summary(optimizer: str | torch.optim.Optimizer | None) -> dict[str, Any]:
    """What the step was counted as."""
    name, states = states_of(optimizer)
    return {"optimizer": name, "state_tensors": states}
