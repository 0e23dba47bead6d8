"""Block dropout's products on a CPU: runs of kept blocks, multiplied where they lie. Nothing is gathered, nothing dropped is read.

Forward and dX go strip by strip of `bm` tokens, over runs of kept blocks along the features; dW goes block column by block column, over runs along the tokens.
The scale is the matmul's alpha. At 1,024 cubed (an Ice Lake host, float32, forward and backward) the dense linear takes, on one and two threads, 1.03 and 0.94
times as long as runs of blocks of 128 at p = 0.2, 1.18 and 1.03 at 0.3, 5.7 and 4.6 at 0.9; of 64: 0.95 and 0.83 at 0.2, 1.09 and 0.95 at 0.3; of 32: 1.17 and
1.04 at 0.6. Below `OFTEN` the plain form with dropped zeros in it is faster.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import UnsupportedError
from ..reference import rows
from .runs import runs_of

OFTEN = ((128, 0.1), (64, 0.2), (32, 0.5))  # a block's smaller side, and the probability from which on its runs pay; smaller ones never do
SHARED = 0.7  # the least probability for sides below 64 on several threads, which wait on such small products

DTYPES = (torch.float32, torch.float64)  # in 16 bits every run would round the sum


def require(t: Tensor) -> None:
    """Raise UnsupportedError for a dtype that runs are not made for."""
    if t.dtype not in DTYPES:
        raise UnsupportedError(f"impl='cpu' of block dropout cannot run on {t.dtype}: expected float32 or float64; use impl='auto' or impl='reference'.")


def pays(t: Tensor, block: tuple[int, int], p: float) -> bool:
    """Whether runs are the faster way."""
    side = min(block)
    least = next((often for least_side, often in OFTEN if side >= least_side), 1.0)
    if side < 64 and torch.get_num_threads() > 1:
        least = max(least, SHARED)
    return t.device.type == "cpu" and p >= least and t.dtype in DTYPES


def runs(keep: list[bool], side: int, end: int) -> list[tuple[int, int]]:
    """[begin, end) in elements of each run of kept blocks of `side`."""
    return [(a * side, min(b * side, end)) for a, b in runs_of([i for i, kept in enumerate(keep) if kept])]


def linear(x: Tensor, w: Tensor, bias: Tensor | None, keep: Tensor, block: tuple[int, int], p: float, lists: Tensor | None = None) -> Tensor:
    """As `dropout.linear`."""
    flat = rows(x)
    y = flat.new_empty(flat.shape[0], w.shape[0])
    for i, kept in enumerate(keep.tolist()):
        begin, end = i * block[0], min((i + 1) * block[0], flat.shape[0])
        own = y[begin:end]
        own[:] = 0 if bias is None else bias
        for a, b in runs(kept, block[1], flat.shape[1]):
            own.addmm_(flat[begin:end, a:b], w[:, a:b].t(), alpha=1 / (1 - p))
    return y.view(*x.shape[:-1], w.shape[0])


def dx(gy: Tensor, w: Tensor, keep: Tensor, block: tuple[int, int], p: float, lists: Tensor | None = None) -> Tensor:
    """As `dropout.dx`."""
    flat = rows(gy)
    out = flat.new_zeros(flat.shape[0], w.shape[1])
    for i, kept in enumerate(keep.tolist()):
        begin, end = i * block[0], min((i + 1) * block[0], flat.shape[0])
        for a, b in runs(kept, block[1], w.shape[1]):
            out[begin:end, a:b].addmm_(flat[begin:end], w[:, a:b], beta=0, alpha=1 / (1 - p))
    return out.view(*gy.shape[:-1], w.shape[1])


def dw(gy: Tensor, x: Tensor, keep: Tensor, block: tuple[int, int], p: float, lists: Tensor | None = None) -> Tensor:
    """As `dropout.dw`."""
    g, flat = rows(gy), rows(x)
    out = flat.new_zeros(g.shape[1], flat.shape[1])
    for j, kept in enumerate(keep.t().tolist()):
        begin, end = j * block[1], min((j + 1) * block[1], flat.shape[1])
        for a, b in runs(kept, block[0], flat.shape[0]):
            out[:, begin:end].addmm_(g[a:b].t(), flat[a:b, begin:end], alpha=1 / (1 - p))
    return out
