"""Every configuration that the launchers can launch: their arguments, over the axes that reach the compiled code.

The whole product is thousands of compilations. By default a subset runs in which every pair of values of two axes occurs for each op (so every block in every
dtype, every block at every edge, and so on); `--all` runs the product.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
from record import MATMULS, Config, configure, recording
from torch import Tensor

from fxmask.kernels.grid import grid_shape
from fxmask.kernels.lists import LISTED
from fxmask.kernels.triton import (
    aside,
    device,
    draw,
    dropped,
    elementwise,
    keys,
    launch,
    list_matmul,
    masked_dense,
    nm,
    prune_launch,
    pruned_matmul,
    refresh,
    saliency,
    sampled_matmul,
    selection,
    strip_lists,
    tiles,
)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
KERNEL_MODULES = (draw, elementwise, keys, list_matmul, nm, pruned_matmul, saliency, sampled_matmul, selection, strip_lists)

BLOCKS = list(itertools.product(LISTED, LISTED))
SMALL_BLOCKS = [(1, 1), (1, 8), (4, 1), (2, 4), (8, 8), (3, 5), (7, 64)]  # what is masked and cast, then multiplied densely
PRECISIONS = {"bf16": (BF16, False), "fp16": (FP16, False), "tf32": (FP32, True), "ieee": (FP32, False)}
TOKENS = 4096


class Edge(NamedTuple):
    """How a matmul's axes and rows divide: features of W in both directions, and what a row of x or dY has beyond its features."""

    out_features: int
    in_features: int
    pad: int = 0


EDGES = {
    "even": Edge(4096, 4096),
    "row8": Edge(4096, 4096, 8),
    "row4": Edge(4096, 4096, 4),
    "ragged16": Edge(4112, 4112),
    "ragged8": Edge(4104, 4104),
    "ragged4": Edge(4100, 4100),
    "small": Edge(96, 80),  # one strip, a short list
}
DROPPED_EDGES = ("even", "row4", "ragged8", "ragged4")
TARGETS = ("new", "accumulate", "split", "split accumulate", "beyond 2^31")


def meta(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def rows(tokens: int, features: int, pad: int, dtype: torch.dtype) -> Tensor:
    """A [tokens, features] view with rows features + pad apart."""
    return meta(tokens, features + pad, dtype=dtype)[:, :features]


def mask_of(edge: Edge, block: tuple[int, int]) -> Tensor:
    return meta(-(-edge.out_features // block[0]), -(-edge.in_features // block[1]), dtype=torch.bool)


def turned(channels: int, features: int, dtype: torch.dtype) -> Tensor:
    """A [tokens / channels, channels, features] view whose channels are contiguous."""
    return meta(TOKENS // channels, features, channels, dtype=dtype).transpose(1, 2)


def forward(precision: str, block: tuple[int, int], edge: str, bias: bool, act: str) -> None:
    (dtype, tf32), e = PRECISIONS[precision], EDGES[edge]
    w, b = meta(e.out_features, e.in_features, dtype=dtype), meta(e.out_features, dtype=dtype) if bias else None
    launch.list_matmul(rows(TOKENS, e.in_features, e.pad, dtype), w, b, mask_of(e, block), block, transposed=False, act=act, tf32=tf32)


def dx(precision: str, block: tuple[int, int], edge: str) -> None:
    (dtype, tf32), e = PRECISIONS[precision], EDGES[edge]
    gy, w = rows(TOKENS, e.out_features, e.pad, dtype), meta(e.out_features, e.in_features, dtype=dtype)
    launch.list_matmul(gy, w, None, mask_of(e, block), block, transposed=True, tf32=tf32)


def dw(precision: str, block: tuple[int, int], edge: str, target: str) -> None:
    (dtype, tf32), e = PRECISIONS[precision], EDGES[edge]
    if target == "beyond 2^31":
        e = Edge(e.out_features + 2**19, e.in_features, e.pad)
    out = meta(e.out_features, e.in_features, dtype=dtype) if "accumulate" in target else None
    gy, x = rows(TOKENS, e.out_features, e.pad, dtype), rows(TOKENS, e.in_features, e.pad, dtype)
    launch.sampled_matmul(gy, x, mask_of(e, block), block, out=out, splits=4 if "split" in target else 1, tf32=tf32)


def turned_matmul(dtype: torch.dtype, block: tuple[int, int], edge: str, channels: int, transposed: bool) -> None:
    """Forward and dX of token mixing."""
    e = EDGES[edge]
    x, w = turned(channels, e.out_features if transposed else e.in_features, dtype), meta(e.out_features, e.in_features, dtype=dtype)
    launch.list_matmul(x, w, None, mask_of(e, block), block, transposed)


def turned_dw(dtype: torch.dtype, block: tuple[int, int], edge: str, channels: int, which: str) -> None:
    e = EDGES[edge]
    gy, x = turned(channels, e.out_features, dtype), turned(channels, e.in_features, dtype)
    gy, x = (torch.empty(t.shape, dtype=t.dtype, device=t.device) if other else t for t, other in ((gy, which == "x"), (x, which == "gy")))
    launch.sampled_matmul(gy, x, mask_of(e, block), block, splits=1)


def tile(dtype: torch.dtype, block: tuple[int, int], number: int, transposed: bool, edge: str, arch: int = 90) -> None:
    """Tiles beside the default, that the benchmark measures."""
    found, e = tiles.candidates(dtype, block, transposed), EDGES[edge]
    if number < len(found) and tiles.runs_on(found[number], arch // 10):
        x, w = meta(TOKENS, e.out_features if transposed else e.in_features, dtype=dtype), meta(e.out_features, e.in_features, dtype=dtype)
        launch.list_matmul(x, w, None, mask_of(e, block), block, transposed, tile=found[number])


def dropped_op(op: str, precision: str, block: tuple[int, int], edge: str, tokens: int, more: bool) -> None:
    """Block dropout; `more`: a bias of the forward, four splits of dW's tokens."""
    (dtype, tf32), e = PRECISIONS[precision], EDGES[edge]
    x, gy = rows(tokens, e.in_features, e.pad, dtype), rows(tokens, e.out_features, e.pad, dtype)
    w, b = meta(e.out_features, e.in_features, dtype=dtype), meta(e.out_features, dtype=dtype) if more else None
    keep = mask_of(Edge(tokens, e.in_features), block)
    with mock.patch.object(dropped, "allows_tf32", return_value=tf32):
        if op == "forward":
            dropped.linear(x, w, b, keep, block, 0.5)
        elif op == "dx":
            dropped.dx(gy, w, keep, block, 0.5)
        else:
            dropped.dw(gy, x, keep, block, 0.5, splits=4 if more else 1)


def drop_mask(tokens: int) -> None:
    draw.draw(tokens, 4096, (16, 16), 0.5, meta(1, dtype=torch.int64))


def mask_cast(dtypes: tuple[torch.dtype, torch.dtype], block: tuple[int, int], edge: str) -> None:
    e = EDGES[edge]
    masked_dense.mask_cast(rows(e.out_features, e.in_features, e.pad, dtypes[0]), mask_of(e, block), block, dtypes[1])


def zero_masked(dtype: torch.dtype, block: tuple[int, int], edge: str) -> None:
    e = EDGES[edge]
    masked_dense.zero_masked(rows(e.out_features, e.in_features, 0, dtype), mask_of(e, block), block)


def set_aside(dtype: torch.dtype, block: tuple[int, int], edge: str) -> None:
    e = EDGES[edge]
    w, mask = rows(e.out_features, e.in_features, 0, dtype), mask_of(e, block)
    held = aside.set_aside([w, rows(e.out_features, e.in_features, 0, dtype)], [mask], [0, 0], block)
    assert held is not None
    held.back(w)


def block_keys(dtype: torch.dtype, block: tuple[int, int], edge: str) -> None:
    e = EDGES[edge]
    refresh.block_keys(rows(e.out_features, e.in_features, e.pad, dtype), block)


def block_saliency(dtypes: tuple[torch.dtype, torch.dtype], block: tuple[int, int], edge: str, criterion: str) -> None:
    """Of a weight and its gradient."""
    e = EDGES[edge]
    saliency.saliency(rows(e.out_features, e.in_features, e.pad, dtypes[0]), rows(e.out_features, e.in_features, 0, dtypes[1]), block, criterion)


def take_in(blocks: int, average: float, adds: bool, holds: bool, skips: bool) -> None:
    scores, new = meta(blocks, dtype=FP32), meta(blocks, dtype=FP32)
    saliency.take_in(scores, new, average, adds, holds, meta(1, dtype=FP32) if skips else None)


def select(blocks: int, scored: bool) -> None:
    refresh.select(meta(blocks, dtype=torch.int32), meta(1, dtype=torch.int64), meta(blocks, dtype=FP32) if scored else None)


def lists(block: tuple[int, int], features: int) -> None:
    refresh.strip_lists(mask_of(Edge(features, features), block), block)


def group(dtype: torch.dtype, block: tuple[int, int], features: int, pad: int, scored: bool) -> None:
    """Keys, selection and lists of several weights at once; scores where one program can select among so many blocks."""
    weights = [rows(features, f, pad, dtype) for f in (features, 4 * features)]
    grids = [grid_shape(w.shape, block) for w in weights]
    scored = scored and max(nb * kb for nb, kb in grids) <= refresh.SELECT_MAX
    refresh.refresh_group(weights, [meta(1, dtype=torch.int64)] * 2, block, [meta(*g, dtype=FP32) for g in grids] if scored else None)


def pruned_dw(precision: str, features: int, edge: str, mask_block: tuple[int, int] | None, splits: int) -> None:
    """dW from an input of which blocks of so many features were kept, alone or under a mask of W."""
    (dtype, tf32), e = PRECISIONS[precision], EDGES[edge]
    kept = -(-e.in_features // features) * TOKENS // 2 // 16
    values, index = meta(16, kept, features, dtype=dtype), meta(16, kept, dtype=torch.int32)
    gy, mask = rows(TOKENS, e.out_features, e.pad, dtype), None if mask_block is None else mask_of(e, mask_block)
    prune_launch.pruned_dw(gy, values, index, (16, TOKENS // 16, e.in_features), mask, mask_block or (1, 1), None, tf32, splits)


def nm_mask(dtypes: tuple[torch.dtype, torch.dtype], m: int, columns: int) -> None:
    nm.nm_mask(meta(4096, columns, dtype=dtypes[0]), m // 2, m, dtypes[1])


SQUARES = [(b, b) for b in LISTED]
DROPPED_BLOCKS = [*SQUARES, (16, 128), (128, 16)]
Op = Callable[..., None]
Case = tuple[Any, ...]
HALF = [BF16, FP16]
ACTS = ["none", "relu", "silu", "gelu"]
AXES: list[tuple[Op, tuple[list[Any], ...]]] = [
    (forward, (list(PRECISIONS), BLOCKS, list(EDGES), [False, True], ACTS)),
    (dx, (list(PRECISIONS), BLOCKS, list(EDGES))),
    (dw, (list(PRECISIONS), BLOCKS, list(EDGES), list(TARGETS))),
    (turned_matmul, (HALF, SQUARES, ["even", "ragged8", "ragged4"], [64, 8], [False, True])),
    (turned_dw, (HALF, SQUARES, ["even", "ragged4"], [64, 8], ["gy", "x", "both"])),
    (tile, (HALF, BLOCKS, [1, 2, 3, 4], [False, True], ["even", "ragged8"])),
    *((dropped_op, ([op], list(PRECISIONS), DROPPED_BLOCKS, list(DROPPED_EDGES), [4096, 4099], [False, True])) for op in ("forward", "dx", "dw")),
    (drop_mask, ([1, 4096],)),
    (dropped_op, (["forward", "dx"], ["bf16"], [(8, 8)], ["even"], [4096], [False])),
    (mask_cast, ([(FP32, FP32), (FP32, BF16), (FP32, FP16), (BF16, BF16), (FP16, FP16)], SQUARES + SMALL_BLOCKS, ["even", "ragged8", "ragged4"])),
    (zero_masked, ([FP32, BF16, FP16], SQUARES + SMALL_BLOCKS, ["even", "ragged8", "ragged4"])),
    (set_aside, ([FP32, BF16, FP16], SQUARES + SMALL_BLOCKS, ["even", "ragged8", "ragged4"])),
    (block_keys, ([FP32, BF16, FP16], BLOCKS, ["even", "ragged8", "ragged4"])),
    (block_saliency, ([(FP32, FP32), (BF16, BF16), (FP16, FP16), (FP32, BF16)], BLOCKS, ["even", "ragged8", "ragged4"], list(saliency.BY_GRADIENT))),
    (take_in, ([1, 100, 4096, refresh.SELECT_MAX], [0.0, 0.9], [False, True], [False, True], [False, True])),
    (select, ([1, 30, 100, 1000, 4096, refresh.SELECT_MAX, 229_376], [False])),
    (select, ([1, 30, 100, 1000, 4096, refresh.SELECT_MAX], [True])),
    (lists, (BLOCKS, [1000, 14336, 131072])),
    (group, ([FP32, BF16, FP16], BLOCKS, [384, 4096], [0, 8], [False, True])),
    (pruned_dw, (list(PRECISIONS), list(LISTED), list(EDGES), [None, *SQUARES, (128, 16), (16, 128), (2, 4)], [1, 4])),
    (nm_mask, ([(FP32, FP32), (FP32, BF16), (FP32, FP16), (BF16, BF16), (FP16, FP16)], [2, 4, 8], [4096, 4088])),
]
SMOKE: list[tuple[Op, Case]] = [
    (forward, ("bf16", (32, 32), "even", True, "gelu")),
    (forward, ("tf32", (64, 64), "ragged4", False, "none")),
    (dx, ("bf16", (16, 16), "ragged8")),
    (dw, ("bf16", (128, 128), "even", "split")),
    (turned_matmul, (BF16, (64, 64), "even", 64, False)),
    (turned_dw, (BF16, (64, 64), "even", 64, "both")),
    (tile, (BF16, (128, 128), 4, False, "even")),
    *((dropped_op, (op, "bf16", (128, 128), "even", 4096, True)) for op in ("forward", "dx", "dw")),
    (drop_mask, (4096,)),
    (group, (FP32, (16, 16), 4096, 0, False)),
    (group, (BF16, (64, 64), 384, 0, True)),
    (select, (1000, False)),
    (block_saliency, ((FP32, BF16), (32, 32), "ragged8", "taylor")),
    (take_in, (4096, 0.9, False, True, True)),
    (mask_cast, ((FP32, BF16), (2, 4), "even")),
    (zero_masked, (BF16, (16, 16), "even")),
    (set_aside, (FP32, (16, 16), "even")),
    (pruned_dw, ("bf16", 64, "even", None, 4)),
    (pruned_dw, ("bf16", 16, "ragged8", (32, 64), 1)),
    (nm_mask, ((FP32, BF16), 4, 4096)),
]


def pairwise(axes: tuple[list[Any], ...]) -> Iterator[tuple[Any, ...]]:
    """Enough of the product for every two values of two axes to meet. Always the same ones."""
    product = list(itertools.product(*(range(len(axis)) for axis in axes)))
    random.Random(0).shuffle(product)
    seen: set[tuple[tuple[int, int], ...]] = set()
    for wanted in range(len(axes) * (len(axes) - 1) // 2, 0, -1):  # first the cases that show most new pairs
        for case in product:
            pairs = set(itertools.combinations(enumerate(case), 2)) - seen
            if len(pairs) >= wanted:
                seen |= pairs
                yield tuple(axis[i] for axis, i in zip(axes, case, strict=True))


def cases_of(selection: str) -> Iterator[tuple[Op, Case]]:
    """`smoke`: a launch of each kind. `pairs`: see the module. `all`: the product."""
    if selection == "smoke":
        yield from SMOKE
        return
    for op, axes in AXES:
        for case in itertools.product(*axes) if selection == "all" or len(axes) == 1 else pairwise(axes):
            yield op, case


def describe(op: Op, case: Case) -> str:
    def word(value: Any) -> str:
        return "x".join(map(word, value)) if isinstance(value, tuple) else str(value).removeprefix("torch.")

    names = op.__code__.co_varnames
    return " ".join([op.__name__, *(name if value is True else word(value) for name, value in zip(names, case, strict=False) if value is not False)])


def enumerate_configs(arch: int, selection: str) -> list[Config]:
    """The configurations for an architecture, each once."""
    found: dict[tuple[str, str], Config] = {}
    for op, case in cases_of(selection):
        with recording() as calls, mock.patch.object(device, "major", return_value=arch // 10):
            op(*case, **({"arch": arch} if op is tile else {}))
        for call in calls:
            config = configure(call, arch, describe(op, case))
            # whether 16 divides an int reaches a pipeline; elsewhere it only widens a load, and one case is enough
            found.setdefault(config.key if selection == "all" or config.name in MATMULS else config.short_key, config)
    return list(found.values())


def kernels() -> set[str]:
    """Names of the kernels that the package has: what no case launches would go unseen."""
    return {name for module in KERNEL_MODULES for name in vars(module) if name.endswith("_kernel")}
