"""What a masked layer costs by an implementation: the closed forms of the other `_cost` files, put together as the launchers do.

One place for the analysis' tables, the benchmark's columns and the FLOP formulas that PyTorch's counter asks.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TypeVar

import torch
from torch import Tensor

from . import dense_cost, mask_cost, matmul_cost, pruned_cost
from .cost import Cost
from .grid import expand_mask, grid_shape, kept_elements
from .lists import listed, skips
from .triton.tiles import CHUNK, SELECT_MAX, TILE_FEATURES, Tile, best_dw_tile, best_tile, splits_of, strip_for, tile_for

Number = TypeVar("Number", int, float)


def useful_flop(tokens: int, kept: Number) -> Number:
    """2 FLOP a token and kept weight element, for forward, dX and dW alike. An expected number of elements, as the CPU's cost model has it, is a float."""
    return 2 * tokens * kept


def lists_of(mask: Tensor, shape: tuple[int, int], block: tuple[int, int], transposed: bool, strip: int) -> matmul_cost.Lists:
    """`kernels.matmul_cost.lists_of`, remembered for the masks that were asked for last; not of inference tensors, which do not say when they change."""
    if mask.is_inference():
        return matmul_cost.lists_of(mask, shape, block, transposed, strip)
    return _lists_of(_Same(mask), shape, block, transposed, strip)


class _Same:
    """A tensor as a key: by identity, and held so that its id stays its own."""

    def __init__(self, t: Tensor) -> None:
        self.t, self.version = t, t._version

    def __hash__(self) -> int:
        return hash((id(self.t), self.version))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.t is self.t and other.version == self.version


@lru_cache(maxsize=256)
def _lists_of(mask: _Same, shape: tuple[int, int], block: tuple[int, int], transposed: bool, strip: int) -> matmul_cost.Lists:
    return matmul_cost.lists_of(mask.t, shape, block, transposed, strip)


def by_lists(
    op: str, tokens: int, shape: tuple[int, int], mask: Tensor, block: tuple[int, int], dtype: torch.dtype, *, bias: bool = False, tf32: bool = False,
    tile: Tile | None = None, splits: int = 0, features: int = TILE_FEATURES, inner: bool = False, whole: bool = False,
) -> Cost:  # fmt: skip
    """One op of `impl="triton"` for blocks of `kernels.lists.LISTED`, with the tile and splits that a Hopper GPU gets unless given. `shape` is W's (N, K).

    features: of a given tile of dW. inner: the input's tokens lie side by side (`kernels.strides`). whole: see `kernels.matmul_cost.sampled_matmul`.
    """
    item = dtype.itemsize
    if tile is None and op == "dw":
        tile, features = best_dw_tile(dtype, block, shape[1], tf32=tf32, inner=inner or whole)
    elif tile is None:
        across, along = shape[::-1] if op == "dx" else shape
        described = all(n * item % 16 == 0 for n in (along, shape[1]))
        tile = best_tile(dtype, block, op == "dx", (tokens, across, along), tf32=tf32, inner=inner, tma=described)
    assert tile is not None
    found = lists_of(mask, shape, block, op == "dx", tile.strip)
    if op != "dw":
        return matmul_cost.list_matmul(found, tokens, item, tile_tokens=tile.tokens, step=tile.step, bias=bias, predicated=inner, tma=tile.tma)
    lay = found.layout
    splits = splits or splits_of(tokens, lay.strips * -(-lay.units // (features // lay.unit)))
    total = matmul_cost.sampled_matmul(found, tokens, item, splits=splits, tile_tokens=tile.step, tile_features=features, whole=whole)
    total += matmul_cost.zero_fill(shape, item)
    return total if splits == 1 else total + matmul_cost.sum_splits(shape, block, found.kept, item, splits=splits)


def dropped(
    op: str, tokens: int, shape: tuple[int, int], keep: Tensor, block: tuple[int, int], dtype: torch.dtype, *, bias: bool = False, splits: int = 0
) -> Cost:
    """One op of block dropout by the kernels, over a mask `keep` of the input (tokens, K); see `kernels.triton.dropped`. Lists are given.

    Operands are x, w, bias, y of the forward; dy, w, dx; dy, x, dw; and `parts`, the float32 sums of splits.
    """
    (n, k), m, item = shape, tokens, dtype.itemsize
    tile = tile_for(dtype, strip_for(block, op == "dw"))
    found = lists_of(keep, (m, k), block, op == "dw", tile.strip)
    lay = found.layout
    if op == "forward":
        made = matmul_cost.list_matmul(found, n, item, tile_tokens=tile.tokens, step=tile.step, bias=bias, bias_m=True)
        return made.renamed({"x": "w", "w": "x"})
    if op == "dx":
        return by_lists("dw", n, (m, k), keep, block, dtype, splits=splits, whole=True).renamed({"gy": "dy", "x": "w", "out": "dx"})
    splits = splits or splits_of(m, -(-n // tile.tokens) * lay.strips)
    made = matmul_cost.list_matmul(found, n, item, tile_tokens=tile.tokens, step=tile.step, predicated=True, splits=splits)
    made = made.renamed({"x": "dy", "w": "x", "y": "dw" if splits == 1 else "parts"})
    return made if splits == 1 else made + matmul_cost.sum_splits((n, k), (1, 1), n * k, item, splits=splits, masked=False).renamed({"out": "dw"})


def masked_dense(op: str, tokens: int, shape: tuple[int, int], kept: int, itemsize: int, tile: tuple[int, int], *, bias: bool = False) -> Cost:
    """One op by PyTorch over W∘M: the masked copy is written and read, dW's other elements are computed and then zeroed; a mask is a byte an element.

    Useful FLOP are those of the mask, issued FLOP those of the dense matmul. An upper bound for `auto` on CUDA, whose kernels load no masked element of W and
    write no kept one of dW (`mask_cost.mask_cast`, `zero_masked`).
    """
    elements, moved = shape[0] * shape[1], "out" if op == "dw" else "w"
    copy = {moved: itemsize * elements}
    total = dense(op, tokens, shape, itemsize, tile, bias=bias) + dense_cost.stream({**copy, "mask": elements}, copy)
    return total.with_flop(useful_flop(tokens, kept), total.flop_issued)


def layer(
    op: str, impl: str, tokens: int, shape: tuple[int, int], mask: Tensor, block: tuple[int, int], dtype: torch.dtype, tile: tuple[int, int], *,
    bias: bool = False, inner: bool = False,
) -> Cost:  # fmt: skip
    """One op (`forward`, `dx`, `dw`) of a masked layer by `impl`: `triton`, or anything else for masked-dense. `tile`: a dense matmul's, see `dense_cost`."""
    if impl == "triton" and skips(op, shape, block):
        return by_lists(op, tokens, shape, mask, block, dtype, bias=bias, inner=inner)
    return masked_dense(op, tokens, shape, int(kept_elements(mask, shape, block)), dtype.itemsize, tile, bias=bias)


def dense(op: str, tokens: int, shape: tuple[int, int], itemsize: int, tile: tuple[int, int], *, bias: bool = False) -> Cost:
    """The same op of the dense layer."""
    n, k = shape
    if op == "dw":
        return dense_cost.matmul(n, k, tokens, itemsize, tile, names=("gy", "x", "out"))
    across, along = (n, k) if op == "forward" else (k, n)
    return dense_cost.matmul(tokens, across, along, itemsize, tile, bias=across if bias else 0)


def selection(blocks: int, triton: bool) -> Cost:
    """Choosing the kept blocks among their scores."""
    if not triton or blocks <= SELECT_MAX:
        return mask_cost.select(blocks)
    total = mask_cost.write_mask(blocks, CHUNK, ties_split=False)
    for digit in range(3):
        total += mask_cost.histogram(blocks, digit, CHUNK)
    return total


def block_index(shape: tuple[int, int], block: tuple[int, int], itemsize: int, triton: bool) -> Cost:
    """Scores and selection of one mask."""
    nb, kb = grid_shape(shape, block)
    return mask_cost.block_keys(shape, block, itemsize) + selection(nb * kb, triton)


def strip_lists(shape: tuple[int, int], block: tuple[int, int]) -> Cost:
    """Lists of both directions and their order."""
    grid = grid_shape(shape, block)
    return mask_cost.strip_lists(grid, block) + mask_cost.order(grid, block)


def pruned_dw(
    entries: int, tokens: int, shape: tuple[int, int], features: int, dtype: torch.dtype, mask: Tensor | None = None, block: tuple[int, int] = (1, 1), *,
    given: bool = False, index_itemsize: int = 4, tf32: bool = False,
) -> Cost:  # fmt: skip
    """dW of `impl="triton"` from `entries` kept blocks of `features` of an input of `tokens` rows, as many in each strip, but in a ragged one, of lower norms,
    as few as there can be; their list made by plain PyTorch.

    given: the mask's lists are, and are used where their strips are as wide as the input's blocks; others are made.
    """
    (n, k), item = shape, dtype.itemsize
    gathered = mask if listed(block) else None
    strips, whole = -(-k // features), k // features
    first = min(entries, tokens * whole)
    even = [first // whole + (s < first % whole) for s in range(whole)] + [entries - first] * (strips - whole)
    splits = splits_of(entries // strips, -(-n // TILE_FEATURES) * strips)
    lists = None if gathered is None else lists_of(gathered, shape, block, True, features)
    kept = [] if gathered is None else kept_by_strip(gathered, shape, block, features)
    total = pruned_cost.strip_rows(strips * tokens, entries, index_itemsize) + pruned_cost.pruned_matmul(
        even, min(tokens, entries), shape, features, item, splits=splits, tile_tokens=tile_for(dtype, features, tf32).step, lists=lists, kept=kept
    )
    grid, written = grid_shape(shape, block), n * k
    if lists is not None:
        written = lists.kept
        total += matmul_cost.zero_fill(shape, item)
        if not given or features != strip_for(block, True):
            total += mask_cost.strip_lists(grid, block, features) + mask_cost.order(grid, block, features)
    if splits > 1:
        total += matmul_cost.sum_splits(shape, block, written, item, splits=splits, masked=lists is not None)
    if mask is None or gathered is not None:
        return total
    wanted = int(kept_elements(mask, shape, block))  # all is multiplied, and what the mask does not want is zeroed
    total = total.with_flop(total.flop_useful * wanted // max(1, n * k), total.flop_issued)
    return total + mask_cost.zero_masked(shape, block, wanted, item)


def kept_by_strip(mask: Tensor, shape: tuple[int, int], block: tuple[int, int], features: int) -> list[int]:
    """Elements of W (N, K) that a mask keeps in each strip of `features` columns."""
    columns = expand_mask(mask.cpu(), shape, block).sum(0)
    return [int(part.sum()) for part in columns.split(features)]
