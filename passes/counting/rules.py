"""Rules for ATen's products: matmuls, convolutions, fused attention. Others are in `other_products`; `moves` has what is no product, `masked_rules` ours."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

from ...kernels import dense_cost
from ...kernels.cost import Cost
from ...kernels.grid import expand_mask, grid_shape, kept_elements
from .calls import Call, Place
from .work import EXACT, Target, Work, phase_of, rule


def _names(call: Call, phase: str, a: Place, b: Place) -> tuple[str, str, str]:
    """What the operands of a product are called."""
    if phase in ("fwd", "recompute"):
        return ("x", "w", "y") if b.weight else ("w", "x", "y") if a.weight else ("x", "x2", "y")
    if phase == "dX":
        if a.weight or b.weight:
            return ("dy", "w", "dx") if b.weight else ("w", "dy", "dx")
        return "dy", "x2", "dx"
    known = {p.storage for p in call.forward.inputs} if call.forward else set()
    return ("x", "dy", "dw") if a.storage in known else ("dy", "x", "dw")


def _widths(names: tuple[str, str, str], a: Place, b: Place, out: Place) -> dict[str, tuple[int, int]]:
    """A tile's rows: 64 elements of an operand, or what there is, and whole rows of the output's tile."""
    found = {}
    for name, p in zip(names, (a, b, out), strict=True):
        inner = [size for size, stride in zip(p.shape, p.stride, strict=True) if stride == 1] or [1]
        pitch = max((stride for size, stride in zip(p.shape, p.stride, strict=True) if stride > 1 and size > 1), default=inner[0])
        found[name] = (min(64, max(inner)) * p.dtype.itemsize, pitch * p.dtype.itemsize)
    return found


def product(call: Call, t: Target, a: Place, b: Place, bias: int = 0) -> list[Work]:
    batch = a.shape[0] if len(a.shape) == 3 else 1
    (m, k), n = a.shape[-2:], b.shape[-1]
    phase, out = phase_of(call), call.outputs[0]
    names = _names(call, phase, a, b)
    least = {names[i]: p.bytes for i, p in enumerate((a, b)) if p.bytes < p.numel * p.dtype.itemsize}
    if (a.storage, a.offset, a.span, a.numel) == (b.storage, b.offset, b.span, b.numel):  # x x^T: the same bytes
        least[names[1]] = 0
    cost = dense_cost.matmul(m, n, k, a.dtype.itemsize, t.tile, batch=batch, names=names, bias=bias, least=least)
    work = Work(call, phase, EXACT, cost, m, n, k, batch, a.dtype, widths=_widths(names, a, b, out))
    of_weight(work, b, a)
    return [work]


def of_weight(work: Work, *operands: Place) -> None:
    """Say of a product of which weight it is, the first one among its operands, and leave out what a mask does."""
    call, weight = work.call, next((p for p in operands if p.weight), operands[0])
    if weight.weight:
        work.weight, work.elements = weight.weight, weight.bytes // weight.dtype.itemsize  # distinct ones, of an expanded weight, too
    elif work.phase == "dW" and call is not None and call.forward is not None:  # of W∘M, in a mode that drops what lies outside of kept blocks
        size = call.outputs[0].numel
        weight = next((p for p in call.forward.inputs if p.mask is not None and not p.mask.whole_dw and p.numel == size), weight)
    leave_out(work, weight)


def leave_out(work: Work, weight: Place) -> None:
    """A dense product with W∘M, or with a view of it; W∘M is made by ops of its own.

    Useful FLOP   the dense product's, times the share of the view's elements that lie in kept blocks
    Issued FLOP, requested and compulsory B: the dense product's
    """
    found, mask = _kept(weight), weight.mask
    if found is not None and mask is not None:
        (kept, size), cost = found, work.cost
        work.dense, work.block, work.nnzb, work.impl = cost, mask.block, int(mask.values.sum()), "masked_dense"
        work.kept, work.elements, work.weight = kept, size, weight.weight
        useful = cost.flop_useful * kept // max(1, size)
        work.cost = cost.with_flop(useful, cost.flop_issued)


def _kept(p: Place) -> tuple[int, int] | None:
    """(elements in kept blocks, all elements) of W∘M or a view of it; None of what is none, and of a copied part, which is like any other."""
    m = p.mask
    if m is None or m.block is None or m.shape is None or not p.dtype.is_floating_point or tuple(m.values.shape) != grid_shape(m.shape, m.block):
        return None
    axes = [(size, stride) for size, stride in zip(p.shape, p.stride, strict=True) if stride]  # one that is only expanded has each element once
    size, whole = prod(n for n, _ in axes), prod(m.shape)
    if size == whole:
        return int(kept_elements(m.values, m.shape, m.block)), whole
    if p.storage != m.storage:
        return None
    part = expand_mask(m.values, m.shape, m.block).as_strided([n for n, _ in axes], [s for _, s in axes], p.offset // p.dtype.itemsize)
    return int(part.sum()), size


@rule("aten.mm", "aten.bmm", "aten._int_mm", "aten._scaled_mm")
def _mm(call: Call, t: Target) -> list[Work]:
    return product(call, t, call.args[0], call.args[1])


@rule("aten.addmm", "aten.addmm_", "aten.baddbmm", "aten.baddbmm_", "aten._addmm_activation")
def _addmm(call: Call, t: Target) -> list[Work]:
    return product(call, t, call.args[1], call.args[2], bias=call.args[0].numel)


@rule("aten.convolution", "aten._convolution", "aten.cudnn_convolution", "aten.mkldnn_convolution", "aten._slow_conv2d_forward")
def _convolution(call: Call, t: Target) -> list[Work]:
    (x, w), named = call.args[:2], call.named  # the rest has another place in each
    transposed, groups, bias = named.get("transposed", False), named.get("groups", 1), named.get("bias") is not None
    return [_conv_work(call, t, phase_of(call), x, w, call.outputs[0], transposed, groups, bias)]


def _conv_work(call: Call, t: Target, phase: str, x: Place, w: Place, y: Place, transposed: bool, groups: int, bias: bool) -> Work:
    """Forward, dX and dW of a convolution have as many multiplications: x, w, y are the forward's tensors, or their gradients."""
    c_out, c_in = (w.shape[1] * groups, w.shape[0]) if transposed else (w.shape[0], w.shape[1] * groups)
    kernel = w.shape[2:]
    spatial = (x if transposed else y).shape[2:]
    pixels = y.shape[0] * prod(spatial)
    names = {"dX": ("dy", "w", "dx"), "dW": ("dy", "x", "dw")}.get(phase, ("x", "w", "y"))
    moved, op = {"dX": (y, w, x), "dW": (y, x, w)}.get(phase, (x, w, y)), phase.lower()
    if transposed and phase == "dW":  # its output's gradient slides over the kernel, and its input does not
        names, moved, (c_out, c_in) = ("x", "dy", "dw"), (x, y, w), (c_in, c_out)
    cost = dense_cost.convolution(
        pixels, c_out, c_in, kernel, x.dtype.itemsize, t.tile, groups=groups, x=moved[0].bytes, w=moved[1].bytes, y=moved[2].bytes, names=names,
        bias=c_out if bias else 0, op=op,
    )  # fmt: skip
    m, n, k = dense_cost.products_of(op, pixels, c_out, c_in, kernel, groups)
    work = Work(call, phase, EXACT, cost, m, n, k, groups, x.dtype, weight=w.weight, elements=w.numel)
    if w.mask is not None and groups == 1 and not transposed and not (phase == "dW" and w.mask.whole_dw):  # W∘M of a masked convolution
        leave_out(work, w)
    return work


@rule("aten.convolution_backward")
def _convolution_backward(call: Call, t: Target) -> list[Work]:
    gy, x, w, bias_sizes, _, _, _, transposed, _, groups, wanted = call.args[:11]
    found = [_conv_work(call, t, phase, x, w, gy, transposed, groups, False) for phase, asked in zip(("dX", "dW"), wanted, strict=False) if asked]
    if wanted[2]:
        channels = w.shape[1] * groups if transposed else w.shape[0]
        cost = dense_cost.stream({"dy": gy.bytes}, {"dbias": channels * gy.dtype.itemsize})
        found.append(Work(call, "db", EXACT, cost, dtype=gy.dtype))
    return found


_FUSED = ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention", "fused_attention_overrideable")


def _heads(q: Place, k: Place, v: Place) -> tuple[int, int, int, int, int, int]:
    return prod(q.shape[:-3]), q.shape[-3], q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1]


def _once(cost: Cost, **operands: Place) -> Cost:
    """An operand that is another one, too, has the same bytes: compulsory are those of the first."""
    views, least = set[Any](), dict(cost.reads_min)
    for name, p in operands.items():
        least[name] = 0 if p.view in views else least[name]
        views.add(p.view)
    return replace(cost, reads_min=least)


@rule(*(f"aten._scaled_dot_product_{name}" for name in _FUSED))
def _attention(call: Call, t: Target) -> list[Work]:
    q, k, v = call.args[:3]
    extra = sum(p.bytes for p in call.inputs[3:])
    cost = dense_cost.attention(*_heads(q, k, v), q.dtype.itemsize, k.shape[-3], extra)
    stats = sum(p.bytes for p in call.outputs[1:] if p.dtype.is_floating_point)
    if stats:
        cost += Cost(writes={"stats": stats}, writes_min={"stats": stats})
    return [Work(call, phase_of(call), EXACT, _once(cost, q=q, k=k, v=v), q.shape[-2], k.shape[-2], q.shape[-1], prod(q.shape[:-2]), q.dtype)]


@rule(*(f"aten._scaled_dot_product_{name}_backward" for name in _FUSED))
def _attention_backward(call: Call, t: Target) -> list[Work]:
    gy, q, k, v = call.args[:4]
    rest = sum(p.bytes for p in call.inputs[4:] if p.shape != gy.shape)
    cost = dense_cost.attention_backward(*_heads(q, k, v), q.dtype.itemsize, k.shape[-3], rest)
    return [Work(call, "dX", EXACT, _once(cost, q=q, k=k, v=v), q.shape[-2], k.shape[-2], q.shape[-1], prod(q.shape[:-2]), q.dtype)]
