"""Freeze of large weights on a CPU: what masked blocks hold is gathered before an optimiser's step and scattered back after it.

`passes.stepping.optimiser` copies whole tensors, of small weights, which are copied faster than gathered. Guarded steps of 1,024 x 1,024 take 0.5 to 0.9 of the
time that they take with copies (`examples/benchmarks/masked_step.py`), and memory for the masked part alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor, nn

from ...kernels.grid import matrix_shape
from ..state import site as state
from .kept_blocks import KeptBlocks

if TYPE_CHECKING:
    from .guarded_weight import Guarded

LARGE = 1 << 18  # elements of a weight
HELD = 8  # elements of a run from which on its place is remembered between steps: 8 bytes, at most a quarter of a float32 weight's kept elements


def fits(g: Guarded, momenta: Mapping[str, Tensor]) -> bool:
    """Whether a weight and its momenta are gathered: large plain tensors of the host, in blocks not too narrow, by a mask that nobody rewrites in place."""
    w = g.weight
    if w.numel() < LARGE or g.site._fxmask_in_place or min(g.block[1], matrix_shape(w.shape)[1]) < HELD:
        return False
    plain = type(w) is nn.Parameter and all(type(t) is Tensor for t in momenta.values())  # no shard
    return plain and all(t.device.type == "cpu" for t in (w, *momenta.values()))


@dataclass
class Gathered:
    """The masked elements of a weight, and where its masked blocks lie."""

    blocks: KeptBlocks
    weight: Tensor

    def put_back(self, g: Guarded, momenta: Mapping[str, Tensor]) -> None:
        """Into the weight, and what was gathered of its momenta into them."""
        self.blocks.scatter(g.into, self.weight)
        for k, was in g.momenta.items():
            if (t := momenta.get(k)) is not None:
                self.blocks.scatter(t, was.to(t))


def gather(g: Guarded, momenta: Mapping[str, Tensor]) -> None:
    """Keep the masked elements of a weight and of its momenta."""
    assert g.mask is not None
    blocks = blocks_of(g, g.mask, None, masked=True)
    g.gathered = Gathered(blocks, blocks.gather(g.weight.detach()))
    g.momenta = {k: blocks.gather(t.detach()) for k, t in momenta.items()}


def blocks_of(g: Guarded, mask: Tensor, count: int | None, masked: bool = False) -> KeptBlocks:
    """Where a weight's kept blocks lie, or its `masked` ones, `count` of them where the host knows.

    Of a cached mask found once, as long as it stays the same, where that takes little memory beside the weight.
    """
    of = state.version(mask), tuple(g.weight.shape), g.block, count, masked
    if g.found is not None and g.found[0] is mask and g.found[1] == of and not g.site._fxmask_in_place:
        return g.found[2]
    blocks = KeptBlocks(~mask if masked else mask, tuple(g.weight.shape), g.block, count)
    stays = mask is g.site._fxmask_mask and not g.site._fxmask_in_place  # what kernels rewrite in place has no other version after it
    g.found = (mask, of, blocks) if stays and all(p.width >= HELD for p in blocks.parts) else None
    return blocks
