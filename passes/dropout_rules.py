"""Rules for the ops of block dropout. Blocks are drawn when the layer runs: FLOP, and bytes of X, are what p lets one expect, to the nearest integer."""

from __future__ import annotations

from ..kernels import layer_cost
from ..kernels.cost import Cost
from .masked_rules import PHASE, ROLES, renamed
from .record import Call, Place
from .work import EXACT, Target, Work, phase_of, rule


def _work(op: str, call: Call, t: Target, tokens: Place, shape: tuple[int, int], weight: str, p: float, bias: bool) -> Work:
    (n, k), m, item = shape, tokens.tokens, tokens.dtype.itemsize
    plain = renamed(layer_cost.dense(op, m, shape, item, t.tile, bias=bias), ROLES[op])

    def part(moved: dict[str, int]) -> dict[str, int]:  # of X dropped blocks are not read; dX is written whole, with zeros
        return {name: round((1 - p) * b) if name == "x" else b for name, b in moved.items()}

    useful, issued = (round((1 - p) * flop) for flop in (plain.flop_useful, plain.flop_issued))
    cost = Cost(useful, issued, part(plain.reads), plain.writes, part(plain.reads_min), plain.writes_min)
    sizes = {"forward": (m, n, k), "dx": (m, k, n), "dw": (n, k, m)}[op]
    phase = phase_of(call) if op == "forward" else PHASE[op]
    return Work(call, phase, EXACT, cost, *sizes, 1, tokens.dtype, plain, elements=n * k, weight=weight)


@rule("fxmask.dropped_linear")
def _linear(call: Call, t: Target) -> list[Work]:
    a = call.named
    return [_work("forward", call, t, a["x"], a["w"].shape, a["w"].weight, a["p"], a["bias"] is not None)]


@rule("fxmask.dropped_dx")
def _dx(call: Call, t: Target) -> list[Work]:
    a = call.named
    return [_work("dx", call, t, a["gy"], a["w"].shape, a["w"].weight, a["p"], False)]


@rule("fxmask.dropped_dw")
def _dw(call: Call, t: Target) -> list[Work]:
    a = call.named
    forward = call.forward.named.get("w") if call.forward is not None else None
    weight = forward.weight if isinstance(forward, Place) else ""
    return [_work("dw", call, t, a["gy"], (a["gy"].shape[-1], a["x"].shape[-1]), weight, a["p"], False)]
