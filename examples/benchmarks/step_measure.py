"""What `train_step.py` measures of one contender: time in turns with others, memory, FLOP, energy.

Not measured: bytes moved, for which a counter is needed (Nsight Compute's csv goes into `report.attach_measurements`); that column stays empty.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import Optimizer
from torch.utils.flop_counter import FlopCounterMode

import fxmask
from fxmask.analysis.energy import measure_energy
from fxmask.analysis.nvml import Gpu, Sample, Window
from fxmask.bench import provenance
from fxmask.bench.stopwatch import Stopwatch
from fxmask.errors import UnsupportedError

LEAST_TURNS = 3


@dataclass
class Runner:
    """A contender with weights, optimiser and step counter of its own. `refresh`: None (dense), 1, or 2, whose every second step rebuilds masks."""

    name: str
    refresh: int | None
    model: nn.Module
    call: Callable[[Tensor], Tensor]  # the model, or its compiled form
    optimizer: Optimizer
    batch: tuple[Tensor, Tensor]
    autocast: bool
    as_graph: bool = False
    steps: int = 0

    def __post_init__(self) -> None:
        self.graphed = fxmask.graphed(self._step, self.optimizer, warmup=1) if self.as_graph else None

    @property
    def rebuilds(self) -> bool:
        """Whether the next step rebuilds cached masks: the guard counts, and does so after steps 2, 4, 6."""
        return self.refresh == 2 and self.steps % 2 == 1

    def loss(self, call: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        x, y = self.batch
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.autocast):
            out = (call or self.call)(x)
            return F.cross_entropy(out.flatten(0, -2), y.flatten())

    def step(self) -> Tensor:
        """Forward, loss, backward, optimiser; gradients are gone afterwards, so that a contender that waits holds none."""
        loss = self._step() if self.graphed is None else self.graphed()
        self.steps += 1
        return loss

    def _step(self) -> Tensor:
        loss = self.loss()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()


def in_turns(
    runners: Sequence[Runner], watch: Stopwatch, turns: int, seconds: float, seed: int, each: Callable[[], None]
) -> tuple[list[dict[bool, list[float]]], float]:
    """Milliseconds of plain (False) and rebuilding (True) steps, and the CPUs that the process had.

    A turn is a step of each in shuffled order, two of one whose masks are cached; `each` is called between. It ends after `turns`, or after `seconds` and
    LEAST_TURNS.
    """
    times: list[dict[bool, list[float]]] = [{False: [], True: []} for _ in runners]
    wall, cpu = time.perf_counter(), time.process_time()
    turn = 0
    while turn < LEAST_TURNS or (turn < turns and time.perf_counter() - wall < seconds):
        for i in random.Random(f"{seed} {turn}").sample(range(len(runners)), len(runners)):  # what ran before decides part of a step's time
            for _ in range(2 if runners[i].refresh == 2 else 1):
                times[i][runners[i].rebuilds].append(1e3 * watch(runners[i].step))
        each()
        turn += 1
    return times, (time.process_time() - cpu) / max(time.perf_counter() - wall, 1e-9)


def amortised(plain: float, rebuild: float, every: int) -> float:
    """Time a step where every so many steps one rebuilds the masks."""
    return plain + (rebuild - plain) / every


def held_bytes(r: Runner) -> int:
    """Weights, buffers and optimiser state: what the contender holds between steps."""
    state = [t for s in r.optimizer.state.values() for t in s.values() if isinstance(t, Tensor)]
    return sum(t.numel() * t.element_size() for t in [*r.model.parameters(), *r.model.buffers(), *state])


def peak_bytes(r: Runner) -> int | None:
    """The most that a step takes above what was held before it; of cached masks the larger of both kinds of step.

    On CUDA by the allocator's own peak, on a CPU by the profiler's record of every allocation; None where this torch does not show that, and of a CUDA graph,
    which holds its memory between steps, too.
    """
    if r.graphed is not None:
        return None
    return max((p for p in (_peak(r) for _ in range(2 if r.refresh == 2 else 1)) if p is not None), default=None)


def _peak(r: Runner) -> int | None:
    device = r.batch[0].device
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        r.step()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as found:
        r.step()
    try:
        events = [e for e in found.profiler.kineto_results.events() if e.name() == "[memory]"]
        sizes = [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]
    except AttributeError:  # not a public interface
        return None
    now = peak = 0
    for size in sizes:
        now += size
        peak = max(peak, now)
    return peak if sizes else None


def saved_bytes(r: Runner) -> int:
    """Storages that autograd holds for the backward, each once, without parameters, buffers and inputs; of a compiled model those of its graph."""
    own = {t.untyped_storage().data_ptr() for t in [*r.model.parameters(), *r.model.buffers(), *r.batch]}
    found: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        s = t.untyped_storage()
        if s.data_ptr() not in own:
            found[s.data_ptr()] = s.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = r.loss()
    loss.backward()
    r.optimizer.zero_grad(set_to_none=True)
    return sum(found.values())


def flop_measured(r: Runner) -> int:
    """By PyTorch's counter over an eager forward and backward. On a CPU attention goes by its matmuls, as the counter knows no fused one there.

    Of a layer whose owner reads its weight (out_proj of attention in vit-b16) the counter sees a dense matmul, and the prediction the kept blocks.
    """
    plain = sdpa_kernel(SDPBackend.MATH) if r.batch[0].device.type == "cpu" else contextlib.nullcontext()
    with plain, FlopCounterMode(display=False) as counter:
        r.loss(r.model).backward()
    r.optimizer.zero_grad(set_to_none=True)
    return int(counter.get_total_flops())


def predicted(r: Runner) -> dict[str, Any]:
    """FLOP and bytes of a step by `fxmask.analyze`."""
    x = r.batch[0]
    with torch.autocast(x.device.type, torch.bfloat16, enabled=r.autocast):
        found = fxmask.analyze(r.model, (x,), optimizer=r.optimizer).to_dict()["summary"]
    numbers = {"flop_predicted": found["flop"]["total"], "flop_issued": found["flop_executed"]["total"]}
    return {**numbers, "bytes_min": found["bytes_min"]["total"], "bytes_req": found["bytes_req"]["total"], "bytes_dram_est": found["bytes_dram_est"]}


def energy(r: Runner, seconds: float) -> dict[str, Any]:
    """Joules a step by NVML, nothing without it. Cached masks are rebuilt on every second step there."""
    device = r.batch[0].device
    if device.type != "cuda" or not seconds:
        return {}
    try:
        row = measure_energy(r.step, seconds=seconds, idle_s=2.0, device=device)
    except UnsupportedError:
        return {}
    return {"j_per_step": row.get("j_per_step"), "energy_warnings": row["warnings"]}


class Watch:
    """Clocks of a GPU, asked for between turns; says nothing on a CPU or without NVML."""

    def __init__(self, device: torch.device) -> None:
        api = provenance.nvml() if device.type == "cuda" else None
        self.samples: list[Sample] = []
        self.gpu = None
        if api is not None:
            with contextlib.suppress(api.NVMLError):
                self.gpu = Gpu(api, provenance.nvml_handle(api, device.index or 0), torch.cuda.get_device_name(device))

    def __call__(self) -> None:
        if self.gpu is not None:
            self.samples.append(self.gpu.sample(time.perf_counter()))

    def throttled(self) -> str:
        """What held the clocks down or moved them, `no`, or nothing where it is unknown."""
        if self.gpu is None:
            return ""
        return "; ".join(Window(0.0, 0, None, None, self.samples).disturbed()) or "no"

    def shared(self) -> list[str]:
        return [] if self.gpu is None else self.gpu.shared()
