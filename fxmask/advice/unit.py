"""A layer's own training step: forward, backward and the optimiser's step of this layer alone, dense and masked in turns on the same operands.

Before each part the caches are flushed: in a model other layers have run since, and a masked layer, which computes less for the bytes that it reads, loses more
by that than a dense one. Long layers are timed on fewer tokens; what depends on tokens is scaled up again, the optimiser's step and the masks' rebuild are not.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..analysis.cpu_speed import last_cache_bytes
from ..bench.clock import flush_buffer
from ..bench.stopwatch import Stopwatch, medians
from ..errors import UnsupportedError
from ..guards.guarding import guard
from ..masking import apply
from ..passes.settings.config import WeightMask
from ..steps import refresh
from .layers import Layer, Seen

LONG = 0.15  # seconds of forward and backward beyond which tokens are left out
FEWEST = 1024  # tokens of a layer whose tokens are cut
TURNS, SECONDS = 5, 0.4  # of a cell: at least so many turns, and no more of them after so many seconds
MakeOptimizer = Callable[[Any], torch.optim.Optimizer]


class Times(NamedTuple):
    """Seconds of a layer in one training step: forward and backward at all its tokens, the optimiser's step, a rebuild of its mask."""

    passes: float
    step: float
    rebuild: float = 0.0

    def seconds(self, refresh: int) -> float:
        """Of a step, masks rebuilt on every `refresh`-th one (0: never)."""
        return self.passes + self.step + (self.rebuild / refresh if refresh else 0.0)


class Unit:
    """The operands of a layer, its dense form, and the times of that. `flush`: as of `flusher`, which units share: its memory is large where caches are."""

    def __init__(self, layer: Layer, make: MakeOptimizer | None, flush: Callable[[], Any] | None = None) -> None:
        self.layer, self.make, self.device = layer, make, layer.weight.device
        self.watch, self.flush = Stopwatch(self.device), flush or flusher(self.device)
        self.share, self.kept_step = 1.0, False
        self.inputs = [_input(c, self.device) for c in layer.calls]
        self.dense = self._linear()
        self.run_dense = self._runner(self.dense, self._optimizer(self.dense))
        self.run_dense()
        took = self.run_dense()[0]
        if took > LONG and layer.tokens > FEWEST:
            self.inputs = [_fewer(x, max(FEWEST / layer.tokens, LONG / took)) for x in self.inputs]
            self.share = sum(x[..., 0].numel() for x in self.inputs) / layer.tokens
            self.run_dense = self._runner(self.dense, self._optimizer(self.dense))
            self.run_dense()
        self.dense_times = self._times([self.run_dense() for _ in range(3)])

    def _linear(self) -> nn.Linear:
        n, k = self.layer.weight.shape
        made = nn.Linear(k, n, self.layer.bias, device="meta", dtype=self.layer.weight.dtype).to_empty(device=self.device)
        with torch.no_grad():
            made.weight.copy_(self.layer.weight)
            if made.bias is not None:
                made.bias.zero_()
        made.weight.requires_grad_(self.layer.weight.requires_grad)
        return made

    def _optimizer(self, linear: nn.Linear) -> torch.optim.Optimizer | None:
        trained = [p for p in linear.parameters() if p.requires_grad]
        return self.make(trained) if self.make and linear.weight.requires_grad else None

    def _runner(self, linear: nn.Linear, optimizer: torch.optim.Optimizer | None) -> Callable[[], tuple[float, float]]:
        """A call that takes one training step of the layer and returns the seconds of (both passes, the optimiser's step)."""
        # not self, which holds such a call: in a circle what flushes would outlive the search
        inputs, calls, kind, flush, watch = self.inputs, self.layer.calls, self.device.type, self.flush, self.watch
        gradients: list[Tensor] = []

        def passes() -> None:
            out = []
            with torch.autocast(kind, enabled=False):  # around all calls, as it is what keeps the casts of a weight for the next one
                for x, c in zip(inputs, calls, strict=True):
                    with torch.set_grad_enabled(c.graph), torch.autocast(kind, c.autocast, enabled=c.autocast is not None):
                        out.append(linear(x))
            ends = [y for y in out if y.requires_grad]  # none of a frozen layer with a frozen input: its forward is all of its step
            if not gradients:
                gradients.extend(torch.randn_like(y) for y in ends)
            if ends:
                torch.autograd.backward(ends, gradients)

        def run() -> tuple[float, float]:
            torch.clear_autocast_cache()  # of the step before, where the caller's autocast is around them all
            for x in inputs:
                x.grad = None
            (linear if optimizer is None else optimizer).zero_grad(set_to_none=True)
            flush()
            took = watch(passes)
            if optimizer is None:
                return took, 0.0
            flush()
            return took, watch(optimizer.step)

        return run

    def _times(self, rows: list[tuple[float, float]], rebuild: float = 0.0) -> Times:
        passes, step = medians(rows)
        return Times(passes / self.share, step, rebuild)

    def masked(self, config: WeightMask) -> tuple[Times, Times]:
        """Times of the dense and of the masked layer, from the same turns. What is measured when a layer first runs, such as a plan, is not counted."""
        linear = self._linear()
        apply(linear, config, exclude=())  # the layer was chosen where the model was looked at
        optimizer = self._optimizer(linear)
        handle = None if optimizer is None else guarded(optimizer, linear)
        self.kept_step = handle is not None and bool(handle.masked_step)
        run = self._runner(linear, optimizer)
        run()  # plans are made
        run()
        rows: tuple[list[tuple[float, float]], list[tuple[float, float]]] = ([], [])
        end = time.perf_counter() + SECONDS
        while len(rows[0]) < TURNS or (time.perf_counter() < end and len(rows[0]) < 30):
            for i in (0, 1) if len(rows[0]) % 2 else (1, 0):
                rows[i].append((self.run_dense, run)[i]())
        rebuild = statistics.median(self.watch(lambda: refresh(linear)) for _ in range(3))
        if handle is not None:
            handle.remove()
        return self._times(rows[0]), self._times(rows[1], rebuild)


def flusher(device: torch.device) -> Callable[[], Any]:
    """A call that writes twice the last cache's size."""
    if device.type == "cuda":
        return flush_buffer(device).zero_
    return torch.zeros(2 * (last_cache_bytes() or 32 << 20), dtype=torch.int8).zero_


def guarded(optimizer: torch.optim.Optimizer, model: nn.Module) -> Any:
    """A guard with a step on kept blocks alone; one without where the optimiser cannot do that."""
    try:
        return guard(optimizer, model, masked_step=True)
    except UnsupportedError:
        return guard(optimizer, model)


def _input(seen: Seen, device: torch.device) -> Tensor:
    with torch.no_grad():
        x = torch.empty_strided(seen.shape, seen.stride, dtype=seen.dtype, device=device)
        x = x if 0 in seen.stride else x.normal_()  # an expanded one has one value in many places
    return x.requires_grad_(seen.needs_gradient)


def _fewer(x: Tensor, share: float) -> Tensor:
    """The first rows of the axis that has the most, but the last axis, in the same layout."""
    axis = max(range(x.dim() - 1), key=lambda i: x.shape[i])
    cut = x.detach().narrow(axis, 0, max(1, round(x.shape[axis] * share)))
    return cut.clone(memory_format=torch.preserve_format).requires_grad_(x.requires_grad)
