"""The contenders of `train_step.py`, and the settings of a group: one model, batch, block and ratio."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import fxmask
from benchmarks import step_models
from benchmarks.step_measure import Runner
from benchmarks.step_models import MODELS, Spec
from fxmask.bench.table import Row, text
from fxmask.kernels.file_hash import file_hash


class Contender(NamedTuple):
    """`impl`: None is dense, "" what the user says. Ours may step on kept blocks alone, masked-dense freezes, and so does a step that is one CUDA graph."""

    impl: str | None
    compiled: bool
    graphed: bool = False
    scores: Mapping[str, Any] = MappingProxyType({})  # by which blocks are kept; {}: norms of the weight as it is


LASTING = MappingProxyType({"criterion": "taylor", "average": 0.9})  # what docs/accuracy.md recommends
CONTENDERS = {
    "dense_eager": Contender(None, False),
    "dense_compiled": Contender(None, True),
    "masked_dense": Contender("reference", False),
    "masked_dense_compiled": Contender("reference", True),
    "fxmask_eager": Contender("", False),
    "fxmask_compiled": Contender("", True),
    "dense_graphed": Contender(None, False, True),
    "dense_compiled_graphed": Contender(None, True, True),
    "fxmask_graphed": Contender("", False, True),
    "fxmask_compiled_graphed": Contender("", True, True),
    "taylor_masked_dense": Contender("reference", False, scores=LASTING),
    "taylor_eager": Contender("", False, scores=LASTING),
    "taylor_graphed": Contender("", False, True, LASTING),
}
DEFAULT = tuple(name for name, kind in CONTENDERS.items() if name != "masked_dense_compiled" and not (kind.graphed or kind.scores))
# what tells rows apart, beside the machine and the versions
NAMES = (
    "code", "threads", "model", "size", "batch", "dtype", "optimizer", "masked_step", "impl", "compile", "block", "ratio", "seed", "contender", "refresh",
)  # fmt: skip


@cache
def code() -> str:
    """Hash of what a step runs beside the kernels: fxmask, its passes, the models and these scripts."""
    package, here = Path(fxmask.__file__).parent, Path(__file__).resolve().parents[1]
    ours = [here / "resmlp.py", *(here / "benchmarks" / f"{name}.py" for name in ("step_contenders", "step_group", "step_measure", "step_models"))]
    folders = (".", "compiler", "cuda_graphs", "explaining", "guards", "health", "nm", "passes", "passes/*")  # of what a step runs
    return file_hash(sorted(p for folder in folders for p in package.glob(f"{folder}/*.py")), package)[:6] + file_hash(ours, here)[:6]


@dataclass(frozen=True)
class Setting:
    """A group."""

    spec: Spec
    block: int
    ratio: float
    dtype: str
    optimizer: str
    masked_step: bool
    impl: str
    compile_mode: str
    compile_backend: str
    threads: int

    @property
    def title(self) -> str:
        what = f"{self.spec.name} ({self.spec.size})" if self.spec.size else self.spec.name
        return f"{what}, batch {self.spec.batch}, {self.dtype}, {self.block}x{self.block} at {100 * self.ratio:g} %, {self.optimizer}"

    @property
    def row(self) -> Row:
        values = (
            code(), self.threads, self.spec.name, self.spec.size, self.spec.batch, self.dtype, self.optimizer, "on" if self.masked_step else "off", self.impl,
            f"{self.compile_backend} {self.compile_mode}", self.block, self.ratio, self.spec.seed,
        )  # fmt: skip
        return {name: text(value) for name, value in zip(NAMES, values, strict=False)}


def instances(contenders: Sequence[str], refresh: Sequence[int]) -> list[tuple[str, int | None]]:
    """What is built: a masked contender once with refresh 1 and once with 2, which stands for all others."""
    kinds = list(dict.fromkeys(min(n, 2) for n in refresh))
    return [(name, n) for name in dict.fromkeys(contenders) for n in ([None] if CONTENDERS[name].impl is None else kinds)]


def planned(s: Setting, contenders: Sequence[str], refresh: Sequence[int]) -> list[Row]:
    """The rows of a group, by the columns that name them."""
    numbers = list(dict.fromkeys(refresh))
    return [
        {**s.row, "contender": name, "refresh": text(n)}
        for name in dict.fromkeys(contenders)
        for n in ([None] if CONTENDERS[name].impl is None else numbers)
    ]


def _optimizer(s: Setting, model: nn.Module, graphed: bool = False) -> Optimizer:
    fused = True if graphed else None  # torch chooses
    if s.optimizer == "adamw":
        return AdamW(model.parameters(), lr=1e-4, weight_decay=0.05, fused=fused, capturable=graphed)
    return SGD(model.parameters(), lr=1e-3, momentum=0.9, fused=fused)


def runner(s: Setting, name: str, refresh: int | None, batch: tuple[Tensor, Tensor]) -> Runner:
    """A contender, ready for its first step."""
    kind, include = CONTENDERS[name], MODELS[s.spec.name].include
    model = step_models.build(s.spec)
    step_models.check_inputs(model, *batch)
    step_models.check_maskable(model, include)
    if kind.impl is not None:
        fxmask.apply(model, ratio=s.ratio, block=(s.block, s.block), refresh=refresh or 1, include=include, impl=kind.impl or s.impl, **kind.scores)
    optimizer = _optimizer(s, model, kind.graphed)
    if kind.impl is not None:
        fxmask.guard(optimizer, model, "freeze", masked_step=s.masked_step and not kind.impl and not kind.graphed)
    # fullgraph: a model that Dynamo breaks or stops to compile raises, where it would be timed half eager
    call: Callable[[Tensor], Tensor] = model
    if kind.compiled:
        mode = None if s.compile_mode == "default" else s.compile_mode
        call = torch.compile(model, fullgraph=True, mode=mode, backend=s.compile_backend)
    return Runner(name, refresh, model, call, optimizer, batch, s.dtype == "bf16", kind.graphed)


def hungriest(s: Setting) -> Callable[[nn.Module, Tensor], None]:
    """Two steps of a model under what takes most memory: masked-dense, frozen by copies."""

    def step(model: nn.Module, x: Tensor) -> None:
        fxmask.apply(model, ratio=s.ratio, block=(s.block, s.block), impl="reference")
        optimizer = _optimizer(s, model)
        fxmask.guard(optimizer, model, "freeze")
        for _ in range(2):
            with torch.autocast(x.device.type, torch.bfloat16, enabled=s.dtype == "bf16"):
                model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    return step
