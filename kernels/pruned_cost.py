"""What the Triton kernels for pruned inputs cost; the counts and symbols are those of `cost`."""

from __future__ import annotations

from collections.abc import Sequence

from .cost import INDEX, PARTIAL, Cost, cdiv
from .dense_cost import stream
from .matmul_cost import Lists
from .triton.tiles import TILE_FEATURES


def pruned_matmul(
    entries: Sequence[int], rows: int, shape: tuple[int, int], block: int, itemsize: int, *, splits: int = 1, tile_tokens: int,
    lists: Lists | None = None, kept: Sequence[int] = (),
) -> Cost:  # fmt: skip
    """dW from a pruned input. E_s = `entries` kept blocks in strip s of `block` = b features of S; `rows` of the input have one. `shape` is W's (N, K).

    `lists`: of a mask of W, transposed, in strips of b; `kept`: elements of W that it keeps in each strip. A strip has t_s tiles: ⌈N / BN⌉, or, of its list of
    c_s entries of U out_features each, f_s of which exist, ⌈c_s / Q⌉ with Q = BN / U; T tiles are launched a strip.

    Useful FLOP   2 N Σ E_s b_s, b_s features of strip s that exist; with a mask 2 Σ E_s kept_s
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
    (n, k), strips = shape, len(entries)
    launched = cdiv(n, TILE_FEATURES)
    if lists is None:
        flop = 2 * n * sum(e * min(block, k - s * block) for s, e in enumerate(entries))
        tiles, features, written = [launched] * strips, [n] * strips, n * k
    else:
        q = TILE_FEATURES // lists.layout.unit
        tiles, features, written = [cdiv(c, q) for c in lists.counts[:strips]], list(lists.features[:strips]), lists.kept
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
    issued = 2 * TILE_FEATURES * block * tile_tokens * sum(t * cdiv(e, tile_tokens) for t, e in zip(tiles, entries, strict=True))
    out = {"out": (itemsize if splits == 1 else PARTIAL * splits) * written}
    return Cost(flop, issued, reads, out, least, dict(out))


def compress(x: int, saved: int) -> Cost:
    """Writing what of an input of `x` bytes is kept: `saved` bytes, values and index.

    Compulsory and requested B: x read, saved written. No products, so no FLOP.
    """
    return stream({"x": x}, {"saved": saved})


def plain_dw(shape: tuple[int, int], values: int, kept: int, itemsize: int, wanted: int, *, gy: int, saved: int) -> Cost:
    """dW (N, K) without the kernel, from `values` kept elements of the input, `kept` without the zeros that fill ragged blocks; gy, saved: bytes of dY, of
    values and index; `wanted`: elements of dW.

    Useful FLOP   2 N kept; with a mask its share of that: wanted / (N K)
    Issued FLOP   2 N values
    Compulsory and requested B: dY, values and index read, i N K written, i bytes an element
    """
    n, k = shape
    return stream({"dy": gy, "saved": saved}, {"dw": n * k * itemsize}).with_flop(2 * n * kept * wanted // max(1, n * k), 2 * n * values)


def strip_rows(blocks: int, entries: int, index_itemsize: int) -> Cost:
    """The list of those entries, by plain PyTorch, as if each of its passes was one kernel: a flag for each of the input's `blocks`, their running sum, and for
    each entry a read of that and two writes. Requested B: index i E, flags 2 blocks, sums 4 (blocks + E), lists 8 E.
    """
    reads = {"index": index_itemsize * entries, "flags": blocks, "sums": INDEX * entries}
    writes = {"flags": blocks, "sums": INDEX * blocks, "lists": 2 * INDEX * entries}
    return Cost(reads=reads, writes=writes, reads_min={"index": index_itemsize * entries}, writes_min={"lists": 2 * INDEX * entries})
