"""dW from a pruned input by strips on a CPU: for each strip of `b` features the rows of dY whose blocks were kept are gathered, and multiplied by those blocks.

Of a row's features only kept blocks are multiplied, but each strip gathers its rows of dY anew, so it pays where few are kept. On one thread of an Ice Lake
host in float32, against the dense product with a dense input (3,136 tokens, 384 -> 1536 and 1536 -> 384; 4,096 tokens, 1,024 -> 1,024), blocks of 64: 0.5 to
0.6 times as fast at 50 %, 1.4 to 2.0 at 80 %, 4 to 4.6 at 90 %.

Under a mask of W the strips are multiplied whole and masked then. Gathering a strip's kept out_features, too, costs a second gather of dY: over 3,136 tokens,
384 -> 1536, b = 64, weights at 80 % in 64x64, 128x128 and 16x16, it took 0.89, 1.01 and 1.36 times as long at 80 % of the input, 0.63, 0.45 and 0.79 at 90 %,
and 1.06 and 1.02 where the weights are at 50 % in 64x64: a gain in a corner alone.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from .. import prune

NARROW = 32  # features of a block below which a strip's product is too narrow
DENSE = 0.3  # kept share above which the dense product is faster


def pays(values: Tensor, shape: list[int], turned: bool) -> bool:
    """Whether strips are the faster way."""
    _, r, c = prune.sample_shape(tuple(shape), turned)
    block = values.shape[2]
    n = prune.block_count(r, c, block)
    return values.device.type == "cpu" and not turned and NARROW <= block < c and values.shape[1] <= DENSE * n


def dw(gy: Tensor, values: Tensor, index: Tensor, shape: list[int]) -> Tensor:
    """As `prune.dw` of an input that is not turned."""
    _, r, c = prune.sample_shape(tuple(shape), False)
    block = values.shape[2]
    strips = -(-c // block)
    rows, slots, begins = prune.strip_rows(index, r, strips)
    packed = values.reshape(-1, block)
    grads, out = gy.reshape(-1, gy.shape[-1]), gy.new_empty(gy.shape[-1], strips * block)
    places = begins.tolist()
    for j, (begin, end) in enumerate(pairwise(places)):
        strip_of = out[:, j * block : (j + 1) * block]
        if end > begin:
            torch.mm(grads.index_select(0, rows[begin:end]).t(), packed.index_select(0, slots[begin:end]), out=strip_of)
        else:
            strip_of.zero_()
    return out[:, :c].contiguous()
