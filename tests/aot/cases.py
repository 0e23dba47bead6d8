"""Every configuration that the launchers can launch: their arguments, over the axes that reach the compiled code.

The whole product is thousands of compilations. By default a subset runs in which every pair of values of two axes occurs for each op (so every block in every
dtype, every block at every edge, and so on); `--all` runs the product.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from record import MATMULS, Config, configure, recording
from torch import Tensor

from fxmask.kernels.lists import LISTED
from fxmask.kernels.triton import elementwise, launch, list_matmul, metadata, sampled_matmul

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
KERNEL_MODULES = (elementwise, list_matmul, metadata, sampled_matmul)

BLOCKS = list(itertools.product(LISTED, LISTED))
SMALL_BLOCKS = [(1, 1), (1, 8), (4, 1), (2, 4), (8, 8), (3, 5), (7, 64)]  # what is masked and cast, then multiplied densely
PRECISIONS = {"bf16": (BF16, False), "fp16": (FP16, False), "tf32": (FP32, True), "ieee": (FP32, False)}
TOKENS = (4096, 1000, 1)


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
TARGETS = ("new", "accumulate", "split", "split accumulate", "beyond 2^31")


def meta(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def rows(tokens: int, features: int, pad: int, dtype: torch.dtype) -> Tensor:
    """A [tokens, features] view with rows features + pad apart."""
    return meta(tokens, features + pad, dtype=dtype)[:, :features]


def mask_of(edge: Edge, block: tuple[int, int]) -> Tensor:
    return meta(-(-edge.out_features // block[0]), -(-edge.in_features // block[1]), dtype=torch.bool)


def forward(precision: str, block: tuple[int, int], edge: str, bias: bool, act: str, tokens: int) -> None:
    (dtype, tf32), e = PRECISIONS[precision], EDGES[edge]
    w, b = meta(e.out_features, e.in_features, dtype=dtype), meta(e.out_features, dtype=dtype) if bias else None
    launch.list_matmul(rows(tokens, e.in_features, e.pad, dtype), w, b, mask_of(e, block), block, transposed=False, act=act, tf32=tf32)


def dx(precision: str, block: tuple[int, int], edge: str, tokens: int) -> None:
    (dtype, tf32), e = PRECISIONS[precision], EDGES[edge]
    gy, w = rows(tokens, e.out_features, e.pad, dtype), meta(e.out_features, e.in_features, dtype=dtype)
    launch.list_matmul(gy, w, None, mask_of(e, block), block, transposed=True, tf32=tf32)


def dw(precision: str, block: tuple[int, int], edge: str, target: str, tokens: int) -> None:
    (dtype, tf32), e = PRECISIONS[precision], EDGES[edge]
    if target == "beyond 2^31":
        e = Edge(e.out_features + 2**19, e.in_features, e.pad)
    out = meta(e.out_features, e.in_features, dtype=dtype) if "accumulate" in target else None
    gy, x = rows(tokens, e.out_features, e.pad, dtype), rows(tokens, e.in_features, e.pad, dtype)
    launch.sampled_matmul(gy, x, mask_of(e, block), block, out=out, splits=4 if "split" in target else 1, tf32=tf32)


def mask_cast(dtypes: tuple[torch.dtype, torch.dtype], block: tuple[int, int], edge: str) -> None:
    e = EDGES[edge]
    launch.mask_cast(rows(e.out_features, e.in_features, e.pad, dtypes[0]), mask_of(e, block), block, dtypes[1])


def block_keys(dtype: torch.dtype, block: tuple[int, int], edge: str) -> None:
    e = EDGES[edge]
    launch.block_keys(rows(e.out_features, e.in_features, e.pad, dtype), block)


def select(blocks: int) -> None:
    launch.select(meta(blocks, dtype=torch.int32), meta(1, dtype=torch.int64))


def strip_lists(step: int, block: tuple[int, int], features: int, transposed: bool) -> None:
    e = Edge(features, features)
    lay = launch.layout(tuple(mask_of(e, block).shape), block, transposed, step=step)
    launch.strip_lists(mask_of(e, block), lay, transposed)


SQUARES = [(b, b) for b in LISTED]
Op = Callable[..., None]
Case = tuple[Any, ...]
AXES: list[tuple[Op, tuple[list[Any], ...]]] = [
    (forward, (list(PRECISIONS), BLOCKS, list(EDGES), [False, True], ["none", "relu", "silu", "gelu"], list(TOKENS))),
    (dx, (list(PRECISIONS), BLOCKS, list(EDGES), list(TOKENS))),
    (dw, (list(PRECISIONS), BLOCKS, list(EDGES), list(TARGETS), list(TOKENS))),
    (mask_cast, ([(FP32, FP32), (FP32, BF16), (FP32, FP16), (BF16, BF16), (FP16, FP16)], SQUARES + SMALL_BLOCKS, ["even", "ragged8", "ragged4"])),
    (block_keys, ([FP32, BF16, FP16], BLOCKS, ["even", "ragged8", "ragged4"])),
    (select, ([1, 30, 100, 1000, 4096, launch.SELECT_MAX],)),
    (strip_lists, ([64, 32, 16], BLOCKS, [1000, 14336, 131072], [False, True])),
]
SMOKE: list[tuple[Op, Case]] = [
    (forward, ("bf16", (32, 32), "even", True, "gelu", 4096)),
    (forward, ("tf32", (64, 64), "ragged4", False, "none", 4096)),
    (dx, ("bf16", (16, 16), "ragged8", 4096)),
    (dw, ("bf16", (128, 128), "even", "split", 4096)),
    (block_keys, (BF16, (16, 16), "even")),
    (select, (1000,)),
    (mask_cast, ((FP32, BF16), (2, 4), "even")),
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
        with recording() as calls:
            op(*case)
        for call in calls:
            config = configure(call, arch, describe(op, case))
            # whether 16 divides an int reaches a pipeline; elsewhere it only widens a load, and one case is enough
            found.setdefault(config.key if selection == "all" or config.name in MATMULS else config.short_key, config)
    return list(found.values())


def kernels() -> set[str]:
    """Names of the kernels that the package has: what no case launches would go unseen."""
    return {name for module in KERNEL_MODULES for name in vars(module) if name.endswith("_kernel")}
