"""Activation pruning in plain PyTorch: which blocks of an input are kept for the backward, their packed form, and dW or da from it (Barley and Fröning 2023).

An input is seen as `samples` (B, R, C): each sample is cut into blocks of one row and `b` features, the last one ragged where `b` does not divide C, n = R *
ceil(C / b) of them; by the l2 norm the round(n * ratio) lowest are dropped, in every sample as many. What is kept is `values` (B, nnz, b), padded with zeros,
and `index` (B, nnz), the kept blocks' flat numbers in a sample, ascending.

| input | its samples |
| --- | --- |
| (..., R, C) | leading axes are samples, or, beyond three axes, the first one: (B, rest, C) |
| (M, C) | M samples of one row each |
| (C) | one sample of one row |
| (B, C, T) with channels inner (token mixing's transposed view) | the view (B, T, C) behind it: blocks lie along the axis of stride 1, see `is_turned` |
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from .errors import ConfigError
from .grid import RATIO_UNIT, plain_int, ratio_units
from .reference import rows


def dropped_count(n_blocks: int, ratio: float) -> int:
    """round(n * ratio), halves to even, exact: the blocks of a sample that are dropped, never all."""
    exact = n_blocks * ratio_units(ratio)  # in units; integers alone, so that a compiler can trace a number of blocks that it does not know
    rounded = (2 * exact + RATIO_UNIT - 1 + exact // RATIO_UNIT % 2) // (2 * RATIO_UNIT)
    if isinstance(n_blocks, int):  # Dynamo takes here what it calls an int, and knows min and max; PyTorch 2.11's refuses sym_min of constants
        return max(0, min(n_blocks - 1, rounded))
    return torch.sym_max(0, torch.sym_min(n_blocks - 1, rounded))


def check_width(block: object) -> int:
    """The features of a block; ConfigError unless it is a positive int."""
    width = plain_int(block)
    if width is not None and 0 < width < 2**31:
        return width
    raise ConfigError(f"block of pruned activations, in features: expected a positive int, got {block!r}.")


def is_turned(x: Tensor, block: int) -> bool:
    """Whether blocks lie along the second last axis: it is the inner one in memory, as in the transposed view of token mixing.

    Not where it is no multiple of the block and the last axis is one: residual streams behind a convolution have their tokens inside.
    """
    inner = x.dim() >= 3 and x.stride(-1) != 1 and x.stride(-2) == 1 and x.shape[-1] > 1 and x.shape[-2] > 1
    return inner and not (x.shape[-2] % block and x.shape[-1] % block == 0)


def samples(x: Tensor, turned: bool) -> Tensor:
    """(B, R, C) of an input; a view where its memory allows."""
    return (x.transpose(-1, -2) if turned else x).reshape(sample_shape(x.shape, turned))


def sample_shape(shape: tuple[int, ...] | torch.Size, turned: bool) -> tuple[int, int, int]:
    """The shape that `samples` gives."""
    s = tuple(shape)
    if turned:
        s = (*s[:-2], s[-1], s[-2])
    if len(s) <= 2:
        return (s[0] if len(s) == 2 else 1), 1, s[-1]
    return s[0], prod(s[1:-1]), s[-1]


def block_count(rows: int, features: int, block: int) -> int:
    """Blocks of a sample."""
    return rows * -(-features // block)


def kept_of_input(values: Sequence[int], shape: Sequence[int], turned: bool) -> int:
    """Elements of the input among kept blocks `values` (B, nnz, b), at most: of those at a ragged edge, whose norms are lower, as few as there can be."""
    (n, kept, block), (_, rows, features) = values, sample_shape(tuple(shape), turned)
    whole = rows * (features // block)
    return n * (min(kept, whole) * block + max(0, kept - whole) * (features % block))


def index_dtype(n_blocks: int) -> torch.dtype:
    """As small as the blocks' numbers go."""
    return torch.int16 if n_blocks <= 2**15 else torch.int32


def _blocks(a: Tensor, block: int) -> Tensor:
    """(B, R, C) -> (B, n, b)."""
    b, r, c = a.shape
    if c % block:
        a = F.pad(a, (0, -c % block))
    return a.reshape(b, block_count(r, c, block), block)


def compress(x: Tensor, block: int, kept: int, turned: bool, noise: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(values, index) of the `kept` blocks of each sample with the largest l2 norms; ties to the lowest number, NaN above everything.

    x: floating, see the table above. noise: (B, n), factors of the norms, so that blocks near the threshold are drawn by lot. Norms
    are summed in float32 (float64 of float64). Cost: a read of x, a sort of n numbers a sample, a write of what is kept.

    No kernel of ours: the norms read x once and write 4 bytes a block, the gather reads and writes what is kept, 1 + 2 (1 - ratio) times x in all, and no
    kernel moves less, as a sample's last norm may decide about its first block. What one could save is in the sorts: 24 bytes a block for each pass over its
    key and number, against the 2 b that a block has in 16 bits. That would be a selection, one problem a sample, and is not built.
    """
    blocks = _blocks(samples(x, turned), block)
    n = blocks.shape[1]
    if kept == n:
        index = torch.arange(n, device=x.device).expand(blocks.shape[0], n)
        return blocks.clone(memory_format=torch.contiguous_format), index.to(index_dtype(n)).contiguous()
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    score = torch.linalg.vector_norm(blocks, dim=2, dtype=wide)
    score = score if noise is None else score * noise
    best = score.sort(dim=1, descending=True, stable=True).indices[:, :kept].sort(dim=1).values
    return _gathered(blocks, best), best.to(index_dtype(n))


def values_of(x: Tensor, index: Tensor, block: int, turned: bool) -> Tensor:
    """The values that `compress` gave with this index, of the same x."""
    return _gathered(_blocks(samples(x, turned), block), index.long())


def _gathered(blocks: Tensor, best: Tensor) -> Tensor:
    return blocks.gather(1, best[:, :, None].expand(-1, -1, blocks.shape[2]))


def expand(values: Tensor, index: Tensor, shape: tuple[int, ...] | torch.Size, turned: bool) -> Tensor:
    """The pruned input again, dense, zeros where blocks were dropped, in the shape of the input (a transposed view where it was one)."""
    b, r, c = sample_shape(shape, turned)
    block = values.shape[2]
    wide = -(-c // block) * block
    flat = values.new_zeros(b, r * (wide // block), block)
    flat.scatter_(1, index.long()[:, :, None].expand(-1, -1, block), values)
    a = flat.view(b, r, wide)[:, :, :c]
    plain = (*shape[:-2], shape[-1], shape[-2]) if turned else tuple(shape)
    return a.reshape(plain).transpose(-1, -2) if turned else a.reshape(plain)


def strip_rows(index: Tensor, rows: int, strips: int) -> tuple[Tensor, Tensor, Tensor]:
    """For each strip of a block's features which rows of the input hold a kept block of it, ascending, and where that lies among the values.

    index (B, kept): of samples of `rows` rows, none twice in one. Returns row (E) and slot (E), E = B * kept, strip after strip, those of strip s from
    begins[s] on, and begins (strips + 1); all int32. No host sync, fixed shapes, no sort. Cost: `kernels.pruned_cost.strip_rows`.
    """
    samples, kept = index.shape
    flat = index.long()
    row = (flat // strips + torch.arange(samples, device=index.device)[:, None] * rows).reshape(-1)
    at = (flat % strips).reshape(-1) * (samples * rows) + row
    place = torch.zeros(strips * samples * rows, dtype=torch.bool, device=index.device).index_fill_(0, at, True).cumsum(0, dtype=torch.int32)
    order = place[at].long() - 1
    found = torch.empty(2, samples * kept, dtype=torch.int32, device=index.device)
    found[0].scatter_(0, order, row.int())
    found[1].scatter_(0, order, torch.arange(samples * kept, dtype=torch.int32, device=index.device))
    begins = torch.zeros(strips + 1, dtype=torch.int32, device=index.device)
    begins[1:] = place.view(strips, samples * rows)[:, -1] if place.numel() else 0
    return found[0], found[1], begins


def dw(gy: Tensor, values: Tensor, index: Tensor, shape: tuple[int, ...] | torch.Size, turned: bool) -> Tensor:
    """dW = dY^T X_s, (N, K), with X_s the pruned input of `shape` (..., K), gy (..., N)."""
    x = expand(values, index, shape, turned)
    return rows(gy).t() @ rows(x)


def scaled(x: Tensor, a: Tensor, b: Tensor | None) -> Tensor:
    """a x + b, or a x: the product whose da is `da`."""
    return x * a if b is None else torch.addcmul(b, a, x)


def da(gy: Tensor, values: Tensor, index: Tensor, shape: tuple[int, ...] | torch.Size, turned: bool, like: tuple[int, ...] | torch.Size) -> Tensor:
    """da of y = a x + b, in the shape `like` that a has: dY X_s, with X_s the pruned input of `shape`, summed over the axes along which a is repeated."""
    x = expand(values, index, shape, turned)
    product = x.mul_(gy) if x.dtype == gy.dtype else x * gy  # x is ours alone: no third tensor of its size
    return product.sum_to_size(like)
