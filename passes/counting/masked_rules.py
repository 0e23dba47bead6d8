"""Rules for the ops of `fxmask`: kept blocks count, by the implementation that would run."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...kernels import layer_cost
from ...kernels.grid import kept_elements
from ...kernels.lists import skips
from ...kernels.strides import are_tokens_inner
from .calls import Call, Place, typical_mask
from .work import EXACT, Target, Work, phase_of, rule

PHASE = {"forward": "dX", "dx": "dX", "dw": "dW"}  # in a backward, where the forward's op is that of a gradient's gradient
ROLES = {"forward": {}, "dx": {"x": "dy", "y": "dx"}, "dw": {"gy": "dy", "out": "dw"}}


def implementation(impl: str, target: Target) -> str:
    """What a layer's `impl` means on the analysed device: `auto` stands for the kernels that skip blocks."""
    wanted = target.impl or impl
    return "triton" if wanted in ("auto", "triton", "cpu") else "masked_dense"


def mask_of(a: dict[str, Any]) -> Tensor:
    """The mask of an op, as far as it is known."""
    p: Place = a["mask"]
    if p.mask is not None and p.mask.values.shape == p.shape:
        return p.mask.values
    return typical_mask((p.shape[0], p.shape[1]), p.shape[0] * p.shape[1])  # a mask that nobody knows is dense: an upper bound


def weight_of_forward(call: Call, name: str) -> str:
    """The parameter that the forward of a backward op was given as this argument; empty where it is none."""
    p = call.forward.named.get(name) if call.forward is not None else None
    return p.weight if isinstance(p, Place) else ""


def masked_work(op: str, call: Call, t: Target, x: Place, shape: tuple[int, int], weight: str) -> Work:
    """x: what has the tokens, the input or its gradient."""
    a, tokens, dtype = call.named, x.tokens, x.dtype
    block, mode = (a["block_rows"], a["block_cols"]), a["backward"]
    mask, bias = mask_of(a), a.get("bias") is not None
    flag = a["dense"]  # of `rigl`: this step's dW is dense
    flagged = flag is not None and flag.mask is not None and flag.mask.values.dim() == 0 and bool(flag.mask.values)
    whole = (op == "dx" and mode == "unmasked") or (op == "dw" and (mode in ("ste", "unmasked") or flagged))
    plain = layer_cost.dense(op, tokens, shape, dtype.itemsize, t.tile, bias=bias)
    impl = implementation(a["impl"], t)
    nnzb, kept = (mask.numel(), shape[0] * shape[1]) if whole else (int(mask.sum()), int(kept_elements(mask, shape, block)))
    cost = plain if whole else layer_cost.layer(
        op, impl, tokens, shape, mask, block, dtype, t.tile, bias=bias, inner=are_tokens_inner(x.shape, x.stride, dtype)
    )
    if impl == "triton" and not skips(op, shape, block):
        impl = "triton (mask, then dense)"
    names = ROLES[op]
    cost, plain = cost.renamed(names), plain.renamed(names)
    (n, k), item = shape, dtype.itemsize
    unit = min(block[1], 64) * item if impl == "triton" else 64 * item
    across = min(block[0], 64) * item if impl == "triton" else 64 * item
    widths = {
        "forward": {"x": (unit, k * item), "w": (unit, k * item), "y": (min(128, n) * item, n * item)},
        "dx": {"dy": (across, n * item), "w": (min(128, k) * item, k * item), "dx": (min(128, k) * item, k * item)},
        "dw": {"dy": (min(128, n) * item, n * item), "x": (unit, k * item), "dw": (unit, k * item)},
    }[op]
    m, nn, kk = {"forward": (tokens, n, k), "dx": (tokens, k, n), "dw": (n, k, tokens)}[op]
    phase = PHASE[op] if call.differentiates or op != "forward" else phase_of(call)
    return Work(
        call, phase, EXACT, cost, m, nn, kk, 1, dtype, plain, block, nnzb, kept, n * k, weight, "dense" if whole else impl, widths,
        launches=1 if whole else 1 + (impl != "triton"), name=f"fxmask.masked_linear_{op}" if op != "forward" else "",
    )  # fmt: skip


@rule("fxmask.masked_linear")
def _linear(call: Call, t: Target) -> list[Work]:
    a = call.named
    work = masked_work("forward", call, t, a["x"], a["w"].shape, a["w"].weight)
    return [work, *lists_of(call, work)]


def lists_of(call: Call, forward: Work) -> list[Work]:
    """The lists that kernels would make in a forward, of a mask that is not cached."""
    a = call.named
    if forward.impl != "triton" or a["lists"] is not None or not a["mask"].weight:
        return []
    return [strip_lists(call, forward.phase, a["mask"], a["w"].weight)]


def strip_lists(call: Call, phase: str, mask: Place, weight: str) -> Work:
    block = (call.named["block_rows"], call.named["block_cols"])
    cost = layer_cost.strip_lists((mask.shape[0] * block[0], mask.shape[1] * block[1]), block)
    return Work(call, phase, EXACT, cost, block=block, weight=weight, launches=2, name="fxmask.strip_lists")


@rule("fxmask.masked_linear_dx")
def _dx(call: Call, t: Target) -> list[Work]:
    a = call.named
    return [masked_work("dx", call, t, a["gy"], a["w"].shape, a["w"].weight)]


@rule("fxmask.masked_linear_dw")
def _dw(call: Call, t: Target) -> list[Work]:
    a = call.named
    return [masked_work("dw", call, t, a["gy"], (a["gy"].shape[-1], a["x"].shape[-1]), a["mask"].weight)]


@rule("fxmask.masked_linear_backward")
def _both(call: Call, t: Target) -> list[Work]:
    a = call.named
    return [masked_work(op, call, t, a["gy"], a["w"].shape, a["w"].weight) for op in ("dx", "dw")]


@rule("fxmask.block_index")
def _index(call: Call, t: Target) -> list[Work]:
    a = call.named
    w, block = a["w"], (a["block_rows"], a["block_cols"])
    cost = layer_cost.block_index(w.shape, block, w.dtype.itemsize, implementation(a["impl"], t) == "triton")
    return [Work(call, phase_of(call), EXACT, cost, dtype=w.dtype, block=block, weight=w.weight, launches=2)]


@rule("fxmask.strip_lists")
def _lists(call: Call, t: Target) -> list[Work]:
    mask = call.named["mask"]
    return [strip_lists(call, phase_of(call), mask, mask.weight)]
