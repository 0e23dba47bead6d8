"""Rules for the ops of block dropout. Blocks are drawn when the layer runs, so that counts are what p lets one expect.

Where kernels run, they are exact for a mask with as many kept blocks as that, to the nearest; elsewhere FLOP, and bytes of X, are that share of the dense ones.
"""

from __future__ import annotations

from typing import Any

from ...kernels import layer_cost, mask_cost
from ...kernels.cost import Cost
from ...kernels.lists import listed, skips
from ...kernels.triton.tiles import DRAWN
from .calls import Call, Place, typical_mask
from .masked_rules import PHASE, ROLES, implementation, strip_lists, weight_of_forward
from .work import EXACT, Target, Work, phase_of, rule


def share(plain: Cost, p: float, dense: bool) -> Cost:
    """An op of block dropout without kernels, by the probability p.

    Useful FLOP   (1 - p) of the dense op's
    Issued FLOP   the same; all of the dense op's where dropped blocks are written as zeros and multiplied (`dense`)
    Requested and compulsory B: of the input X, which is `x` of forward and dW, 1 - p; all else as of the dense op, dX written whole, with zeros
    """

    def part(moved: dict[str, int]) -> dict[str, int]:
        return {name: round((1 - p) * b) if name == "x" else b for name, b in moved.items()}

    useful, issued = (round((1 - p) * flop) for flop in (plain.flop_useful, plain.flop_issued))
    return Cost(useful, plain.flop_issued if dense else issued, part(plain.reads), plain.writes, part(plain.reads_min), plain.writes_min)


def _work(op: str, call: Call, t: Target, tokens: Place, shape: tuple[int, int], weight: str) -> Work:
    a, (n, k), m, item = call.named, shape, tokens.tokens, tokens.dtype.itemsize
    bias = a.get("bias") is not None
    p, block, impl = a["p"], (a["block_rows"], a["block_cols"]), implementation(a["impl"], t)
    plain = layer_cost.dense(op, m, shape, item, t.tile, bias=bias).renamed(ROLES[op])
    grid, kernels = a["keep"].shape, impl == "triton" and skips(op, shape, block)
    nnzb = round((1 - p) * grid[0] * grid[1])
    if kernels:
        made = layer_cost.dropped(op, m, shape, typical_mask((grid[0], grid[1]), nnzb), block, tokens.dtype, bias=bias)
    else:
        made = share(plain, p, impl != "triton" or (t.impl or a["impl"]) == "triton")
    sizes = {"forward": (m, n, k), "dx": (m, k, n), "dw": (n, k, m)}[op]
    phase = PHASE[op] if call.differentiates or op != "forward" else phase_of(call)
    return Work(call, phase, EXACT, made, *sizes, 1, tokens.dtype, plain, block, nnzb, elements=n * k, weight=weight, impl="triton" if kernels else "")


@rule("fxmask.drop_mask")
def _mask(call: Call, t: Target) -> list[Work]:
    (mask,) = call.outputs
    return [Work(call, phase_of(call), EXACT, mask_cost.draw(mask.numel, DRAWN))]


@rule("fxmask.dropped_linear")
def _linear(call: Call, t: Target) -> list[Work]:
    a: dict[str, Any] = call.named
    found = [_work("forward", call, t, a["x"], a["w"].shape, a["w"].weight)]
    block = (a["block_rows"], a["block_cols"])
    if implementation(a["impl"], t) == "triton" and listed(block) and a["lists"] is None:  # the kernels would have lists of the mask
        found.append(strip_lists(call, found[0].phase, a["keep"], a["w"].weight))
    return found


@rule("fxmask.dropped_dx")
def _dx(call: Call, t: Target) -> list[Work]:
    a = call.named
    return [_work("dx", call, t, a["gy"], a["w"].shape, a["w"].weight)]


@rule("fxmask.dropped_dw")
def _dw(call: Call, t: Target) -> list[Work]:
    a = call.named
    return [_work("dw", call, t, a["gy"], (a["gy"].shape[-1], a["x"].shape[-1]), weight_of_forward(call, "w"))]
