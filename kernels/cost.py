"""What each Triton kernel costs, in closed form: FLOP, and bytes by operand. `tests/interpreter/test_traffic.py` compares it with a recorded trace.

Four counts that must not be confused, all exact integers:

| count | what |
| --- | --- |
| useful FLOP | 2 a token and kept weight element; what the mask leaves of the mathematics |
| issued FLOP | what the tensor cores do: whole tiles, whole steps, ragged edges and masked blocks inside a union included |
| requested bytes (`reads`, `writes`) | every element that a load or store asks for with a true predicate, once a program: what programs ask of the L2 cache |
| compulsory bytes (`reads_min`, `writes_min`) | every byte that the result depends on, or that is part of it, once: the least that any schedule moves |

Only products count as FLOP. Operands are named like the kernels' parameters. Symbols below: b bytes an element of the floating operands, M tokens, T = ⌈M / BM⌉
token tiles; `across` and `along` are the features on the strip axis and on the reduction axis: out and in for the forward and dW, in and out for dX; s a strip,
S their number, c_s its entries, U features an entry, f_s = Σ over its entries of the features that exist (fewer than U at a ragged edge); a step takes STEP
features: P = STEP / U entries, or U / STEP steps take one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .grid import grid_shape, kept_elements
from .lists import STEP, STRIP, Layout, layout, pair
from .lists import strip_lists as build_lists

INDEX = 4  # bytes of an entry, a count, a rank, a key
PARTIAL = 4  # bytes of an element of the float32 workspace
BINS = 2048  # of a histogram of the selection


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


@dataclass(frozen=True)
class Cost:
    """FLOP and bytes of one launch, or of several: costs add up, operand by operand."""

    flop_useful: int = 0
    flop_issued: int = 0
    reads: dict[str, int] = field(default_factory=dict)
    writes: dict[str, int] = field(default_factory=dict)
    reads_min: dict[str, int] = field(default_factory=dict)
    writes_min: dict[str, int] = field(default_factory=dict)

    def renamed(self, names: dict[str, str]) -> Cost:
        """The same by other names of the operands; two that get one name are added up."""

        def new(moved: dict[str, int]) -> dict[str, int]:
            total: Counter[str] = Counter()
            for name, size in moved.items():
                total[names.get(name, name)] += size
            return dict(total)

        return Cost(self.flop_useful, self.flop_issued, *(new(d) for d in (self.reads, self.writes, self.reads_min, self.writes_min)))

    @property
    def bytes_req(self) -> int:
        """Requested bytes of all operands, both directions."""
        return sum(self.reads.values()) + sum(self.writes.values())

    @property
    def bytes_min(self) -> int:
        """Compulsory bytes of all operands, both directions."""
        return sum(self.reads_min.values()) + sum(self.writes_min.values())

    def __add__(self, other: Cost) -> Cost:
        def merged(a: dict[str, int], b: dict[str, int]) -> dict[str, int]:
            total = Counter(a)
            total.update(b)
            return dict(total)

        return Cost(
            self.flop_useful + other.flop_useful, self.flop_issued + other.flop_issued,
            merged(self.reads, other.reads), merged(self.writes, other.writes),
            merged(self.reads_min, other.reads_min), merged(self.writes_min, other.writes_min),
        )  # fmt: skip


# ---- what a mask's lists hold ----------------------------------------------------------------------------------------------------------------------------


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
        return sum(_cdiv(c, entries) for c in self.counts)

    def gathered(self, entries: int) -> int:
        """Σ over those steps of the features on the reduction axis that are loaded; an empty place of the last step loads unit 0."""
        empty = self.steps(entries) * entries - sum(self.counts)
        return sum(self.features) + empty * min(self.layout.unit, self.along)


def lists_of(mask: Tensor, shape: tuple[int, int], block: tuple[int, int], transposed: bool, strip: int = STRIP) -> Lists:
    """Exact numbers of a mask bool (NB, KB) of a weight `shape` (N, K). Reads the mask back: on a GPU a host sync."""
    mask = mask.detach().cpu()
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


# ---- matmuls ---------------------------------------------------------------------------------------------------------------------------------------------


def list_matmul(
    lists: Lists, tokens: int, itemsize: int, *, tile_tokens: int, step: int = STEP, bias: bool = False, predicated: bool = False, bias_m: bool = False,
    splits: int = 1,
) -> Cost:  # fmt: skip
    """The list matmul: forward, or dX over transposed lists. One program a token tile and strip, n_s = ⌈c_s / P⌉ U / STEP steps each (U > STEP), or ⌈c_s / P⌉.

    `predicated`: tokens and rows of W behind the last one are left out, as for a transposed input or by TMA, instead of repeating a real one. `bias_m`: the
    bias has an element a token. `splits`: shares of every list's steps, whose float32 sums are written apart; `sum_splits` adds them. Block dropout's forward
    and dW are this with the roles exchanged (`kernels.layer_cost.dropped`): M are then the rows of the dense operand, and W is the input.

    Useful FLOP   2 M kept
    Issued FLOP   2 T BM BN STEP Σ n_s
    Requested B   x        b T BM (Σ f_s + empty places * min(U, along)); tokens behind the last one repeat a real one, or M for T BM (predicated)
                  w        b T kept; forward, not by TMA: whole block rows, since rows behind the last one repeat a real one
                  bias     b T across; b S M for `bias_m`
                  y        b M across, written; with splits 4 splits M across
                  entries  4 T P Σ (n_s + splits), one step ahead
                  counts, order   4 T S splits each
    Compulsory B  b M (features of kept columns) + b kept + b across (bias) + 4 (Σ c_s + 2 S), and b M across written
    """
    lay, live = lists.layout, min(tokens, 1)
    tiles, per_step, parts = _cdiv(tokens, tile_tokens), max(1, step // lay.unit), max(1, lay.unit // step)
    steps = lists.steps(per_step) * parts
    reads = {
        "x": itemsize * (tokens if predicated else tiles * tile_tokens) * lists.gathered(per_step),
        "w": itemsize * tiles * (lists.kept if lists.transposed else lists.kept_rows),
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
    q = max(1, tile_features // lay.unit)
    tiles = lists.steps(q)
    programs = splits * lay.strips * _cdiv(lay.units, q)
    widths = (lay.strip if whole else max(0, min(lay.strip, lists.across - s * lay.strip)) for s in range(lay.strips))
    reads = {
        "gy": itemsize * tokens * sum(_cdiv(c, q) * width for c, width in zip(lists.counts, widths, strict=True)),
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
    issued = 2 * lay.strip * q * lay.unit * tile_tokens * _cdiv(tokens, tile_tokens) * tiles
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


# ---- element-wise and metadata ---------------------------------------------------------------------------------------------------------------------------


def mask_cast(shape: tuple[int, int], block: tuple[int, int], kept: int, itemsize: int, out_itemsize: int) -> Cost:
    """W∘M in another dtype. Requested B: w b kept, mask N K, out b' N K written. Compulsory: the mask once, NB KB."""
    (nb, kb), (n, k) = grid_shape(shape, block), shape
    reads, out = {"w": itemsize * kept, "mask": n * k}, {"out": out_itemsize * n * k}
    return Cost(reads=reads, writes=out, reads_min=reads | {"mask": nb * kb}, writes_min=dict(out))


def block_keys(shape: tuple[int, int], block: tuple[int, int], itemsize: int) -> Cost:
    """Scores. Requested and compulsory B: w b N K, key 4 NB KB written."""
    nb, kb = grid_shape(shape, block)
    reads, keys = {"w": itemsize * shape[0] * shape[1]}, {"key": INDEX * nb * kb}
    return Cost(reads=reads, writes=keys, reads_min=dict(reads), writes_min=dict(keys))


def select(blocks: int, keep_itemsize: int = 8) -> Cost:
    """Selection among `blocks` keys by one program. Requested and compulsory B: key 4 blocks, keep one scalar, mask blocks written."""
    reads, mask = {"key": INDEX * blocks, "keep": keep_itemsize * min(blocks, 1)}, {"mask": blocks}
    return Cost(reads=reads, writes=mask, reads_min=dict(reads), writes_min=dict(mask))


def histogram(blocks: int, digit: int, chunk: int, keep_itemsize: int = 8) -> Cost:
    """One histogram of the selection above 16,384 blocks, ⌈blocks / chunk⌉ programs, each adding 2,048 bins, and reading those of the digits before.

    Requested B   key 4 blocks; keep one scalar and bins 8,192 (digit + 1) a program read, 8,192 a program written
    """
    programs = _cdiv(blocks, chunk)
    reads = {"key": INDEX * blocks, "keep": keep_itemsize * programs, "bins": INDEX * BINS * programs * (digit + 1)}
    least = {"key": INDEX * blocks, "keep": keep_itemsize, "bins": INDEX * BINS * (digit + 1)}
    return Cost(reads=reads, writes={"bins": INDEX * BINS * programs}, reads_min=least, writes_min={"bins": INDEX * BINS})


def write_mask(blocks: int, chunk: int, ties_split: bool, keep_itemsize: int = 8) -> Cost:
    """The mask of that selection. Where not all blocks that tie at the threshold are kept (`ties_split`), a program also reads the keys before its own."""
    programs = _cdiv(blocks, chunk)
    before = chunk * programs * (programs - 1) // 2 if ties_split else 0
    reads = {"key": INDEX * (blocks + before), "keep": keep_itemsize * programs, "bins": 3 * INDEX * BINS * programs}
    least = {"key": INDEX * blocks, "keep": keep_itemsize, "bins": 3 * INDEX * BINS}
    return Cost(reads=reads, writes={"mask": blocks}, reads_min=least, writes_min={"mask": blocks})


def draw(blocks: int, chunk: int) -> Cost:
    """Block dropout's mask, ⌈blocks / chunk⌉ programs. Requested B: seed 8 a program, mask blocks written; compulsory: the seed once."""
    mask = {"mask": blocks}
    return Cost(reads={"seed": 8 * _cdiv(blocks, chunk)}, writes=mask, reads_min={"seed": 8 * min(blocks, 1)}, writes_min=dict(mask))


def strip_lists(grid: tuple[int, int], block: tuple[int, int], strip: int = STRIP) -> Cost:
    """Entries and counts of both directions; the same for every mask, since lists have full capacity.

    Requested B   mask: units * rows, or units * S where a block is wider than a strip, of each direction; lists 4 S (capacity + 1) written
    Compulsory B  the mask once, NB KB
    """
    both = pair(grid, block, strip)
    lists = {"lists": INDEX * sum(lay.strips * (lay.capacity + 1) for lay in both)}
    reads = {"mask": sum(lay.units * max(lay.rows, lay.strips) for lay in both)}
    return Cost(reads=reads, writes=lists, reads_min={"mask": grid[0] * grid[1]}, writes_min=dict(lists))


def order(grid: tuple[int, int], block: tuple[int, int], strip: int = STRIP) -> Cost:
    """The order of the strips of both directions, one program a strip. Requested B: counts 4 S (S + 1), order 4 S written; compulsory 4 S each."""
    strips = [lay.strips for lay in pair(grid, block, strip)]
    ranks = {"lists": INDEX * sum(strips)}
    return Cost(reads={"lists": INDEX * sum(s * (s + 1) for s in strips)}, writes=ranks, reads_min=dict(ranks), writes_min=dict(ranks))


def nm_mask(elements: int, itemsize: int, out_itemsize: int) -> Cost:
    """An N:M mask by magnitude and W∘M of it. Requested and compulsory B: w b elements; mask elements and out b' elements written."""
    reads, writes = {"w": itemsize * elements}, {"mask": elements, "out": out_itemsize * elements}
    return Cost(reads=reads, writes=writes, reads_min=dict(reads), writes_min=dict(writes))


# ---- pruned inputs ---------------------------------------------------------------------------------------------------------------------------------------


def pruned_matmul(
    entries: Sequence[int], rows: int, shape: tuple[int, int], block: int, itemsize: int, *, splits: int = 1, tile_features: int = 128, tile_tokens: int,
    lists: Lists | None = None, kept: Sequence[int] = (),
) -> Cost:  # fmt: skip
    """dW from a pruned input. E_s = `entries` kept blocks in strip s of `block` = b features of S; `rows` of the input have one. `shape` is W's (N, K).

    `lists`: of a mask of W, transposed, in strips of b; `kept`: elements of W that it keeps in each strip. A strip has t_s tiles: ⌈N / BN⌉, or, of its list of
    c_s entries of U out_features each, f_s of which exist, ⌈c_s / Q⌉ with Q = BN / U; T tiles are launched a strip.

    Useful FLOP   2 N b Σ E_s, a ragged block counted whole; with a mask 2 Σ E_s kept_s
    Issued FLOP   2 BN b BT Σ t_s ⌈E_s / BT⌉
    Requested B   gy       i N Σ E_s, i bytes an element; with a mask i Σ E_s f_s
                  values   i b Σ t_s E_s
                  rows, slots   4 Σ t_s E_s each
                  begins   8 splits T S
                  entries  4 splits U Σ c_s, counts 4 splits T S: with a mask
                  out      written: i N K, with a mask i kept; with splits, whose sums go to a float32 workspace: 4 splits instead of i
    Compulsory B  gy i N rows; values i b Σ E_s; rows, slots 4 Σ E_s each, begins 4 (S + 1); with a mask at most that much gy, the strips with entries alone,
                  and 4 Σ c_s and 4 S; out the same
    The zeros outside of a mask are `zero_fill`, the sum of the splits `sum_splits`.
    """
    (n, k), strips, total = shape, len(entries), sum(entries)
    if lists is None:
        launched = _cdiv(n, tile_features)
        tiles, features, flop, written = [launched] * strips, [n] * strips, 2 * n * block * total, n * k
    else:
        q = tile_features // lists.layout.unit
        launched = _cdiv(lists.layout.units * lists.layout.unit, tile_features)
        tiles, features, written = [_cdiv(c, q) for c in lists.counts[:strips]], list(lists.features[:strips]), lists.kept
        flop = 2 * sum(e * of_strip for e, of_strip in zip(entries, kept, strict=True))
    asked = sum(t * e for t, e in zip(tiles, entries, strict=True))
    visited = sum(e for t, e in zip(tiles, entries, strict=True) if t)
    programs = splits * launched * strips
    reads = {
        "gy": itemsize * sum(f * e for f, e in zip(features, entries, strict=True)),
        "values": itemsize * block * asked,
        "rows": INDEX * asked,
        "slots": INDEX * asked,
        "begins": 2 * INDEX * programs,
    }
    least = {
        "gy": itemsize * rows * n,
        "values": itemsize * block * visited,
        "rows": INDEX * visited,
        "slots": INDEX * visited,
        "begins": INDEX * (strips + 1),
    }
    if lists is not None:
        listed = sum(lists.counts[:strips])  # the last block of W may reach beyond the last strip
        reads |= {"entries": INDEX * splits * lists.layout.unit * listed, "counts": INDEX * programs}
        least |= {"entries": INDEX * listed, "counts": INDEX * strips}
        least["gy"] = min(least["gy"], reads["gy"])
    issued = 2 * tile_features * block * tile_tokens * sum(t * _cdiv(e, tile_tokens) for t, e in zip(tiles, entries, strict=True))
    out = {"out": (itemsize if splits == 1 else PARTIAL * splits) * written}
    return Cost(flop, issued, reads, out, least, dict(out))


def strip_rows(blocks: int, entries: int, index_itemsize: int) -> Cost:
    """The list of those entries, by plain PyTorch, as if each of its passes was one kernel: a flag for each of the input's `blocks`, their running sum, and for
    each entry a read of that and two writes. Requested B: index i E, flags 2 blocks, sums 4 (blocks + E), lists 8 E.
    """
    reads = {"index": index_itemsize * entries, "flags": blocks, "sums": INDEX * entries}
    writes = {"flags": blocks, "sums": INDEX * blocks, "lists": 2 * INDEX * entries}
    return Cost(reads=reads, writes=writes, reads_min={"index": index_itemsize * entries}, writes_min={"lists": 2 * INDEX * entries})
