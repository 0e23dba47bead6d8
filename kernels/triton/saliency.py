"""Scores of blocks off a step's gradient, and the averages that they go into: one launch each; plain forms in `kernels.saliency`.

Weight and gradient are read once, and nothing of their size is written. A float sum has its own order here, so it differs from the plain form's in the last
bits; it is the same in every run on one device.
"""

from __future__ import annotations

import torch
from torch import Tensor

import triton
import triton.language as tl

from ..grid import grid_shape
from ..lists import listed
from ..saliency import BY_GRADIENT
from . import device
from .tiles import SELECT_MAX, keys_tile

SCORES = 4096  # of a pass of the program that averages


@triton.jit
def saliency_kernel(
    w_ptr,
    grad_ptr,
    out_ptr,
    N,
    K,
    stride_w,
    stride_g,
    CRITERION: tl.constexpr,
    KM: tl.constexpr,
    WM: tl.constexpr,
    GM: tl.constexpr,
    BH: tl.constexpr,
    BW: tl.constexpr,
    TN: tl.constexpr,
    TK: tl.constexpr,
):
    """out[block] = sqrt(sum g^2), |sum g w| or -sum g w by CRITERION 0, 1, 2, places in `BY_GRADIENT`. Grid: (tiles of TN x TK,); TN, TK are multiples of BH,
    BW, all powers of two.

    w, grad [N, K] any float up to 32 bits, out [NB, KB] float32. K and the row strides come in units of KM, WM, GM. `w` is not read by CRITERION 0.
    """
    K = K * KM
    KB = (K + BW - 1) // BW
    wide = (K + TK - 1) // TK
    tile_n = tl.program_id(0) // wide
    tile_k = tl.program_id(0) % wide
    r = tile_n * TN + tl.arange(0, TN)
    c = tile_k * TK + tl.arange(0, TK)
    inside = (r[:, None] < N) & (c[None, :] < K)
    g = tl.load(grad_ptr + r.to(tl.int64)[:, None] * stride_g * GM + c[None, :], mask=inside, other=0.0).to(tl.float32)
    if CRITERION == 0:
        p = g * g
    else:
        p = g * tl.load(w_ptr + r.to(tl.int64)[:, None] * stride_w * WM + c[None, :], mask=inside, other=0.0).to(tl.float32)
    s = tl.sum(tl.sum(tl.reshape(p, [TN // BH, BH, TK // BW, BW]), axis=3), axis=1)
    if CRITERION == 0:
        s = tl.sqrt_rn(s)  # the fast one flushes denormal sums to 0
    elif CRITERION == 1:
        s = tl.abs(s)
    else:
        s = -s
    rb = tile_n * (TN // BH) + tl.arange(0, TN // BH)
    cb = tile_k * (TK // BW) + tl.arange(0, TK // BW)
    tl.store(out_ptr + rb[:, None] * KB + cb[None, :], s, mask=(rb[:, None] * BH < N) & (cb[None, :] * BW < K))


@triton.jit
def take_in_kernel(
    score_ptr,
    new_ptr,
    skipped_ptr,
    n,
    a,
    b,
    AVERAGES: tl.constexpr,
    ADDS: tl.constexpr,
    HOLDS: tl.constexpr,
    SKIPS: tl.constexpr,
    CH: tl.constexpr,
):
    """Scores [n] float32 in place, as `kernels.saliency.take_in`: a s + b new; `new` where AVERAGES and s is not finite or all are 0. Grid: (1,).

    HOLDS: nothing is written where an element of new is not finite; SKIPS: nor where `skipped`, float32 [1], is not 0.
    """
    i = tl.arange(0, CH)
    broken = tl.zeros((CH,), tl.int32)
    begun = tl.zeros((CH,), tl.int32)
    for at in range(0, n, CH):
        new = tl.load(new_ptr + at + i, mask=at + i < n, other=0.0)
        broken |= ((new.to(tl.int32, bitcast=True) & 0x7FFFFFFF) >= 0x7F800000).to(tl.int32)
        if AVERAGES:
            score = tl.load(score_ptr + at + i, mask=at + i < n, other=0.0)
            begun |= (score != 0).to(tl.int32)
    goes = tl.full((), 1, tl.int32)
    if HOLDS:
        goes = 1 - tl.max(broken, 0)
    if SKIPS:
        goes = tl.where(tl.load(skipped_ptr) == 0, goes, 0)
    any_begun = tl.max(begun, 0)
    for at in range(0, tl.where(goes != 0, n, 0), CH):
        new = tl.load(new_ptr + at + i, mask=at + i < n, other=0.0)
        if ADDS or AVERAGES:
            score = tl.load(score_ptr + at + i, mask=at + i < n, other=0.0)
            blended = a * score + b * new
            if AVERAGES:
                finite = (score.to(tl.int32, bitcast=True) & 0x7FFFFFFF) < 0x7F800000
                blended = tl.where(finite & (any_begun != 0), blended, new)
            new = blended
        tl.store(score_ptr + at + i, new, mask=at + i < n)


def takes_gradient(w: Tensor, grad: Tensor, block: tuple[int, int]) -> bool:
    """Whether the kernel takes a weight and its gradient."""
    return listed(block) and w.dtype in device.DTYPES and grad.dtype in device.DTYPES and w.numel() > 0 and grad.device == w.device


def saliency(w: Tensor, grad: Tensor, block: tuple[int, int], criterion: str) -> Tensor:
    """As `kernels.saliency.saliency`. Cost: one read of weight and gradient (`gradient`: of the gradient), 4 bytes a block written."""
    w, g = device.rows_of(w.detach()), device.rows_of(grad.detach())
    (n, k), (bh, bw), (tn, tk) = w.shape, block, keys_tile(block)
    out = torch.empty(grid_shape((n, k), block), dtype=torch.float32, device=w.device)
    km, wm, gm = device.divisor(k), device.divisor(w.stride(0)), device.divisor(g.stride(0))
    device.launch(
        saliency_kernel, (triton.cdiv(n, tn) * triton.cdiv(k, tk),), w, w, g, out, n, k // km, w.stride(0) // wm, g.stride(0) // gm,
        CRITERION=BY_GRADIENT.index(criterion), KM=km, WM=wm, GM=gm, BH=bh, BW=bw, TN=tn, TK=tk, num_warps=16 if tn * tk > 8192 else 8,
    )  # fmt: skip
    return out


def takes_scores(scores: Tensor, new: Tensor) -> bool:
    """Whether the kernel takes scores and what goes into them. One program reads them all: of very many, as of single weights, the plain form is faster."""
    return scores.numel() <= SELECT_MAX and scores.is_contiguous() and new.is_contiguous()


def take_in(scores: Tensor, new: Tensor, average: float, adds: bool, holds: bool, skipped: Tensor | None = None) -> None:
    """As `kernels.saliency.take_in`, bit for bit, in one launch of one program."""
    averages = average > 0 and not adds
    a, b = (average or 1.0, 1.0) if adds else (average, 1.0 - average)
    flag = None if skipped is None or not holds else skipped.to(scores.device, torch.float32).reshape(-1)[:1]
    device.launch(
        take_in_kernel, (1,), scores, scores, new, flag, scores.numel(), a, b,
        AVERAGES=averages, ADDS=adds, HOLDS=holds, SKIPS=flag is not None, CH=min(SCORES, max(32, triton.next_power_of_2(scores.numel()))), num_warps=8,
        enable_fp_fusion=False,
    )  # fmt: skip
