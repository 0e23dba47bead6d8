"""dW from a pruned input by strips on a CPU: for each strip of `b` features the rows of dY whose blocks were kept are gathered, and multiplied by those blocks.

Of a row's features only kept blocks are multiplied, but each strip gathers its rows of dY anew, so it pays where few are kept, or blocks are wide. On one
thread of an Ice Lake host in float32, against the dense product with a dense input (3,136 tokens, 384 -> 1536 and 1536 -> 384; 4,096 tokens, 1,024 -> 1,024),
blocks of 64: 0.5 to 0.6 times as fast at 50 %, 1.4 to 2.0 at 80 %, 4 to 4.6 at 90 %. What it stands against in a backward is the input expanded and then that
product. On one thread of an EPYC host in float32, over the same shapes, it is so many times as fast as that (`pays` takes what is in bold):

| block | 40 % | 50 % | 60 % | 70 % | 80 % | 90 % |
| --- | --- | --- | --- | --- | --- | --- |
| 16 | 0.4 to 0.6 | 0.5 to 0.7 | 0.6 to 0.9 | 0.8 to 1.1 | **1.2 to 1.6** | **2.2 to 2.8** |
| 32 | 0.6 to 0.9 | 0.7 to 1.1 | 0.9 to 1.3 | **1.1 to 1.6** | **1.8 to 2.3** | **3.3 to 4.2** |
| 64 | 0.9 to 1.1 | 1.1 to 1.3 | **1.3 to 1.6** | **1.8 to 2.1** | **2.4 to 2.9** | **4.9 to 5.6** |
| 128 | **1.2 to 1.3** | **1.5 to 1.6** | **1.8 to 1.9** | **2.3 to 2.5** | **3.4 to 3.8** | **6.0 to 6.9** |
| a row | **1.6 to 1.7** | **1.9 to 2.0** | **2.3 to 2.5** | **3.0 to 3.2** | **4.2 to 4.6** | **8.3 to 8.8** |

Under a mask of W the strips are multiplied whole and masked then. Gathering a strip's kept out_features, too, costs a second gather of dY: over 3,136 tokens,
384 -> 1536, b = 64, weights at 80 % in 64x64, 128x128 and 16x16, it took 0.89, 1.01 and 1.36 times as long at 80 % of the input, 0.63, 0.45 and 0.79 at 90 %,
and 1.06 and 1.02 where the weights are at 50 % in 64x64: a gain in a corner alone.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from .. import prune

GATHER = 40  # features whose product takes as long as the gather of a row of dY
SHARE = 0.8  # of the dense product: what strips may take
SMALL = 30_000_000  # FLOP of a dense product below which the lists of the strips take longer


def pays(gy: Tensor, values: Tensor, shape: list[int], turned: bool) -> bool:
    """Whether strips are the faster way, by a kept block's features and its gather against the dense product's features; see the table above."""
    b, r, c = prune.sample_shape(tuple(shape), turned)
    block = values.shape[2]
    work = values.shape[1] * (block + GATHER)  # padding of ragged blocks is multiplied, too
    return values.device.type == "cpu" and not turned and work <= SHARE * r * c and 2 * b * r * c * gy.shape[-1] >= SMALL


def dw(gy: Tensor, values: Tensor, index: Tensor, shape: list[int]) -> Tensor:
    """As `prune.dw` of an input that is not turned."""
    _, r, c = prune.sample_shape(tuple(shape), False)
    block = values.shape[2]
    strips = -(-c // block)
    rows, slots, begins = prune.strip_rows(index, r, strips)
    packed = values.reshape(-1, block)
    grads, out = gy.reshape(-1, gy.shape[-1]), gy.new_empty(gy.shape[-1], strips * block)
    for j, (begin, end) in enumerate(pairwise(begins.tolist())):  # without a row the product is zero
        product = grads.index_select(0, rows[begin:end]).t(), packed.index_select(0, slots[begin:end])
        torch.mm(*product, out=out[:, j * block : (j + 1) * block])
    return out[:, :c].contiguous()
