"""A whole training step of a model, timed: forward, a loss, backward, the optimiser's step."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..bench.provenance import allocator
from ..bench.stopwatch import Stopwatch, medians
from ..errors import ConfigError, UnsupportedError
from ..kernels.errors import message
from .unit import MakeOptimizer

try:
    import resource
except ImportError:  # not on Windows
    resource = None  # type: ignore[assignment]

FEWEST, MOST = 3, 12  # steps
MANY, FAULTS = 10_000, 0.04  # page faults, and the system's share of a CPU's time, from which they are worth a word
KEEP = "MALLOC_TRIM_THRESHOLD_=17179869184 MALLOC_MMAP_THRESHOLD_=33554432"  # glibc keeps up to 16 GiB that a step frees


def mean_square(out: Any) -> Tensor:
    """The loss where the caller gives none: the mean square of every output that requires a gradient, of complex ones that of both parts."""
    found = [torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in tree_leaves(out) if isinstance(t, Tensor) and t.requires_grad]
    if not found:
        what = "advise times training steps: expected an output that requires a gradient, got none."
        raise UnsupportedError(message(what, "", "give it a model with parameters that require gradients, or loss=, a function of the model's output."))
    return torch.stack([t.float().square().mean() for t in found]).sum()


def stepper(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], loss: Callable[[Any], Tensor], optimizer: torch.optim.Optimizer | None
) -> Callable[[], None]:
    """A call that takes one training step."""

    def step() -> None:
        torch.clear_autocast_cache()  # of the step before, where the caller's autocast is around them all
        (model if optimizer is None else optimizer).zero_grad(set_to_none=True)
        value = loss(model(*args, **kwargs))
        if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
            got = f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise ConfigError(f"loss: expected a function that gives one number with a gradient, got {got}.")
        value.backward()
        if optimizer is not None:
            try:
                optimizer.step()
            except RuntimeError as e:
                if all(p.grad is None or p.grad.layout == torch.strided for p in model.parameters()):
                    raise
                what = f"advise steps all parameters by one optimiser: expected one that takes their sparse gradients, got {type(optimizer).__name__}: {e}"
                fix = "optimizer=None times steps without one; sparse=False on the embedding gives dense gradients."
                raise UnsupportedError(message(what, "", fix)) from e

    return step


def optimizer_of(model: nn.Module, make: MakeOptimizer | None) -> torch.optim.Optimizer | None:
    trained = [p for p in model.parameters() if p.requires_grad]
    made = make(trained) if make is not None and trained else None
    if made is not None and not all(callable(getattr(made, name, None)) for name in ("step", "zero_grad")):
        raise ConfigError(f"optimizer: expected what makes a torch.optim.Optimizer from parameters, got {type(made).__name__} from it.")
    if isinstance(made, torch.optim.LBFGS):
        raise UnsupportedError(message("advise takes steps without a closure: expected an optimiser that needs none, got LBFGS.", "", "optimizer=None."))
    return made


def step_seconds(steps: dict[str, Callable[[], None]], device: torch.device, seconds: float) -> dict[str, float]:
    """Median seconds of each step, in turns, after one of each that is not counted; at least FEWEST turns, no more after so many seconds."""
    watch = Stopwatch(device)
    rows: list[tuple[float, ...]] = []
    for step in steps.values():
        step()
    end = time.perf_counter() + seconds
    while len(rows) < FEWEST or (time.perf_counter() < end and len(rows) < MOST):
        names = list(steps) if len(rows) % 2 else list(reversed(steps))
        took = {name: watch(steps[name]) for name in names}
        rows.append(tuple(took[name] for name in steps))
    return dict(zip(steps, medians(rows), strict=True))


def usage() -> tuple[float, float, int]:
    """Seconds of this process in itself and in the system, and its page faults; zeros where the system does not count them."""
    if resource is None:
        return 0.0, 0.0, 0
    now = resource.getrusage(resource.RUSAGE_SELF)
    return now.ru_utime, now.ru_stime, now.ru_minflt


def page_faults(before: tuple[float, float, int], after: tuple[float, float, int]) -> str:
    """What to say where steps fault in again what the steps before gave back, and the system had a part of their time; else nothing. Both as `usage` gives."""
    user, system, faults = (b - a for a, b in zip(before, after, strict=True))
    if faults < MANY or system < FAULTS * (system + user):
        return ""
    said = f"The system took {100 * system / (system + user):.0f} % of the trial's time, with {faults} page faults: the allocator gives back what a step frees"
    kept = any(name in allocator() for name in ("MALLOC_TRIM_THRESHOLD_", "jemalloc", "tcmalloc"))
    return said + ("." if kept else f"; with glibc, {KEEP} in the environment keeps it.")
