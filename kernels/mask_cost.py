"""What the Triton kernels cost that make masks, their lists and masked copies; the counts and symbols are those of `cost`."""

from __future__ import annotations

from .cost import BINS, INDEX, Cost, cdiv
from .dense_cost import stream
from .grid import grid_shape
from .lists import pair

KEEP = 8  # bytes of the number of kept blocks, int64


def mask_cast(shape: tuple[int, int], block: tuple[int, int], kept: int, itemsize: int, out_itemsize: int) -> Cost:
    """W∘M in another dtype. Requested B: w b kept, mask N K, out b' N K written. Compulsory: the mask once, NB KB."""
    (nb, kb), (n, k) = grid_shape(shape, block), shape
    reads, out = {"w": itemsize * kept, "mask": n * k}, {"out": out_itemsize * n * k}
    return Cost(reads=reads, writes=out, reads_min=reads | {"mask": nb * kb}, writes_min=dict(out))


def zero_masked(shape: tuple[int, int], block: tuple[int, int], kept: int, itemsize: int) -> Cost:
    """A matrix's masked elements set to zero in place. Requested B: mask N K read, out b (N K - kept) written. Compulsory: the mask once, NB KB."""
    (nb, kb), (n, k) = grid_shape(shape, block), shape
    out = {"out": itemsize * (n * k - kept)}
    return Cost(reads={"mask": n * k}, writes=out, reads_min={"mask": nb * kb}, writes_min=dict(out))


def set_aside(shape: tuple[int, int], block: tuple[int, int], kept: int, itemsize: int) -> Cost:
    """A matrix's masked elements set aside, or put back. Requested B: mask N K, b (N K - kept) read and written. Compulsory: the mask once, NB KB."""
    (nb, kb), (n, k) = grid_shape(shape, block), shape
    moved = itemsize * (n * k - kept)
    return Cost(reads={"mask": n * k, "t": moved}, writes={"aside": moved}, reads_min={"mask": nb * kb, "t": moved}, writes_min={"aside": moved})


def block_keys(shape: tuple[int, int], block: tuple[int, int], itemsize: int) -> Cost:
    """Scores. Requested and compulsory B: w b N K, key 4 NB KB written."""
    nb, kb = grid_shape(shape, block)
    return stream({"w": itemsize * shape[0] * shape[1]}, {"key": INDEX * nb * kb})


def saliency(shape: tuple[int, int], block: tuple[int, int], itemsize: int, grad_itemsize: int, reads_w: bool = True) -> Cost:
    """Scores off a gradient. Requested and compulsory B: grad b N K; w b N K, but for `gradient`, which does not read it; out 4 NB KB written."""
    (nb, kb), (n, k) = grid_shape(shape, block), shape
    return stream({"grad": grad_itemsize * n * k, "w": itemsize * n * k * reads_w}, {"out": INDEX * nb * kb})


def take_in(blocks: int, averages: bool = True) -> Cost:
    """Scores into an average, two passes. Requested B: new and score 8 blocks each, score 4 blocks written; compulsory: each read once. Without an average
    scores are overwritten, and not read.
    """
    reads = {"new": 2 * INDEX * blocks, "score": 2 * INDEX * blocks * averages}
    least = {"new": INDEX * blocks, "score": INDEX * blocks * averages}
    return Cost(reads=reads, writes={"score": INDEX * blocks}, reads_min=least, writes_min={"score": INDEX * blocks})


def select(blocks: int, scored: int = 0) -> Cost:
    """Selection among `blocks` keys by one program. Requested and compulsory B: key 4 blocks, keep one scalar, mask blocks written. `scored`: by scores first,
    4 blocks, and then by the keys of the ties alone, of so many blocks.
    """
    reads = {"key": INDEX * (scored or blocks), "keep": KEEP * min(blocks, 1)} | ({"score": INDEX * blocks} if scored else {})
    return stream(reads, {"mask": blocks})


def histogram(blocks: int, digit: int, chunk: int) -> Cost:
    """One histogram of the selection above 16,384 blocks, ⌈blocks / chunk⌉ programs, each adding 2,048 bins, and reading those of the digits before.

    Requested B   key 4 blocks; keep one scalar and bins 8,192 (digit + 1) a program read, 8,192 a program written
    """
    programs = cdiv(blocks, chunk)
    reads = {"key": INDEX * blocks, "keep": KEEP * programs, "bins": INDEX * BINS * programs * (digit + 1)}
    least = {"key": INDEX * blocks, "keep": KEEP, "bins": INDEX * BINS * (digit + 1)}
    return Cost(reads=reads, writes={"bins": INDEX * BINS * programs}, reads_min=least, writes_min={"bins": INDEX * BINS})


def write_mask(blocks: int, chunk: int, ties_split: bool) -> Cost:
    """The mask of that selection. Where not all blocks that tie at the threshold are kept (`ties_split`), a program also reads the keys before its own."""
    programs = cdiv(blocks, chunk)
    before = chunk * programs * (programs - 1) // 2 if ties_split else 0
    reads = {"key": INDEX * (blocks + before), "keep": KEEP * programs, "bins": 3 * INDEX * BINS * programs}
    least = {"key": INDEX * blocks, "keep": KEEP, "bins": 3 * INDEX * BINS}
    return Cost(reads=reads, writes={"mask": blocks}, reads_min=least, writes_min={"mask": blocks})


def draw(blocks: int, chunk: int) -> Cost:
    """Block dropout's mask, ⌈blocks / chunk⌉ programs. Requested B: seed 8 a program, mask blocks written; compulsory: the seed once."""
    mask = {"mask": blocks}
    return Cost(reads={"seed": 8 * cdiv(blocks, chunk)}, writes=mask, reads_min={"seed": 8 * min(blocks, 1)}, writes_min=dict(mask))


def strip_lists(grid: tuple[int, int], block: tuple[int, int], strip: int | None = None) -> Cost:
    """Entries and counts of both directions; the same for every mask, since lists have full capacity.

    Requested B   mask: units * rows, or units * S where a block is wider than a strip, of each direction; lists 4 S (capacity + 1) written
    Compulsory B  the mask once, NB KB
    """
    both = pair(grid, block, strip)
    lists = {"lists": INDEX * sum(lay.strips * (lay.capacity + 1) for lay in both)}
    reads = {"mask": sum(lay.units * max(lay.rows, lay.strips) for lay in both)}
    return Cost(reads=reads, writes=lists, reads_min={"mask": grid[0] * grid[1]}, writes_min=dict(lists))


def order(grid: tuple[int, int], block: tuple[int, int], strip: int | None = None) -> Cost:
    """The order of the strips of both directions, one program a strip. Requested B: counts 4 S (S + 1), order 4 S written; compulsory 4 S each."""
    strips = [lay.strips for lay in pair(grid, block, strip)]
    ranks = {"lists": INDEX * sum(strips)}
    return Cost(reads={"lists": INDEX * sum(s * (s + 1) for s in strips)}, writes=ranks, reads_min=dict(ranks), writes_min=dict(ranks))


def nm_mask(elements: int, itemsize: int, out_itemsize: int) -> Cost:
    """An N:M mask by magnitude and W∘M of it. Requested and compulsory B: w b elements; mask elements and out b' elements written."""
    return stream({"w": itemsize * elements}, {"mask": elements, "out": out_itemsize * elements})
