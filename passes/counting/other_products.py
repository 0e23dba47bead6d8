"""Rules for products that are no matmul of two matrices: with vectors, sums of a batch, bilinear forms, distances by a matmul."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from .calls import Call, Place
from .moves import stream_of
from .rules import of_weight, product
from .work import EXACT, Target, Work, phase_of, rule

ONCE = ("aten._grouped_mm", "aten.addbmm", "aten.addbmm_", "aten._trilinear", "aten._euclidean_dist", "aten.conv_tbc")


def once(call: Call, m: int, n: int, k: int, batch: int, *operands: Place) -> list[Work]:
    """A product of which nothing but its sizes is known: grouped matrices, bilinear forms, distances.

    Useful FLOP   2 batch m n k
    Issued FLOP   the same
    Requested and compulsory B: those of every operand, once
    """
    flop, phase = 2 * batch * m * n * k, phase_of(call)
    work = Work(call, phase, EXACT, stream_of(call).with_flop(flop, flop), m, n, k, batch, operands[0].dtype)
    of_weight(work, *operands)
    return [work]


@rule("aten._grouped_mm")
def _grouped_mm(call: Call, t: Target) -> list[Work]:
    """Each row meets the matrix of its group alone, so the groups' sizes, which only values tell, do not matter."""
    a, b = call.args[:2]
    (m, k), n = a.shape[-2:], b.shape[-1]
    return once(call, m, n, k, a.shape[0] if len(a.shape) == len(b.shape) == 3 else 1, b, a)


@rule("aten.addbmm", "aten.addbmm_")
def _addbmm(call: Call, t: Target) -> list[Work]:
    a, b = call.args[1:3]
    return once(call, a.shape[1], b.shape[2], a.shape[2], a.shape[0], b, a)


@rule("aten._trilinear")
def _trilinear(call: Call, t: Target) -> list[Work]:
    """nn.Bilinear and its gradients: each element of one operand meets the products of the other two, which, as no matrices are multiplied, count none."""
    shapes = []
    for p, expanded in zip(call.args[:3], call.args[3:6], strict=True):
        shape = list(p.shape)
        for axis in expanded:
            shape.insert(axis, 1)
        shapes.append(shape)
    sizes = [max(axis) for axis in zip(*shapes, strict=True)]
    k = prod(sizes[axis] for axis in call.args[6])
    return once(call, prod(sizes) // max(1, k), 1, k, 1, *call.args[:3])


@rule("aten._euclidean_dist")
def _distances(call: Call, t: Target) -> list[Work]:
    """torch.cdist of many rows: |a|^2 + |b|^2 - 2 a b^T, of which the product counts."""
    a, b = call.args
    return once(call, a.shape[-2], b.shape[-2], a.shape[-1], prod(a.shape[:-2]), b, a)


@rule("aten.conv_tbc")
def _conv_tbc(call: Call, t: Target) -> list[Work]:
    x, w = call.args[:2]
    taps, c_in, c_out = w.shape
    return once(call, call.outputs[0].tokens, c_out, taps * c_in, 1, w, x)


def _column(p: Place) -> Place:
    return replace(p, shape=(*p.shape, 1), stride=(*p.stride, 1))


def _row(p: Place) -> Place:
    return replace(p, shape=(1, *p.shape), stride=(p.numel * p.stride[0], *p.stride))


@rule("aten.mv")
def _mv(call: Call, t: Target) -> list[Work]:
    return product(call, t, call.args[0], _column(call.args[1]))


@rule("aten.addmv", "aten.addmv_")
def _addmv(call: Call, t: Target) -> list[Work]:
    return product(call, t, call.args[1], _column(call.args[2]), bias=call.args[0].numel)


@rule("aten.dot", "aten.vdot")
def _dot(call: Call, t: Target) -> list[Work]:
    return product(call, t, _row(call.args[0]), _column(call.args[1]))
