"""Rules for the ops of activation pruning: the linear as it is, the writing of what is kept, and dW from that."""

from __future__ import annotations

from ..kernels import dense_cost, layer_cost
from ..kernels.cost import Cost
from ..kernels.lists import LISTED
from .masked_rules import ROLES, implementation, mask_of, masked_work
from .record import Call, Place
from .work import EXACT, Target, Work, phase_of, rule


@rule("fxmask.pruned_linear")
def _linear(call: Call, t: Target) -> list[Work]:
    a = call.named
    x, w = a["x"], a["w"]
    (n, k), bias = w.shape, a["bias"] is not None
    if a["mask"] is not None:
        first = masked_work("forward", call, t, a, x, w.shape, w.weight, bias)
    else:
        cost = layer_cost.dense("forward", x.tokens, (n, k), x.dtype.itemsize, t.tile, bias=bias)
        first = Work(call, phase_of(call), EXACT, cost, x.tokens, n, k, 1, x.dtype, elements=n * k, weight=w.weight)
    _, values, index = call.outputs
    written = {"saved": values.bytes + index.bytes}
    packing = Work(call, first.phase, EXACT, dense_cost.stream({"x": x.bytes}, written), dtype=x.dtype, weight=w.weight, launches=3, name="fxmask.compress")
    return [first, packing]


@rule("fxmask.pruned_dw")
def _dw(call: Call, t: Target) -> list[Work]:
    """FLOP of the kept blocks, those of a ragged last one as if it were whole. Bytes: of the kernel where it would run, else of dY, what was saved and dW.

    How many of the kept blocks each strip has is known to a run alone: they are counted as evenly spread, on which no byte but those of a weight mask depends.
    """
    a = call.named
    gy, values, index, mask = a["gy"], a["values"], a["index"], a["mask"]
    (n, k), features, item = (gy.shape[-1], a["shape"][-1]), values.shape[2], gy.dtype.itemsize
    block = (a["block_rows"], a["block_cols"])
    known = None if mask is None else mask_of(a, (n, k))
    triton = implementation(a["impl"], t) == "triton" and features in LISTED and not a["turned"] and n % 2 == 0 and values.numel > 0
    if triton and gy.dtype.itemsize <= 4:
        entries = values.shape[0] * values.shape[1]
        given = a["lists"] is not None
        cost = layer_cost.pruned_dw(entries, gy.tokens, (n, k), features, gy.dtype, known, block, given=given, index_itemsize=index.dtype.itemsize)
        cost = cost.renamed({"gy": "dy", "values": "saved", "out": "dw"})
    else:
        flop = 2 * n * values.numel
        reads, writes = {"dy": gy.bytes, "saved": values.bytes + index.bytes}, {"dw": n * k * item}
        cost = Cost(flop, flop, dict(reads), dict(writes), dict(reads), dict(writes))
    plain = layer_cost.dense("dw", gy.tokens, (n, k), item, t.tile)
    plain = plain.renamed(ROLES["dw"])
    forward = call.forward.named["w"] if call.forward is not None and "w" in call.forward.named else None
    weight = forward.weight if isinstance(forward, Place) else ""
    return [Work(call, "dW", EXACT, cost, n, k, gy.tokens, 1, gy.dtype, plain, elements=n * k, weight=weight)]
