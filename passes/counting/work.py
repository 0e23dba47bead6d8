"""What one recorded op costs: its sizes, FLOP and bytes, and which part of a training step it belongs to. `passes.counting.rules` fills it in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from ...kernels.cost import Cost
from .calls import Call, Place

EXACT, REGISTERED, ELEMENTWISE, FREE, UNKNOWN = "exact", "registered", "elementwise", "free", "unknown"

SUMS = ("aten.addmm", "aten.baddbmm", "aten.addbmm", "aten.addmv")  # of something and a product
PRODUCTS = ("aten.mm", "aten.bmm", "aten.mv")  # what their gradients are made by


@dataclass
class Work:
    """The cost of one op, or of one part of it (a convolution's backward is dX, dW and db at once).

    `cost`: as it runs; `dense`: the same op of the dense layer, where a mask leaves something out. FLOP are 0 for ops without products.
    """

    call: Call | None
    phase: str  # fwd, dX, dW, db, recompute, opt
    status: str
    cost: Cost
    m: int = 0
    n: int = 0
    k: int = 0
    batch: int = 1
    dtype: torch.dtype | None = None
    dense: Cost | None = None
    block: tuple[int, int] | None = None
    nnzb: int | None = None
    kept: int | None = None  # weight elements in kept blocks
    elements: int = 0  # of the weight
    weight: str = ""
    impl: str = ""  # of a masked op: triton, or masked_dense
    widths: dict[str, tuple[int, int]] = field(default_factory=dict)  # operand -> bytes of a run, bytes between rows
    launches: int = 1
    name: str = ""  # of the op, where it is not the call's
    extra: bool = False  # a dense step has no such op: see `passes.counting.dense_step`
    again: bool = False  # a product with a weight that another one of the same call has read

    @property
    def op(self) -> str:
        return self.name or (self.call.op if self.call else "")

    @property
    def flop_dense(self) -> int:
        """FLOP of the dense layer: more than `cost.flop_useful` where a mask leaves something out, none of what a dense step does not have."""
        return 0 if self.extra else (self.dense or self.cost).flop_useful


@dataclass(frozen=True)
class Target:
    """What the rules need to know of the device and of the caller's wishes."""

    tile: tuple[int, int] = (128, 128)  # (tokens, features) of a dense matmul's output tile
    impl: str = ""  # of masked layers; empty: as each layer says, and triton for auto
    elementwise: bool = False  # count one FLOP for each element that an op without products computes


Rule = Callable[[Call, Target], list[Work]]
RULES: dict[str, Rule] = {}  # by op, `aten.mm`


def rule(*ops: str) -> Callable[[Rule], Rule]:
    """Register the decorated function as the rule of some ops."""

    def register(f: Rule) -> Rule:
        for op in ops:
            RULES[op] = f
        return f

    return register


def phase_of(call: Call) -> str:
    """The part of a step that an op is of: in a backward, dW where its forward makes a weight, or reads one that the op itself does not read; dX otherwise."""
    if call.recomputed:
        return "recompute"
    if not call.backward:
        return "fwd"
    if call.summed or call.forward is None:  # a sum of gradients that meet, or their accumulation
        return "dW" if call.of_weight else "dX"
    if makes_weight(call.forward):
        return "dW"
    return "dW" if _multiplied(call) and not any(map(_is_weight, call.inputs)) else "dX"


def _multiplied(call: Call) -> bool:
    """Whether the forward of an op of a backward has a weight: of a product's gradient, whether it multiplies by one, and does not only add it."""
    forward = call.forward
    if forward is None or forward.op not in SUMS or call.op not in PRODUCTS:
        return forward is not None and any(map(_is_weight, forward.inputs))
    return any(isinstance(p, Place) and p.weight for p in forward.args[1:3])


def _is_weight(p: Place) -> bool:
    """Whether a tensor is a weight, or made of one, and no mask."""
    return bool(p.weight) and p.dtype != torch.bool


def makes_weight(call: Call | None) -> bool:
    """Whether an op reads weights and constants alone: nothing but weights has a gradient by it."""
    return call is not None and bool(call.weights) and not any(p.of_inputs for p in call.inputs)


def meets_weight(call: Call | None) -> bool:
    """Whether an op has a weight and something else."""
    return call is not None and bool(call.weights) and not makes_weight(call)


def weights_gradients(call: Call) -> list[Place]:
    """Those results of an op of a backward that are gradients of weights: all of phase dW; of one that gives an input's too, what is as large as a weight."""
    if phase_of(call) == "dW":
        return call.outputs
    read = [] if call.forward is None or call.summed else call.forward.inputs
    weights, others = {p.shape for p in read if p.weight}, {p.shape for p in read if not p.weight}
    return [p for i, p in enumerate(call.outputs) if p.shape in weights and (i or p.shape not in others)]
