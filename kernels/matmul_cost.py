"""What the Triton matmuls over a mask's lists cost; the counts and symbols are those of `cost`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .cost import INDEX, PARTIAL, Cost, cdiv
from .grid import grid_shape, kept_elements
from .lists import STEP, Layout, layout
from .lists import strip_lists as build_lists


@dataclass(frozen=True)
class Lists:
    """The numbers of one direction's lists that the costs depend on. `lists_of` reads them from a mask; a planner may estimate them."""

    layout: Layout
    transposed: bool  # dX
    across: int  # features on the strip axis
    along: int  # features on the reduction axis
    counts: tuple[int, ...]  # c_s
    features: tuple[int, ...]  # f_s
    kept: int  # weight elements in kept blocks
    kept_rows: int  # the same with whole blocks on the strip axis, as if the last block row were not ragged
    used_across: int  # features on the strip axis whose blocks are not all masked
    used_along: int  # and on the reduction axis

    def steps(self, entries: int) -> int:
        """Σ_s ⌈c_s / entries⌉: steps, or tiles, that take `entries` of a list at a time."""
        return sum(cdiv(c, entries) for c in self.counts)

    def gathered(self, entries: int) -> int:
        """Σ over those steps of the features on the reduction axis that are loaded; an empty place of the last step loads unit 0."""
        empty = self.steps(entries) * entries - sum(self.counts)
        return sum(self.features) + empty * min(self.layout.unit, self.along)


def lists_of(mask: Tensor, shape: tuple[int, int], block: tuple[int, int], transposed: bool, strip: int | None = None) -> Lists:
    """Exact numbers of a mask bool (NB, KB) of a weight `shape` (N, K). Reads the mask back: on a GPU a host sync."""
    mask = mask.cpu()
    lay = layout(grid_shape(shape, block), block, transposed, strip)
    entries, counts, _ = build_lists(mask, lay, transposed)
    m = mask.t() if transposed else mask
    across, along = shape[::-1] if transposed else shape
    filled = torch.arange(lay.capacity, device=mask.device) < counts[:, None]
    features = ((along - (entries & 0xFFFF) * lay.unit).clamp(0, lay.unit) * filled).sum(1)
    return Lists(
        lay, transposed, across, along, tuple(counts.tolist()), tuple(features.tolist()),
        kept=int(kept_elements(mask, shape, block)),
        kept_rows=int(kept_elements(m, (lay.rows * lay.row_block, along), (lay.row_block, lay.col_block))),
        used_across=int(kept_elements(m.any(1)[:, None], (across, 1), (lay.row_block, 1))),
        used_along=int(kept_elements(m.any(0)[None, :], (1, along), (1, lay.col_block))),
    )  # fmt: skip


def list_matmul(
    lists: Lists, tokens: int, itemsize: int, *, tile_tokens: int, step: int = STEP, bias: bool = False, predicated: bool = False, tma: bool = False,
    bias_m: bool = False, splits: int = 1,
) -> Cost:  # fmt: skip
    """The list matmul: forward, or dX over transposed lists. One program a token tile and strip, n_s = ⌈c_s / P⌉ U / STEP steps each (U > STEP), or ⌈c_s / P⌉.

    `predicated`: tokens behind the last one are left out, as for a transposed input, instead of repeating a real one; by `tma` rows of W, too. `bias_m`: the
    bias has an element a token. `splits`: shares of every list's steps, whose float32 sums are written apart; `sum_splits` adds them. Block dropout's forward
    and dW are this with the roles exchanged (`kernels.layer_cost.dropped`): M are then the rows of the dense operand, and W is the input.

    Useful FLOP   2 M kept
    Issued FLOP   2 T BM BN STEP Σ n_s
    Requested B   x        b T BM (Σ f_s + empty places * min(U, along)); tokens behind the last one repeat a real one, or M for T BM (predicated, TMA)
                  w        b T kept; forward, not by TMA: whole block rows, since rows behind the last one repeat a real one
                  bias     b T across; b S M for `bias_m`
                  y        b M across, written; with splits 4 splits M across
                  entries  4 T P Σ (n_s + splits), one step ahead
                  counts, order   4 T S splits each
    Compulsory B  b M (features of kept columns) + b kept + b across (bias) + 4 (Σ c_s + 2 S), and b M across written
    """
    lay, live = lists.layout, min(tokens, 1)
    tiles, per_step, parts = cdiv(tokens, tile_tokens), max(1, step // lay.unit), max(1, lay.unit // step)
    steps = lists.steps(per_step) * parts
    reads = {
        "x": itemsize * (tokens if predicated or tma else tiles * tile_tokens) * lists.gathered(per_step),
        "w": itemsize * tiles * (lists.kept if lists.transposed or tma else lists.kept_rows),
        "entries": INDEX * tiles * per_step * (steps + splits * lay.strips),
        "counts": INDEX * tiles * splits * lay.strips,
        "order": INDEX * tiles * splits * lay.strips,
    }
    least = {
        "x": itemsize * tokens * lists.used_along,
        "w": itemsize * live * lists.kept,
        "entries": INDEX * live * sum(lists.counts),
        "counts": INDEX * live * lay.strips,
        "order": INDEX * live * lay.strips,
    }
    if bias:
        reads["bias"] = itemsize * (lay.strips * tokens if bias_m else tiles * lists.across)
        least["bias"] = itemsize * (min(lay.strips, 1) * tokens if bias_m else live * lists.across)
    y = {"y": (itemsize if splits == 1 else PARTIAL * splits) * tokens * lists.across}
    issued = 2 * tiles * tile_tokens * lay.strip * step * steps
    return Cost(2 * tokens * lists.kept, issued, reads, y, least, dict(y))


def sampled_matmul(
    lists: Lists, tokens: int, itemsize: int, *, splits: int = 1, tile_tokens: int, tile_features: int = 128, accumulate: bool = False, whole: bool = False
) -> Cost:
    """dW of the kept blocks, over the forward's lists. A program: one strip, Q = tile_features / U entries, one split; n_s = ⌈c_s / Q⌉ programs have work.

    `whole`: strips of gy are read whole, behind the last row that one again, as block dropout's dX does it.

    Useful FLOP   2 M kept
    Issued FLOP   2 BN Q U BT ⌈M / BT⌉ Σ n_s, with BT = tile_tokens
    Requested B   gy       b M Σ n_s (features of strip s; BN where whole)
                  x        b M (Σ f_s + empty places * min(U, along))
                  out      written: b kept; with splits, whose sums go to a float32 workspace: 4 splits kept. Read too, b kept, where accumulated without splits
                  entries  4 splits U Σ c_s: each feature asks for its entry
                  counts, order   4 splits S ⌈units / Q⌉ each
    Compulsory B  b M (features of kept rows) + b M (features of kept columns) + 4 (Σ c_s + 2 S), and the same for out
    The zeros outside kept blocks are `zero_fill`; the sum of the splits is `sum_splits`.
    """
    lay = lists.layout
    q = tile_features // lay.unit
    tiles = lists.steps(q)
    programs = splits * lay.strips * cdiv(lay.units, q)
    widths = (lay.strip if whole else max(0, min(lay.strip, lists.across - s * lay.strip)) for s in range(lay.strips))
    reads = {
        "gy": itemsize * tokens * sum(cdiv(c, q) * width for c, width in zip(lists.counts, widths, strict=True)),
        "x": itemsize * tokens * lists.gathered(q),
        "entries": INDEX * splits * lay.unit * sum(lists.counts),
        "counts": INDEX * programs,
        "order": INDEX * programs,
    }
    least = {
        "gy": itemsize * tokens * lists.used_across,
        "x": itemsize * tokens * lists.used_along,
        "entries": INDEX * sum(lists.counts),
        "counts": INDEX * lay.strips,
        "order": INDEX * lay.strips,
    }
    if accumulate and splits == 1:
        reads["out"] = least["out"] = itemsize * lists.kept
    out = {"out": (itemsize if splits == 1 else PARTIAL * splits) * lists.kept}
    issued = 2 * lay.strip * q * lay.unit * tile_tokens * cdiv(tokens, tile_tokens) * tiles
    return Cost(2 * tokens * lists.kept, issued, reads, out, least, dict(out))


def sum_splits(
    shape: tuple[int, int], block: tuple[int, int], kept: int, itemsize: int, *, splits: int, accumulate: bool = False, masked: bool = True
) -> Cost:
    """The sum of dW's splits, for the kept elements; for all of them where it is not `masked`.

    Requested B   parts 4 splits kept; mask N K, one byte an element, where masked; out b kept written, and read where accumulated
    Compulsory B  the same with the mask once, NB KB
    """
    (nb, kb), (n, k) = grid_shape(shape, block), shape
    reads = {"parts": PARTIAL * splits * kept} | ({"mask": n * k} if masked else {})
    if accumulate:
        reads["out"] = itemsize * kept
    out = {"out": itemsize * kept}
    return Cost(reads=reads, writes=out, reads_min=reads | ({"mask": nb * kb} if masked else {}), writes_min=dict(out))


def zero_fill(shape: tuple[int, int], itemsize: int) -> Cost:
    """The zeros under a new dense dW, which torch writes: b N K."""
    out = {"out": itemsize * shape[0] * shape[1]}
    return Cost(writes=out, writes_min=dict(out))
