"""A training step that is captured in CUDA graphs, one for each set of what Python decides in it; between replays the guards count.

A graph may be replayed while nothing that it holds fixed has changed: so before each call the tensors that it reads are compared by identity, and the decisions
by value. Masks and scores are written in place (`Site._fxmask_in_place`) not for that, but so that nothing has to be captured anew.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from .decided import times_applied
from .guard_handle import GuardHandle
from .kernels.errors import ConfigError, FxMaskError, FxMaskWarning, UnsupportedError, message
from .passes.optimiser import Guarded
from .passes.site import Site, masks_any

T = TypeVar("T")
KEPT = 4  # graphs; they share their memory
OFTEN = 10  # calls: a number of the optimiser that moves again within them is no graph's


class _CudaGraph:
    """torch's, with the calls that this file makes."""

    pool: Any = None  # of all graphs of one step

    def __init__(self, pool: Any = None) -> None:
        self.graph, self.pool = torch.cuda.CUDAGraph(), pool or torch.cuda.graph_pool_handle()

    def record(self, step: Callable[[], T]) -> T:
        with torch.cuda.graph(self.graph, pool=self.pool):
            return step()

    def replay(self) -> None:
        self.graph.replay()


def _recorder(device: torch.device) -> Callable[..., Any] | None:
    """What records a step on a device; None where it runs as it is."""
    return _CudaGraph if device.type == "cuda" else None


class _Recorded(NamedTuple):
    """One captured step, and what its Python left behind that a replay leaves again."""

    graph: Any
    result: Any
    gradients: list[tuple[Tensor, Tensor | None]]
    notes: list[tuple[Guarded, Any]]  # the masks of before the step, where momenta of blocks that return are cleared


class Graphed(Generic[T]):
    """What `graphed` gives. `captures`: how many times the step was captured; `replays`: how many calls replayed it."""

    def __init__(self, step: Callable[[], T], optimizers: tuple[Optimizer, ...], warmup: int) -> None:
        self._step, self._optimizers, self._warmup = step, optimizers, warmup
        self._device = next(p for o in optimizers for group in o.param_groups for p in group["params"]).device
        self._make = _recorder(self._device)
        self._graphs: dict[Hashable, _Recorded] = {}
        self._warm: dict[Hashable, int] = {}
        self._tensors: list[Any] = []
        self._shown: set[int] = set()  # ids of sites
        self._numbers: Hashable = None
        self._times, self._masks = -1, None  # type: int, Hashable
        self._since, self._told = OFTEN, False  # calls since a number moved
        self.captures = self.replays = 0

    def __call__(self) -> T:
        """One training step."""
        if self._make is None:
            return self._step()
        handles = [h for o in self._optimizers for h in _handles(o)]
        _refuse(handles)
        tensors = self._read(handles)
        if len(tensors) != len(self._tensors) or any(a is not b for a, b in zip(tensors, self._tensors, strict=True)):
            self._graphs, self._warm, self._tensors = {}, {}, tensors  # something was replaced: it lies elsewhere
        unseen = set().union(*map(_unseen, handles)) - self._shown
        if unseen or any(map(_grows, handles)):
            self._shown |= unseen  # once: a layer without a gradient would never be looked at
            return self._as_it_is()
        kind = self._kind(handles)
        if kind not in self._graphs:
            warm = self._warm.get(kind, 0)
            self._warm[kind] = warm + 1
            if warm < self._warmup:
                return self._as_it_is()
            self._capture(kind, handles)
        return self._replay(self._graphs[kind], handles)

    def _as_it_is(self) -> T:
        """On a stream of its own, as torch asks for before a capture."""
        if self._device.type != "cuda":
            return self._step()
        now, side = torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(now)
        with torch.cuda.stream(side):
            result = self._step()
        now.wait_stream(side)
        return result

    def _capture(self, kind: Hashable, handles: list[GuardHandle]) -> None:
        assert self._make is not None
        for old in list(self._graphs)[: len(self._graphs) - KEPT + 1]:
            del self._graphs[old]
        pool = next((r.graph.pool for r in self._graphs.values()), None)
        for o in self._optimizers:
            o.zero_grad(set_to_none=True)  # gradients lie in the graph's memory
        graph = self._make(pool)
        try:
            for h in handles:
                h._captures = 0
            result = graph.record(self._step)
        except FxMaskError:
            raise
        except RuntimeError as error:
            what = f"this step cannot be captured in a CUDA graph, and was not taken: {str(error).splitlines()[0]}"
            fix = "no .item(), no printing of tensors, nothing that comes from the CPU; optimisers capturable=True or fused=True. See torch.cuda.graph."
            raise UnsupportedError(message(what, self._name(), fix)) from error
        finally:
            counts = [h._captures for h in handles]
            for h in handles:
                h._captures = None
        if any(n != 1 for n in counts):
            what = f"fxmask.graphed: expected a step in which each guarded optimiser steps once, got {counts} steps; it was not taken."
            raise ConfigError(message(what, self._name(), "give fxmask.graphed the optimisers that this function steps, and let it take one step."))
        gradients = [(p, p.grad) for o in self._optimizers for group in o.param_groups for p in group["params"]]
        notes = [(g, g.last) for h in handles for g in h._guarded]
        self._graphs[kind] = _Recorded(graph, result, gradients, notes)
        self.captures += 1

    def _replay(self, recorded: _Recorded, handles: list[GuardHandle]) -> T:
        recorded.graph.replay()
        self.replays += 1
        for p, grad in recorded.gradients:
            p.grad = grad
        for g, last in recorded.notes:
            g.last = last
        for h in handles:
            optimizer = h.optimizer()
            assert optimizer is not None
            h._count_step(optimizer)
        result: T = recorded.result
        return result

    def _read(self, handles: list[GuardHandle]) -> list[Any]:
        """What a graph reads and writes where it lies, but for what the step makes. Whoever replaces one of these makes the graphs stale."""
        found: list[Any] = []
        for o in self._optimizers:
            found.append(o.state)  # load_state_dict brings another
            found += [p for group in o.param_groups for p in group["params"]]
            found += [v for group in o.param_groups for v in group.values() if self._lies(v)]
        for h in handles:
            for site, _ in h._followed:
                if not site._fxmask_in_place:
                    site._fxmask_in_place = True
                found += (site._fxmask_keep, site._fxmask_count, site._fxmask_dense, site._fxmask_mask, site._fxmask_lists)
                found += (site._fxmask_score, site._fxmask_scale)
        return found

    def _kind(self, handles: list[GuardHandle]) -> Hashable:
        """What Python decides in a step, and a graph holds fixed."""
        numbers = tuple(
            (k, v.item() if isinstance(v, Tensor) else v)
            for o in self._optimizers for group in o.param_groups for k, v in group.items() if k != "params" and not self._lies(v)
        )  # fmt: skip
        lies = tuple(p.data_ptr() for o in self._optimizers for group in o.param_groups for p in group["params"])
        self._watch(numbers)
        sites = [s for h in handles for s, _ in h._followed]
        masks = tuple((s._fxmask_phase, s._fxmask_kind, s._fxmask_from, s._fxmask_softening, s._fxmask_policy, s._fxmask_is_dense, s.training) for s in sites)
        return repr(numbers), lies, masks, self._masked(handles), tuple(m.__dict__["_fxmask_pruning"] for h in handles for m in h._pruned)

    def _lies(self, value: Any) -> bool:
        """Whether a graph reads this number where it lies; of one that lies on the CPU, beside weights on a GPU, it holds the value."""
        return isinstance(value, Tensor) and value.device == self._device

    def _masked(self, handles: list[GuardHandle]) -> Hashable:
        """How many masks the guarded models have, guarded or not; without a guard, how often anything was masked."""
        if self._times != times_applied():
            self._times = times_applied()
            models = [m for m in (h._model() for h in handles) if m is not None]
            self._masks = tuple(sum(isinstance(part, Site) for part in m.modules()) for m in models) or self._times
        return self._masks

    def _name(self) -> str:
        return getattr(self._step, "__qualname__", type(self._step).__name__)

    def _watch(self, numbers: Hashable) -> None:
        """FxMaskWarning, once, where the optimiser's Python numbers move often."""
        moved, self._numbers = self._numbers not in (None, numbers), numbers
        if moved and self._since < OFTEN and not self._told:
            self._told = True
            what = "a Python number of the optimiser moves from step to step, which a CUDA graph holds fixed: expected tensors, so that steps are replayed."
            fix = 'give the optimiser lr=torch.tensor(1e-3, device="cuda") with capturable=True or fused=True; torch\'s schedulers fill it.'
            warnings.warn(message(what, ", ".join(type(o).__name__ for o in self._optimizers), fix), FxMaskWarning, stacklevel=4)
        self._since = 0 if moved else self._since + 1


def _handles(optimizer: Optimizer) -> list[GuardHandle]:
    hooks = (getattr(hook, "__self__", None) for hook in optimizer._optimizer_step_pre_hooks.values())
    return [h for h in hooks if isinstance(h, GuardHandle)]


def _refuse(handles: list[GuardHandle]) -> None:
    """UnsupportedError for guards whose steps no graph can hold."""
    for h in handles:
        h._let_go()
        if h.masked_step and h._guarded:
            what = "fxmask.graphed of a masked step: expected a guard without masked_step. A replay would step the blocks that were kept at its capture."
            raise UnsupportedError(message(what, h._guarded[0].name, "leave masked_step out of fxmask.guard."))
        for g in h._guarded:
            if g.site._fxmask_config.wants_growth and g.site._fxmask_config.backward != "rigl":
                what = "fxmask.graphed with regrow by gradient, which looks at every step's gradient: expected backward='rigl', which looks at some."
                raise UnsupportedError(message(what, g.name, "use backward='rigl', or Regrow('random')."))


def _unseen(h: GuardHandle) -> set[int]:
    """Sites whose first masked gradient nobody has looked at (`passes.bypass`), which a replay could not."""
    if len(h._looked_at) == len(h._guarded):
        return set()
    sites = [g.site for g in h._guarded if id(g.site) not in h._looked_at and not g.site._fxmask_softening]
    return {id(s) for s in sites if (s._fxmask_written is None or s._fxmask_written[0] < s._fxmask_grid[0] * s._fxmask_grid[1]) and masks_any(s)}


def _grows(h: GuardHandle) -> bool:
    """Whether this step's dense gradient is noted for regrowth, by Python that a replay would not run."""
    return any(g.site._fxmask_config.wants_growth and g.site._fxmask_dense_now for g in h._guarded)
