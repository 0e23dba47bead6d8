"""torch's own block-sparse kernels, the anchors: `bsr_dense_addmm` with its settings and with a deeper pipeline, and `sampled_addmm`.

They are given more than a training step has: the BSR form of the weight, and of its transpose for dX, are made outside the time. Output as they leave it: the
transposed product, and dW as BSR.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..errors import UnsupportedError
from .inputs import Inputs


def _triton_ops() -> Any:
    from torch.sparse import _triton_ops

    return _triton_ops


def bsr_of(w: Tensor, block: tuple[int, int]) -> Tensor:
    """The BSR form of a masked weight (N, K); UnsupportedError for ragged edges, which BSR has not."""
    if w.shape[0] % block[0] or w.shape[1] % block[1]:
        raise UnsupportedError(f"BSR takes whole blocks: expected a weight divisible by {block}, got {tuple(w.shape)}; use another shape or block.")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "sparse support is in beta", once a process
        return w.to_sparse_bsr(block)


def bsr(num_stages: int | None) -> Callable[[Inputs], Callable[[], tuple[Any, ...]]]:
    """Forward y = (W x^T)^T, or dX = (W^T gy^T)^T, W in BSR on the left, as torch has it. `num_stages` replaces that of torch's table."""

    def prepare(i: Inputs) -> Callable[[], tuple[Any, ...]]:
        forward = i.cell.op == "forward"
        left = bsr_of(i.masked_weight if forward else i.masked_weight.t().contiguous(), i.block if forward else i.block[::-1])
        right = (i.x if forward else i.gy).t()
        if i.device.type != "cuda":
            return lambda: ((left @ right).t(),)
        return _with_triton(left, right, num_stages)

    return prepare


def _with_triton(left: Tensor, right: Tensor, num_stages: int | None) -> Callable[[], tuple[Any, ...]]:
    t = _triton_ops()
    out = right.new_empty(left.shape[0], right.shape[1])
    meta = None
    if num_stages is not None:
        sparsity = round(1 - left._nnz() * left.values()[0].numel() / (left.shape[0] * left.shape[1]), 2)
        sizes = (left.shape[0], left.shape[1], right.shape[1], *left.values().shape[-2:], 0, 1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that its tables do not know this GPU
            meta = t.bsr_dense_addmm_meta(*sizes, sparsity=sparsity, dtype=right.dtype, out_dtype=right.dtype)
        meta = {**meta, "num_stages": num_stages}

    def call() -> tuple[Any, ...]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return (t.bsr_dense_addmm(out, left, right, beta=0, out=out, meta=meta).t(),)

    return call


def sampled(i: Inputs) -> Callable[[], tuple[Any, ...]]:
    """dW of the kept blocks, as BSR."""
    t = _triton_ops()
    if getattr(t, "sampled_addmm", None) is None:
        raise UnsupportedError("torch's sampled_addmm for BSR needs a CUDA device and Triton: got neither; leave torch_sampled out of --providers.")
    pattern, left = bsr_of(i.masked_weight, i.block), i.gy.t()
    return lambda: (t.sampled_addmm(pattern, left, i.x, beta=0.0),)
