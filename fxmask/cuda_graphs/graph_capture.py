"""One capture of a training step in a CUDA graph: it is taken whole, or everything is as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..guards.guard_handle import GuardHandle
from ..kernels.errors import ConfigError, FxMaskError, UnsupportedError, message
from ..passes.settings.config import WeightMask
from ..passes.state.noted import noting
from ..passes.stepping.guarded_weight import Guarded
from .graph_facts import Facts, host_values, keys_of, moved, put_back

T = TypeVar("T")


class CudaGraph:
    """torch's, with the calls that these files make."""

    def __init__(self, pool: Any, stream: Any) -> None:
        self.graph, self.pool, self.stream = torch.cuda.CUDAGraph(), pool or torch.cuda.graph_pool_handle(), stream

    def record(self, step: Callable[[], T]) -> T:
        before = torch.cuda.current_stream()
        try:  # other threads, such as a loader's that pins memory, go on meanwhile
            with torch.cuda.graph(self.graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
                return step()
        except BaseException:
            torch.cuda.set_stream(before)  # where the end of a capture fails torch leaves its stream current
            raise

    def replay(self) -> None:
        self.graph.replay()


def recorder(device: torch.device) -> Callable[..., Any] | None:
    """What records a step on a device; None where it runs as it is."""
    return CudaGraph if device.type == "cuda" else None


class Recorded(NamedTuple):
    """A captured step, and what its Python left behind that a replay leaves again."""

    graph: Any
    result: Any
    gradients: list[tuple[Tensor, Tensor | None]]
    added: list[tuple[Tensor, Tensor | None]]  # gradients from before the step that it uses; None where there was none
    notes: list[tuple[Guarded, Any]]  # the masks of before the step, where momenta of blocks that return are cleared
    layers: list[nn.Module]  # masked, pruned, dropping and N:M layers whose forwards ran


def gradients_of(optimizers: Sequence[Optimizer]) -> list[tuple[Tensor, Tensor | None, int]]:
    """As they are, with the versions of their values."""
    found = [(p, p.grad) for o in optimizers for group in o.param_groups for p in group["params"]]
    return [(p, grad, 0 if grad is None else grad._version) for p, grad in found]


def captured(
    step: Callable[[], Any], graph: Any, optimizers: Sequence[Optimizer], handles: list[GuardHandle], facts: Facts, zeroed: set[int], name: str
) -> Recorded | None:
    """Capture a step; None where the optimisers have made state in it, which every replay would make anew: it has to run as it is first. `zeroed`: ids of
    parameters whose gradients it drops, before it makes its own.

    Raises: UnsupportedError and ConfigError where no replay could be the step; no step was taken then.
    """
    before, recorded = _Before(optimizers, handles, facts), None
    try:
        with _translated(name):
            recorded = _recorded(step, graph, before, zeroed, name)
    finally:
        if recorded is None:
            before.put_back()
    return recorded


def _recorded(step: Callable[[], Any], graph: Any, before: _Before, zeroed: set[int], name: str) -> Recorded | None:
    with _counting(before.handles) as steps, noting() as noted:
        result = graph.record(step)
    if any(n != 1 for n in steps):
        what = f"fxmask.graphed: expected a step in which each guarded optimiser steps once, got {steps} steps; it was not taken."
        raise ConfigError(message(what, name, "give fxmask.graphed the optimisers that this function steps, and let it take one step."))
    if keys_of(before.optimizers) != before.entries:
        return None
    if replaced := before.replaced():
        what = "the step puts new tensors in place of state or buffers, of which every replay would read those of the capture: expected writes in place"
        fix = "let them use copy_, mul_ and their like, or go on without a graph."
        raise UnsupportedError(message(f"{what}; the step was not taken.", ", ".join(replaced), fix))
    if moved(before.counts):
        what = "an optimiser counts on the host, which a CUDA graph holds fixed: expected one whose state lies on the device; the step was not taken."
        where = ", ".join(type(o).__name__ for o in before.optimizers)
        raise UnsupportedError(message(what, where, "use one with capturable=True, or go on without a graph."))
    if (late := _read_late(noted)) is not None:
        what = "this step runs a layer behind the optimiser's step that moves its mask: a replay counts at its end, so that the mask would be that of before"
        fix = "graph the part of each optimiser as a step of its own, or leave out forwards behind the step; or go on without a graph."
        raise UnsupportedError(message(f"{what}; the step was not taken.", late, fix))
    layers = [m for m in noted if isinstance(m, nn.Module)]
    after = [(p, p.grad) for p, _, _ in before.gradients]
    added = [(p, grad) for p, grad, version in before.gradients if (id(p) not in zeroed if grad is None else _adds_to(p, grad, version))]
    return Recorded(graph, result, after, added, [(g, g.last) for h in before.handles for g in h._held.guarded], layers)


def _adds_to(p: Tensor, grad: Tensor, version: int) -> bool:
    """Whether a step uses the gradient that it has found. One that leaves none has found one from outside; one that leaves another has dropped it."""
    return grad is p.grad or (p.grad is None and grad._version != version)


def _read_late(noted: list[object]) -> str | None:
    """The first layer that ran when its guard's optimiser had stepped already, where the number of steps moves what it reads."""
    moved: dict[int, str] = {}
    for item in noted:
        if isinstance(item, GuardHandle):
            moved |= {id(site): site._fxmask_name for site, _ in item._held.followed if _moves(site._fxmask_given)}
            moved |= {id(m): name for name, m in item._held.pruned}
        elif id(item) in moved:
            return moved[id(item)]
    return None


def _moves(config: WeightMask) -> bool:
    return config.needs_steps or config.criterion == "random"


@contextmanager
def _counting(handles: list[GuardHandle]) -> Iterator[list[int]]:
    """Inside, steps of guarded optimisers count nothing but themselves; behind it the list has how many there were of each."""
    taken: list[int] = []
    if any(h._captures is not None for h in handles):
        raise ConfigError("fxmask.graphed inside of a step that is captured: expected one, around the whole step.")
    try:
        for h in handles:
            h._captures = 0
        yield taken
        taken += [h._captures or 0 for h in handles]
    finally:
        for h in handles:
            h._captures = None


class _Before:
    """What Python may change in a capture, as it was."""

    def __init__(self, optimizers: Sequence[Optimizer], handles: list[GuardHandle], facts: Facts) -> None:
        self.optimizers, self.handles = optimizers, handles
        self.gradients = gradients_of(optimizers)
        self.entries, self.counts = keys_of(optimizers), host_values(facts)
        own: list[tuple[object, Any]] = [(o, d) for o in optimizers for d in (*o.param_groups, *o.state.values())]
        own += [(m, m._buffers) for m in facts.modules if type(m._buffers) is dict]  # TorchScript has others
        self.state = [(type(owner).__name__, d, k, v) for owner, d in own for k, v in d.items() if facts.lies(v)]

    def replaced(self) -> list[str]:
        """The classes of optimisers and modules that have other tensors on the device than before."""
        return sorted({owner for owner, d, k, v in self.state if d.get(k) is not v})

    def put_back(self) -> None:
        """Undo what Python has made since, and nothing has computed."""
        for p, grad, _ in self.gradients:
            p.grad = grad
        for o in self.optimizers:
            for p, state in list(o.state.items()):
                for key in set(state) - self.entries.get(p, set()):
                    del state[key]
                if p not in self.entries:
                    del o.state[p]
        for _, d, key, value in self.state:
            d[key] = value
        put_back(self.counts)
        for g in (g for h in self.handles for g in h._held.guarded):
            g.last = None
            g.forget()


@contextmanager
def _translated(name: str) -> Iterator[None]:
    """PyTorch's errors of a capture as UnsupportedError; those of fxmask, of memory and of anything else as they are."""
    try:
        yield
    except (FxMaskError, torch.OutOfMemoryError):
        raise
    except RuntimeError as error:
        what = f"this step cannot be captured in a CUDA graph, and was not taken: {str(error).splitlines()[0]}"
        fix = "no .item(), no printing of tensors, nothing that comes from the CPU; see torch.cuda.graph. The step itself can go on without one."
        raise UnsupportedError(message(what, name, fix)) from error
