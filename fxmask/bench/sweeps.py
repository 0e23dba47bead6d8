"""Stages `tiles` and `splits`: the forward over sizes of a program's tile, and dW over shares of the tokens, beside dense and masked-dense.

The rows are those of the benchmark, gate and baselines included; `provider` names the choice, and `own` is the one that the library makes. Lists are given, and
so not in the time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..kernels.dispatch import triton_ops
from ..kernels.triton.tiles import Tile, candidates, runs_on
from . import providers
from .cells import Cell, parse_shape
from .costs import cost_of, triton_cost
from .inputs import TORCH_DTYPES, Inputs
from .providers import Call, Provider
from .table import COLUMNS, Table

SHAPE, TINY_SHAPE = "8192x4096->4096", "200x256->128"
BLOCKS, RATIOS = (128, 64), (0.8, 0.5, 0.9)
STAGES, SPLITS = (3, 4), (1, 2, 4, 8, 16)
OWN = "own"
OPS = {"tiles": ("forward", "forward"), "splits": ("dw", "backward")}
Cost = Callable[[Inputs], dict[str, int]]


def tile_name(t: Tile) -> str:
    """The tile as `provider` has it: 256x128x64-w8-s3-tma."""
    return f"{t.tokens}x{t.strip}x{t.step}-w{t.warps}-s{t.stages}{'-tma' if t.tma else ''}"


def tiles_of(dtype: torch.dtype, block: tuple[int, int], device: torch.device) -> list[Tile]:
    """The library's candidates, the same with 4 warps where a tile has 128 tokens, and all of them with 3 and 4 stages, as far as the device can hold them."""
    known = candidates(dtype, block, False)
    wide = [*known, *(t._replace(warps=4) for t in known if t.tokens == 128)]
    found = dict.fromkeys([*known, *(t._replace(stages=s) for t in wide for s in STAGES)])
    if device.type != "cuda":
        return list(found)
    properties = torch.cuda.get_device_properties(device)
    room = getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)
    major, _ = torch.cuda.get_device_capability(device)
    return [t for t in found if t.stages * (t.tokens + t.strip) * t.step * dtype.itemsize < room and runs_on(t, major)]


def by_tile(tile: Tile | None) -> Provider:
    """The forward with a tile; the library's own where there is none."""

    def prepare(i: Inputs) -> Call:
        triton = triton_ops()
        lists = triton.strip_lists(i.mask, i.block)
        return lambda: (triton.launch.list_matmul(i.x, i.w, None, i.mask, i.block, transposed=False, lists=lists, tile=tile),)

    return prepare


def by_splits(splits: int) -> Provider:
    """dW with that many shares of the tokens; 0: the library chooses."""

    def prepare(i: Inputs) -> Call:
        triton = triton_ops()
        lists = triton.strip_lists(i.mask, i.block)
        return lambda: (triton.launch.sampled_matmul(i.gy, i.x, i.mask, i.block, splits=splits, lists=lists),)

    return prepare


def choices_of(stage: str, dtype: str, block: int, device: torch.device) -> dict[str, tuple[Provider, Cost]]:
    """What a stage tries for a block, by name, the library's own first; and what each costs."""
    if stage == "splits":
        return {OWN if s == 0 else f"splits-{s}": (by_splits(s), partial(triton_cost, splits=s)) for s in (0, *SPLITS)}
    tiles = [None, *tiles_of(TORCH_DTYPES[dtype], (block, block), device)]
    return {OWN if t is None else tile_name(t): (by_tile(t), partial(triton_cost, tile=t)) for t in tiles}


def sweep(stage: str, device: torch.device, quick: bool) -> tuple[list[Cell], dict[str, Any]]:
    """The cells of a stage, in order of value, and what its `driver.Run` is made with."""
    op, phase = OPS[stage]
    m, n, k = parse_shape(SHAPE if device.type == "cuda" else TINY_SHAPE)
    dtype = "bf16" if device.type == "cuda" else "fp16"  # the interpreter multiplies bfloat16 wrongly
    choices = {b: choices_of(stage, dtype, b, device) for b in BLOCKS}
    cells = []
    for ratio in RATIOS[:1] if quick else RATIOS:
        for block in BLOCKS:
            cell = Cell(op, phase, m, n, k, dtype, (block, block), ratio, "random", 0, "")
            cells += [cell.dense(), *(cell.by(name) for name in ("masked_dense", *choices[block]))]
    made = {name: choice for by_name in choices.values() for name, choice in by_name.items()}

    def costs(i: Inputs) -> dict[str, int]:
        return made[i.cell.provider][1](i) if i.cell.provider in made else cost_of(i)

    registry = providers.REGISTRY | {name: choice[0] for name, choice in made.items()}
    return list(dict.fromkeys(cells)), {"registry": registry, "costs": costs, "csv": f"{stage}.csv"}


def table(stage: str, out: Path) -> Table:
    return Table(out / f"{stage}.csv", COLUMNS)
