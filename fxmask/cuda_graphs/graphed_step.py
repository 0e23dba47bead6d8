"""A training step that is captured in CUDA graphs, one for each set of what Python decides in it; between replays the guards count.

A graph may be replayed while nothing that it holds fixed has changed, see `graph_facts`. Masks and scores are written in place (`Site._fxmask_in_place`) not
for that, but so that nothing has to be captured anew.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable
from contextlib import nullcontext
from typing import Any, Generic, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from ..guards.guard_handle import GuardHandle, handles_of
from ..kernels.errors import ConfigError, UnsupportedError, message, warn
from ..passes.state.site_mask import masks_any
from .graph_capture import Recorded, captured, gradients_of, recorder
from .graph_facts import Facts
from .graph_rebuild import Rebuilds

T = TypeVar("T")
KEPT = 4  # graphs of one step; they share their memory
TOLD_AFTER = 50  # calls, of which half should be replays


class Graphed(Generic[T]):
    """What `graphed` gives. `captures`: how many times the step was captured; `replays`: how many calls replayed it."""

    def __init__(self, step: Callable[[], T], optimizers: tuple[Optimizer, ...], models: tuple[nn.Module, ...], warmup: int) -> None:
        self._step, self._optimizers, self._models, self._warmup = step, optimizers, models, warmup
        self._device = next(p for o in optimizers for group in o.param_groups for p in group["params"]).device
        self._make = recorder(self._device)
        self._layers: dict[nn.Module, None] = {}  # masked, pruned and dropping ones of models that nobody has named, seen in a capture
        self._zeroed: set[int] = set()  # ids of parameters whose gradients the step drops, before it makes its own
        self._shown: set[int] = set()  # ids of sites whose first masked gradient was looked at
        self._why, self._calls, self.captures, self.replays = "these were its first steps", 0, 0, 0
        self._drop()

    def _drop(self) -> None:
        """Let all graphs go together, and their stream: what cuBLAS holds for a stream goes with any graph that was captured on it."""
        self._graphs: dict[Hashable, Recorded] = {}
        self._warm: dict[Hashable, int] = {}
        self._facts: Facts | None = None
        self._tensors: list[Any] = []
        self._decided: dict[str, Hashable] = {}
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self._rebuilds = None if self._make is None else Rebuilds(self._make, self._stream)

    def __call__(self) -> T:
        """One training step."""
        if self._make is None:
            return self._step()
        with torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext():
            result = self._called()
        self._calls += 1
        if self._calls == TOLD_AFTER and 2 * self.replays < self._calls:
            what = f"fxmask.graphed: expected a step that is mostly replayed, got {self.replays} replays in {self._calls} calls. The last other one was none"
            fix = 'a rate is best a tensor on the device, lr=torch.tensor(1e-3, device="cuda"), which torch\'s schedulers fill; else go on without a graph.'
            warn(message(f"{what} because {self._why}.", self._name(), fix))
        return result

    def _called(self) -> T:
        handles = [h for o in self._optimizers for h in handles_of(o)]
        _refuse(handles, self._optimizers)
        kind = self._compared(handles)
        unseen = set[int]().union(*map(_unseen, handles)) - self._shown
        if unseen or any(map(_grows, handles)):
            self._shown |= unseen  # once: a layer without a gradient would never be looked at
            self._why = self._why if unseen else "regrowth reads the gradients of these steps"
            return self._as_it_is()
        recorded = self._graphs.get(kind)
        if recorded is not None and any(p.grad is not grad for p, grad in recorded.added):
            self._why, recorded = "gradients that the step adds to were replaced", None
            self._drop()
            kind = self._compared(handles)
        if recorded is None and self._warm.get(kind, 0) >= self._warmup:
            recorded = self._capture(handles)
        if recorded is None:
            result = self._as_it_is()
            self._warm[kind] = self._warm.pop(kind, 0) + 1  # not where it raised: nothing is warm by that
            if len(self._warm) > 4 * KEPT:  # a rate that is another number at every call would make one more each time
                del self._warm[next(iter(self._warm))]
            return result
        return self._replay(recorded, handles)

    def _compared(self, handles: list[GuardHandle]) -> Hashable:
        """What Python decides now. Graphs that read what lies elsewhere by now are gone after this."""
        outdated = "" if self._facts is None else self._outdated(self._facts, handles)
        if self._facts is None or outdated:
            self._why = outdated or self._why
            if self._graphs:
                self._drop()
            self._facts = Facts(self._optimizers, self._models, self._layers, handles, self._device)
            self._tensors, self._decided = self._facts.tensors(), self._facts.decisions()
        before, self._decided = self._decided, self._facts.decisions()
        changed = [label for label, value in self._decided.items() if value != before[label]]
        self._why = f"what a graph holds fixed has changed: {changed[0]}" if changed else self._why
        return tuple(self._decided.values())

    def _outdated(self, facts: Facts, handles: list[GuardHandle]) -> str:
        """Why facts are no longer those of the graphs; empty where they are."""
        if facts.handles != handles:
            return "its guards have changed"
        tensors = facts.tensors()
        same = len(tensors) == len(self._tensors) and all(a is b or (type(a) is int and a == b) for a, b in zip(tensors, self._tensors, strict=True))
        return "" if same else "tensors that the graph reads, modules or their hooks are others"

    def _as_it_is(self) -> T:
        """A step that is not captured, on the stream of captures, as torch asks for before one; without the warning of optimisers that nothing is captured."""
        found = gradients_of(self._optimizers)
        result = self._beside()
        for p, grad, version in found:
            if grad is not None:
                dropped = p.grad is not None and p.grad is not grad and grad._version == version
                (self._zeroed.add if dropped else self._zeroed.discard)(id(p))
        return result

    def _beside(self) -> T:
        if self._stream is None:
            return self._step()
        now = torch.cuda.current_stream()
        self._stream.wait_stream(now)
        with torch.cuda.stream(self._stream), warnings.catch_warnings():
            warnings.filterwarnings("ignore", r"(?s).*without CUDA graph capture", UserWarning)
            result = self._step()
        now.wait_stream(self._stream)
        return result

    def _capture(self, handles: list[GuardHandle]) -> Recorded | None:
        assert self._make is not None
        if len(self._graphs) == KEPT:
            self._drop()
            self._compared(handles)
        assert self._facts is not None
        graph = self._make(next((r.graph.pool for r in self._graphs.values()), None), self._stream)
        recorded = captured(self._step, graph, self._optimizers, handles, self._facts, self._zeroed, self._name())
        if recorded is not None:
            self.captures += 1
            self._layers.update(dict.fromkeys(m for m in recorded.layers if m not in self._facts.modules))
            self._facts.watch(self._layers)
            self._tensors, self._decided = self._facts.tensors(), self._facts.decisions()
            self._graphs[tuple(self._decided.values())] = recorded
        return recorded

    def _replay(self, recorded: Recorded, handles: list[GuardHandle]) -> T:
        recorded.graph.replay()
        self.replays += 1
        for p, grad in recorded.gradients:
            p.grad = grad
        for g, last in recorded.notes:
            g.last = last
        for h in handles:
            optimizer = h.optimizer()
            assert optimizer is not None
            h._count_step(optimizer, self._rebuilds)
        result: T = recorded.result
        return result

    def _name(self) -> str:
        return getattr(self._step, "__qualname__", type(self._step).__name__)


def _refuse(handles: list[GuardHandle], optimizers: tuple[Optimizer, ...]) -> None:
    """ConfigError and UnsupportedError for optimisers and guards whose steps no graph can hold."""
    for o in optimizers:
        if any(group.get("capturable") is False for group in o.param_groups):
            what = f"fxmask.graphed: expected an optimiser with capturable=True, got {type(o).__name__} without, which PyTorch refuses to capture."
            raise ConfigError(message(what, fix="capturable=True, with fused=True, too, where there is such a form."))
    for h in handles:
        h._held.let_go()
        if h.masked_step and h._held.guarded:
            what = "fxmask.graphed of a masked step: expected a guard without masked_step. A replay would step the blocks that were kept at its capture."
            raise UnsupportedError(message(what, h._held.guarded[0].name, "leave masked_step out of fxmask.guard."))
        for g in h._held.guarded:
            if g.site._fxmask_config.wants_growth and g.site._fxmask_config.backward != "rigl":
                what = "fxmask.graphed with regrow by gradient, which looks at every step's gradient: expected backward='rigl', which looks at some."
                raise UnsupportedError(message(what, g.name, "use backward='rigl', or Regrow('random')."))


def _unseen(h: GuardHandle) -> set[int]:
    """Sites whose first masked gradient nobody has looked at (`passes.stepping.bypass`), which a replay could not."""
    if len(h._noticed.looked_at) == len(h._held.guarded):
        return set()
    sites = [g.site for g in h._held.guarded if id(g.site) not in h._noticed.looked_at and not g.site._fxmask_softening]
    return {id(s) for s in sites if (s._fxmask_written is None or s._fxmask_written[0] < s._fxmask_blocks) and masks_any(s)}


def _grows(h: GuardHandle) -> bool:
    """Whether this step's dense gradient is noted for regrowth, by Python that a replay would not run."""
    return any(g.site._fxmask_config.wants_growth and g.site._fxmask_dense_now for g in h._held.guarded)
