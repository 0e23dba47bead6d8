"""Scores by the form that is fastest where a weight lies: `kernels.cpu.score`, Triton's kernels, or the plain one. Keys have the same bits in all of them;
sums of gradients, as any sum of floats, the same on one device.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch._subclasses import FakeTensor

from . import dispatch, saliency, score
from .cpu import score as cpu_score
from .grid import as_matrix


def block_keys(w: Tensor, block: tuple[int, int], criterion: str, impl: str = "auto") -> Tensor:
    """As `kernels.score.block_keys`, bit for bit. w: (N, K)."""
    if w.is_cpu and impl in ("auto", "cpu") and not isinstance(w, FakeTensor):
        return cpu_score.block_keys(w, block, criterion)
    kernels = _kernels(w, impl)
    if kernels is not None and kernels.scores(w, block, criterion):
        keys: Tensor = kernels.block_keys(w, block)
        return keys
    return score.block_keys(w, block, criterion)


def saliency_of(w: Tensor, grad: Tensor, block: tuple[int, int], criterion: str, impl: str = "auto") -> Tensor:
    """As `kernels.saliency.saliency`, of a weight of any shape."""
    w, grad, kernels = as_matrix(w.detach()), as_matrix(grad.detach()), _kernels(w, impl)
    of = kernels if kernels is not None and kernels.takes_gradient(w, grad, block) else saliency
    scores: Tensor = of.saliency(w, grad, block, criterion)
    return scores


def take_in(scores: Tensor, new: Tensor, average: float, adds: bool, holds: bool, skipped: Tensor | None = None, impl: str = "auto") -> None:
    """As `kernels.saliency.take_in`."""
    kernels = _kernels(scores, impl)
    of = kernels if kernels is not None and kernels.takes_scores(scores, new) else saliency
    of.take_in(scores, new, average, adds, holds, skipped)


def _kernels(t: Tensor, impl: str) -> Any:
    """The Triton kernels where they run and `impl` lets them; None elsewhere."""
    return dispatch.triton_ops() if dispatch.uses_kernels(impl, t.device) and not isinstance(t, FakeTensor) else None
