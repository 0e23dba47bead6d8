"""Ops without products: what they read and write, each byte once. Those that nobody listed are unknown, and said so."""

from __future__ import annotations

from collections import Counter
from math import prod
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ...kernels import dense_cost
from ...kernels.cost import Cost
from .calls import Call, Place
from .known_ops import BAGS, ELEMENTS, GATHERS, KNOWN, NOTHING, OVERWRITES, SCATTERS, SUMS, is_pointwise
from .work import ELEMENTWISE, FREE, RULES, UNKNOWN, Target, Work, phase_of

LINEARS = ("fxmask.masked_linear", "fxmask.pruned_linear", "fxmask.dropped_linear")
# they have a bias, or add a parameter to something: a sum in their backward is that of a bias
BIASED = ("aten.addmm", "aten.baddbmm", "aten.add", "aten.add_", "aten._addmm_activation", *LINEARS)


def work_of(call: Call, target: Target) -> list[Work]:
    """The cost of a call, by its rule; of an op without a rule its bytes, each once, and whether it is known to have no products."""
    if call.is_view or call.op in NOTHING:
        return [Work(call, phase_of(call), FREE, Cost(), launches=0)]
    found = RULES.get(call.op)
    if found is not None:
        return found(call, target)
    known = call.op in KNOWN or is_pointwise(call)
    cost = stream_of(call)
    if known and target.elementwise:
        n = max([*(_read_of(call, p) for p in call.inputs), *(p.numel for p in call.outputs)], default=0)
        cost = cost.with_flop(n, n)
    phase = phase_of(call)
    if phase == "dW" and call.op == "aten.sum" and call.forward is not None and call.forward.op in BIASED:
        phase = "db"
    dtype = next((p.dtype for p in (*call.outputs, *call.inputs)), None)
    return [Work(call, phase, ELEMENTWISE if known else UNKNOWN, cost, dtype=dtype, weight="+".join(sorted(call.weights)))]


def stream_of(call: Call) -> Cost:
    reads, writes = Counter[str](), Counter[str]()
    seen: dict[int, dict[tuple[Any, ...], tuple[Place, int]]] = {}  # by storage: views, and the bytes that each has added
    written_to = _mutated(call)
    mutated, overwritten = {p.storage for p in written_to}, {p.view for p in written_to} if call.op in OVERWRITES else set()
    part = _scattered(call)
    for p in call.inputs:
        if part is not None and p is call.inputs[0]:
            if call.op in SUMS or call.named.get("accumulate"):
                reads[_input_name(call, p)] = part
            continue
        others = seen.setdefault(p.storage, {})
        if p.view in others or p.view in overwritten:
            continue
        between = _span([*(q for q, _ in others.values()), p]) - sum(added for _, added in others.values())
        size = min(p.bytes, between)  # of slices that overlap no more than lies between their ends
        others[p.view] = p, size
        reads[_input_name(call, p)] += min(size, _read_of(call, p) * p.dtype.itemsize)
    known = {p.storage for p in call.inputs}
    written: set[int] = set()
    for p in call.outputs:
        if p.storage in written or (p.storage in known and p.storage not in mutated):
            continue
        written.add(p.storage)
        name = "y" if not call.differentiates else "dw" if phase_of(call) == "dW" else "dx"
        writes[name] += p.bytes if part is None else part
    for p in call.inputs:
        if p.storage in mutated and p.storage not in written:
            written.add(p.storage)
            writes["y"] += p.bytes if part is None else part
    return dense_cost.stream(reads, writes)


def _read_of(call: Call, p: Place) -> int:
    """Elements of an operand that an op reads at most: of a table as many as it gives, or the rows of a bag."""
    if p is call.inputs[0] and call.op in GATHERS:
        return min(p.numel, sum(q.numel for q in call.outputs))
    if p is call.inputs[0] and call.op in BAGS:
        return min(p.numel, call.named["indices"].numel * p.shape[1])
    return p.numel


def _scattered(call: Call) -> int | None:
    """Bytes of its first argument that an op writes into at some places; None for one that writes all of it, or as much as values say."""
    a = call.named
    if call.op not in SCATTERS:
        return None
    p, index = call.inputs[0], a.get("index", a.get("indices"))
    if isinstance(index, Place):  # along one axis, or an element for each of its elements
        n = index.numel if call.op in ELEMENTS else index.numel * p.numel // max(1, p.shape[a["dim"]] if p.shape else 1)
    elif index and all(i is None or (isinstance(i, Place) and i.dtype != torch.bool) for i in index):
        whole = [size for axis, size in enumerate(p.shape) if axis >= len(index) or index[axis] is None]
        n = prod(torch.broadcast_shapes(*(i.shape for i in index if i is not None))) * prod(whole)
    else:
        return None
    return min(p.bytes, n * p.dtype.itemsize)


def _span(views: list[Place]) -> int:
    """Bytes between the ends of views of one storage."""
    return max(p.offset + p.span for p in views) - min(p.offset for p in views)


def _mutated(call: Call) -> list[Place]:
    schema = getattr(call.func, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    written = [call.named.get(a.name) for a in schema.arguments if a.is_write]
    return [p for p in tree_leaves(written) if isinstance(p, Place)]


def _input_name(call: Call, p: Place) -> str:
    if p.weight:
        return "mask" if p.dtype == torch.bool else "w"
    if not call.differentiates:
        return "x"
    known = set() if call.forward is None else {q.storage for q in (*call.forward.inputs, *call.forward.outputs)}
    return "saved" if p.storage in known else "dy"
