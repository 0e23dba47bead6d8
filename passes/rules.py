"""Rules for ATen's products: matmuls, convolutions, fused attention. Others are in `passes.moves`, ours in `passes.masked_rules`."""

from __future__ import annotations

from math import prod

from torch import Tensor

from ..kernels import dense_cost
from ..kernels.cost import Cost
from ..kernels.grid import grid_shape, kept_elements, matrix_shape
from .moves import stream_of
from .record import Call, Place
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


def _product(call: Call, t: Target, a: Place, b: Place, bias: int = 0) -> list[Work]:
    batch = a.shape[0] if len(a.shape) == 3 else 1
    (m, k), n = a.shape[-2:], b.shape[-1]
    phase, out = phase_of(call), call.outputs[0]
    names = _names(call, phase, a, b)
    least = {names[i]: p.bytes for i, p in enumerate((a, b)) if p.bytes < p.numel * p.dtype.itemsize}
    if (a.storage, a.offset, a.span, a.numel) == (b.storage, b.offset, b.span, b.numel):  # x x^T: the same bytes
        least[names[1]] = 0
    cost = dense_cost.matmul(m, n, k, a.dtype.itemsize, t.tile, batch=batch, names=names, bias=bias, least=least)
    work = Work(call, phase, EXACT, cost, m, n, k, batch, a.dtype, widths=_widths(names, a, b, out))
    weight = b if b.weight else a
    if weight.weight:
        work.weight, work.elements = weight.weight, weight.numel
        if weight.mask is not None and weight.mask.block is not None and weight.dtype.is_floating_point:  # W∘M, which somebody multiplies by densely
            mask, block = weight.mask.values, weight.mask.block
            shape = weight.shape if weight.stride[-1] == 1 else weight.shape[::-1]
            if len(shape) == 2:
                _leave_out(work, mask, (shape[0], shape[1]), block)
    return [work]


def _leave_out(work: Work, mask: Tensor, shape: tuple[int, int], block: tuple[int, int]) -> None:
    """Count a dense product with W∘M: useful are the kept elements of a weight of `shape` (N, K), what is issued and moved stays."""
    if tuple(mask.shape) == grid_shape(shape, block):
        kept, cost = int(kept_elements(mask, shape, block)), work.cost
        work.dense, work.block, work.nnzb, work.kept, work.impl = cost, block, int(mask.sum()), kept, "masked_dense"
        useful = cost.flop_useful * kept // max(1, shape[0] * shape[1])
        work.cost = Cost(useful, cost.flop_issued, cost.reads, cost.writes, cost.reads_min, cost.writes_min)


@rule("aten.mm", "aten.bmm")
def _mm(call: Call, t: Target) -> list[Work]:
    return _product(call, t, call.args[0], call.args[1])


@rule("aten.addmm", "aten.baddbmm", "aten._addmm_activation")
def _addmm(call: Call, t: Target) -> list[Work]:
    return _product(call, t, call.args[1], call.args[2], bias=call.args[0].numel)


@rule("aten._grouped_mm")
def _grouped_mm(call: Call, t: Target) -> list[Work]:
    """Each row meets the matrix of its group alone, so the groups' sizes, which only values tell, do not matter; bytes are those of all groups, each once."""
    a, b = call.args[:2]
    (m, k), n = a.shape[-2:], b.shape[-1]
    batch = a.shape[0] if len(a.shape) == len(b.shape) == 3 else 1
    flop, moved = 2 * batch * m * k * n, stream_of(call)
    weight = b if b.weight else a
    cost = Cost(flop, flop, moved.reads, moved.writes, moved.reads_min, moved.writes_min)
    return [Work(call, phase_of(call), EXACT, cost, m, n, k, batch, a.dtype, weight=weight.weight, elements=weight.numel if weight.weight else 0)]


@rule("aten.convolution", "aten._convolution", "aten.cudnn_convolution", "aten.mkldnn_convolution", "aten._slow_conv2d_forward")
def _convolution(call: Call, t: Target) -> list[Work]:
    x, w, bias = call.args[:3]
    transposed = len(call.args) > 6 and call.args[6] is True
    groups = call.args[8] if len(call.args) > 8 and isinstance(call.args[8], int) else x.shape[1] // w.shape[1]
    return [_conv_work(call, t, "fwd" if phase_of(call) == "fwd" else phase_of(call), x, w, call.outputs[0], transposed, groups, bias is not None)]


def _conv_work(call: Call, t: Target, phase: str, x: Place, w: Place, y: Place, transposed: bool, groups: int, bias: bool) -> Work:
    """Forward, dX and dW of a convolution have the same products: x, w, y are the forward's tensors, or their gradients."""
    c_out, c_in = (w.shape[1] * groups, w.shape[0]) if transposed else (w.shape[0], w.shape[1] * groups)
    kernel = w.shape[2:]
    spatial = (x if transposed else y).shape[2:]
    pixels = y.shape[0] * prod(spatial)
    names = {"dX": ("dy", "w", "dx"), "dW": ("dy", "x", "dw")}.get(phase, ("x", "w", "y"))
    moved = {"dX": (y, w, x), "dW": (y, x, w)}.get(phase, (x, w, y))
    cost = dense_cost.convolution(
        pixels, c_out, c_in, kernel, x.dtype.itemsize, t.tile, groups=groups, x=moved[0].bytes, w=moved[1].bytes, y=moved[2].bytes, names=names,
        bias=c_out if bias else 0,
    )  # fmt: skip
    work = Work(call, phase, EXACT, cost, pixels, c_out // groups, c_in // groups * prod(kernel), groups, x.dtype, weight=w.weight, elements=w.numel)
    known = w.mask is not None and w.mask.block is not None and w.dtype.is_floating_point and groups == 1 and not transposed
    if known and w.mask is not None and w.mask.block is not None and not (phase == "dW" and w.mask.whole_dw):  # W∘M of a masked convolution
        _leave_out(work, w.mask.values, matrix_shape(w.shape), w.mask.block)
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


@rule(*(f"aten._scaled_dot_product_{name}" for name in _FUSED))
def _attention(call: Call, t: Target) -> list[Work]:
    q, k, v = call.args[:3]
    extra = sum(p.bytes for p in call.inputs[3:])
    cost = dense_cost.attention(*_heads(q, k, v), q.dtype.itemsize, k.shape[-3], extra)
    stats = sum(p.bytes for p in call.outputs[1:] if p.dtype.is_floating_point)
    if stats:
        cost += Cost(writes={"stats": stats}, writes_min={"stats": stats})
    return [Work(call, phase_of(call), EXACT, cost, q.shape[-2], k.shape[-2], q.shape[-1], prod(q.shape[:-2]), q.dtype)]


@rule(*(f"aten._scaled_dot_product_{name}_backward" for name in _FUSED))
def _attention_backward(call: Call, t: Target) -> list[Work]:
    gy, q, k, v = (p for p in call.args[:4])
    rest = sum(p.bytes for p in call.inputs[4:] if p.shape != gy.shape)
    cost = dense_cost.attention_backward(*_heads(q, k, v), q.dtype.itemsize, k.shape[-3], rest)
    return [Work(call, "dX", EXACT, cost, q.shape[-2], k.shape[-2], q.shape[-1], prod(q.shape[:-2]), q.dtype)]
