"""Which of the ops that ran a dense step does not have: they make masks, apply them, pack what is saved, or multiply beside the dense product."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from .calls import Call, Place
from .work import Work, makes_weight

EXTRA = ("fxmask.block_index", "fxmask.strip_lists", "fxmask.compress", "fxmask.drop_mask", "fxmask.graft")
# beside products and sums for a bias, what a dense layer may do: other dtypes and layouts, a bias that is added, the edges of an image
PADS = ("aten.constant_pad_nd", "aten.reflection_pad2d", "aten.replication_pad2d", "aten.reflection_pad2d_backward", "aten.replication_pad2d_backward")
DENSE = ("aten._to_copy", "aten.clone", "aten.copy_", "aten.add", *PADS)
Sources = dict[int, frozenset[int]]  # by storage of a gradient: the gradients that a dense step has in its place


def mark(works: list[Work], changed: set[str], own: set[str]) -> None:
    """Set `extra`. `works`: of the whole step, in order; `changed`: layers that are masked, pruned, dropped, by name; `own`: those of their own forward.

    By three looks, because one op alone does not tell: by what it is, then, from the end, by who reads what it gives, then by which gradients are summed.
    """
    for w in works:
        w.extra = is_extra(w, changed, own)
    found: dict[int, list[Work]] = {}
    for w in works:
        if w.call is not None:
            found.setdefault(id(w.call), []).append(w)
    ran = [c for group in found.values() if (c := group[0].call) is not None]
    _twice(ran, found)
    _unread(ran, found)
    _sums(ran, found)


def is_extra(work: Work, changed: set[str], own: set[str]) -> bool:
    """Whether a dense step has no such op, as far as the op itself tells."""
    call = work.call
    if work.op in EXTRA:
        return True
    if call is None or call.summed or work.dense is not None:
        return False
    if work.m:  # by the patterns of an N:M mask that is drawn
        return makes_weight(call.forward if call.differentiates else call) and any(p.neutral and p.mask is not None for p in call.inputs)
    inside = call.module in changed and call.module not in own
    casts = work.op == "aten._to_copy" and call.outputs[0].dtype.is_floating_point  # else it is an index of what a pruned input kept
    if inside and not any(p.of_inputs for p in call.inputs):  # made of weights alone, or drawn: a dense layer only narrows its weight
        return not (casts and call.outputs[0].bytes < call.inputs[0].bytes)
    if work.phase == "db":
        return False
    plain = work.op in DENSE and (casts or work.op != "aten._to_copy") and not (work.op == "aten.add" and work.phase == "dW")
    return (inside and not plain) or any(_is_mask(p) for p in call.inputs)


def _is_mask(p: Place) -> bool:
    """Whether it is a mask of ours, or bools of a masked weight; constants of the model's own, as of causal attention, have no blocks."""
    return p.dtype == torch.bool and p.mask is not None and (p.mask.block is not None or bool(p.weight))


def _twice(calls: list[Call], found: dict[int, list[Work]]) -> None:
    """A product whose value takes the place of another one's, which has the gradient: mode `unmasked` of convolutions. The dense step has the other."""
    grafts = [c for c in calls if c.op == "fxmask.graft"]
    by_storage = {p.storage: found[id(c)] for c in calls if grafts and not c.is_view for p in c.outputs}
    for c in grafts:
        value, other = (by_storage.get(c.named[name].storage, []) for name in ("value", "other"))
        if any(w.m for w in value) and any(w.m for w in other):
            for w in value:
                w.extra, w.dense = True, None
            for w in other:
                w.again = True


def _unread(calls: list[Call], found: dict[int, list[Work]]) -> None:
    """Ops of a forward whose results none but extra ops read, such as looks at a weight on the way to W∘M, and numbers that a backward makes for those.

    What an extra op makes of a value stands for that value, as W∘M does for W: it is read where that is.
    """
    readers: dict[int, list[Call]] = {}
    for c in (c for c in calls if not c.is_view):
        for p in c.inputs:
            readers.setdefault(p.storage, []).append(c)
    standing: dict[int, bool] = {}  # by call: whether its results, or what extra ops make of them, are read by an op that is not extra
    for c in reversed(calls):
        group = found[id(c)]
        by = [r for storage in {p.storage for p in c.outputs} for r in readers.get(storage, []) if r is not c]
        read = not by or any(not _all_extra(found[id(r)]) for r in by)
        standing[id(c)] = read or any(_gives_value(r, found) and standing.get(id(r), True) for r in by)
        if c.is_view or _all_extra(group) or any(w.m for w in group) or (c.differentiates and c.inputs):
            continue
        between = not c.inputs or (makes_weight(c) and any(p.mask is not None for p in c.inputs))  # a 0 to mask with; what is masked again
        if not (read if between else standing[id(c)]):
            for w in group:
                w.extra = True


def _sums(calls: list[Call], found: dict[int, list[Work]]) -> None:
    """Sums of a weight's gradients one of which is part of the other, but for masks: the same product's, which reaches W by several ops that make W∘M."""
    sources: Sources = {}
    masked: set[int] = set()  # storages of gradients that an extra op made
    for c in calls:
        if not c.differentiates or c.is_view:
            continue
        given = [_of(sources, p) for p in c.inputs]
        if c.of_weight and (given[0] <= given[1] or given[1] <= given[0]) and any(p.storage in masked for p in c.inputs):
            for w in found[id(c)]:
                w.extra = True
        extra = _all_extra(found[id(c)])
        for p in c.outputs:
            if extra or c.summed:
                sources[p.storage] = frozenset().union(*(s for s, q in zip(given, c.inputs, strict=True) if q.of_inputs))
                masked |= {p.storage} if extra else set()


def _of(sources: Sources, p: Place) -> frozenset[int]:
    return sources.get(p.storage, frozenset({p.storage}))


def _all_extra(group: Iterable[Work]) -> bool:
    return all(w.extra for w in group)


def _gives_value(c: Call, found: dict[int, list[Work]]) -> bool:
    """Whether an op that is extra makes numbers of numbers; a product beside the dense one is no step on the way to anything."""
    return not any(w.m for w in found[id(c)]) and any(p.dtype.is_floating_point for p in c.outputs)
