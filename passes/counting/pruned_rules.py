"""Rules for the ops of activation pruning: the linear or the product as it is, the writing of what is kept, and dW or da from that."""

from __future__ import annotations

from math import prod

from ...kernels import dense_cost, layer_cost, pruned_cost
from ...kernels.cost import Cost
from ...kernels.grid import kept_elements
from ...kernels.lists import LISTED
from ...kernels.prune import kept_of_input
from .calls import Call, Place
from .masked_rules import ROLES, implementation, lists_of, mask_of, masked_work, weight_of_forward
from .work import ELEMENTWISE, EXACT, Target, Work, phase_of, rule


@rule("fxmask.pruned_linear")
def _linear(call: Call, t: Target) -> list[Work]:
    a = call.named
    x, w = a["x"], a["w"]
    if a["mask"] is not None:
        work = masked_work("forward", call, t, x, w.shape, w.weight)
        return [work, *lists_of(call, work)]
    n, k = w.shape
    cost = layer_cost.dense("forward", x.tokens, (n, k), x.dtype.itemsize, t.tile, bias=a["bias"] is not None)
    return [Work(call, phase_of(call), EXACT, cost, x.tokens, n, k, 1, x.dtype, elements=n * k, weight=w.weight)]


@rule("fxmask.compress")
def _compress(call: Call, t: Target) -> list[Work]:
    return [_packing(call, phase_of(call), call.named["x"], "")]


def _packing(call: Call, phase: str, x: Place, weight: str) -> Work:
    """A read of x, a write of what is kept."""
    *_, values, index = call.outputs
    cost = pruned_cost.compress(x.bytes, values.bytes + index.bytes)
    return Work(call, phase, EXACT, cost, dtype=x.dtype, weight=weight, launches=3, name="fxmask.compress")


@rule("fxmask.pruned_dw")
def _dw(call: Call, t: Target) -> list[Work]:
    """FLOP of the kept blocks, at most: whole ones first (`kernels.prune.kept_of_input`); under a mask of W the share of them that it wants is useful.

    Bytes: of the kernel where it would run, else of dY, what was saved and dW.

    How many of the kept blocks each strip has is known to a run alone: they are counted as evenly spread over whole ones, on which no byte but those of
    a weight mask depends.
    """
    a = call.named
    gy, values, index, mask = a["gy"], a["values"], a["index"], a["mask"]
    (n, k), features, item = (gy.shape[-1], a["shape"][-1]), values.shape[2], gy.dtype.itemsize
    block = (a["block_rows"], a["block_cols"])
    known = None if mask is None else mask_of(a)
    triton = implementation(a["impl"], t) == "triton" and features in LISTED and not a["turned"] and n % 2 == 0 and values.numel > 0 and item <= 4
    if triton:
        entries = values.shape[0] * values.shape[1]
        given = a["lists"] is not None
        cost = layer_cost.pruned_dw(entries, gy.tokens, (n, k), features, gy.dtype, known, block, given=given, index_itemsize=index.dtype.itemsize)
        cost = cost.renamed({"gy": "dy", "values": "saved", "out": "dw"})
    else:
        wanted = n * k if known is None else int(kept_elements(known, (n, k), block))
        elements = kept_of_input(values.shape, a["shape"], a["turned"])
        cost = pruned_cost.plain_dw((n, k), values.numel, elements, item, wanted, gy=gy.bytes, saved=values.bytes + index.bytes)
    plain = layer_cost.dense("dw", gy.tokens, (n, k), item, t.tile)
    plain = plain.renamed(ROLES["dw"])
    weight, impl = weight_of_forward(call, "w"), "triton" if triton else ""
    return [Work(call, "dW", EXACT, cost, n, k, gy.tokens, 1, gy.dtype, plain, elements=n * k, weight=weight, impl=impl)]


@rule("fxmask.pruned_scale")
def _scale(call: Call, t: Target) -> list[Work]:
    """The product as PyTorch's elementwise op; an element is one FLOP where those are counted at all."""
    x, a, b, phase = call.named["x"], call.named["a"], call.named["b"], phase_of(call)
    reads = {"x": x.bytes, "w": a.bytes} | ({"bias": b.bytes} if b is not None else {})
    first = Work(call, phase, ELEMENTWISE, _elementwise(x.numel, t, dense_cost.stream(reads, {"y": call.outputs[0].bytes})), dtype=x.dtype, weight=a.weight)
    return [first, _packing(call, phase, x, a.weight)]


@rule("fxmask.pruned_scale_da")
def _da(call: Call, t: Target) -> list[Work]:
    """Compulsory bytes: dY, what was saved, da. As it runs the pruned input is dense for a while: zeros, what was saved over them, times dY, summed."""
    gy, values, index = call.named["gy"], call.named["values"], call.named["index"]
    reads, writes = {"dy": gy.bytes, "saved": values.bytes + index.bytes}, {"dw": call.outputs[0].bytes}
    dense = prod(call.named["shape"]) * values.dtype.itemsize
    cost = Cost(0, 0, reads | {"x": 2 * dense}, writes | {"x": 2 * dense + values.bytes}, reads, writes)
    return [Work(call, "dW", ELEMENTWISE, _elementwise(values.numel, t, cost), dtype=gy.dtype, weight=weight_of_forward(call, "a"), launches=4)]


def _elementwise(n: int, t: Target, cost: Cost) -> Cost:
    return cost.with_flop(n, n) if t.elementwise else cost
