"""Stages `tiles` and `splits`: the forward over sizes of a program's tile, and dW over tiles and shares of the tokens, beside dense and masked-dense.

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
from ..kernels.lists import STEP, STRIP
from ..kernels.triton.tiles import TILE_FEATURES, Tile, candidates, runs_on, takes_tma, tile_for
from . import providers
from .cells import BLOCKS, Cell, parse_shape
from .costs import cost_of, triton_cost
from .inputs import TORCH_DTYPES, Inputs
from .providers import Call, Provider
from .table import COLUMNS, Table

SHAPE, TINY_SHAPE = "8192x4096->4096", "200x256->128"
RATIOS = (0.8, 0.5, 0.9)
SPLITS = (1, 2, 4)
OWN = "own"
OPS = {"tiles": ("forward", "forward"), "splits": ("dw", "backward")}
Cost = Callable[[Inputs], dict[str, int]]


def tile_name(t: Tile) -> str:
    """The tile as `provider` has it: 256x128x64-w8-s3-tma."""
    return f"{t.tokens}x{t.strip}x{t.step}-w{t.warps}-s{t.stages}{'-tma' if t.tma else ''}"


def _fits(t: Tile, features: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the device can hold a tile of `features` on its second axis."""
    if device.type != "cuda":
        return True
    properties = torch.cuda.get_device_properties(device)
    room = getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)
    major, _ = torch.cuda.get_device_capability(device)
    return t.stages * (t.tokens + features) * t.step * dtype.itemsize < room and runs_on(t, major)


def tiles_of(dtype: torch.dtype, block: tuple[int, int], device: torch.device) -> list[Tile]:
    """Tiles of the forward: the library's candidates, then strips of either width, 128 and 256 tokens, 4 and 8 warps, 3 and 4 stages, with TMA and without."""
    found = candidates(dtype, block, False)
    for strip in (64, STRIP) if block[0] <= 64 else (STRIP,):
        sizes = [(128, 4), (128, 8), (256, 8), *([(256, 4)] if strip < STRIP else [])]
        plain = [Tile(tokens, strip, STEP, warps, stages) for tokens, warps in sizes for stages in (3, 4)]
        found += plain + [t._replace(tma=True) for t in plain if takes_tma(block, False, strip)]
    return [t for t in dict.fromkeys(found) if _fits(t, t.strip, dtype, device)]


def by_tile(tile: Tile | None) -> Provider:
    """The forward with a tile; the library's own where there is none."""

    def prepare(i: Inputs) -> Call:
        triton = triton_ops()
        lists = triton.refresh.strip_lists(i.mask, i.block, tile.strip if tile else None)
        return lambda: (triton.launch.list_matmul(i.x, i.w, None, i.mask, i.block, transposed=False, lists=lists, tile=tile),)

    return prepare


def dw_choices(dtype: torch.dtype, block: tuple[int, int], device: torch.device) -> list[tuple[Tile, int, int]]:
    """(tile, features of it on the reduction axis of the forward, shares of the tokens) of dW."""
    strips = (64, STRIP) if block[0] <= 64 else (STRIP,)
    tiles = [(tile_for(dtype, strip)._replace(stages=s), features) for strip in strips for features in (128, 256) for s in (3, 4)]
    return [(t, features, splits) for t, features in tiles if _fits(t, features, dtype, device) for splits in SPLITS]


def by_splits(splits: int, tile: Tile | None = None, features: int = TILE_FEATURES) -> Provider:
    """dW with that many shares of the tokens, in a tile or the library's own; 0 shares: the library chooses."""

    def prepare(i: Inputs) -> Call:
        triton = triton_ops()
        lists = triton.refresh.strip_lists(i.mask, i.block, tile.strip if tile else None)
        return lambda: (triton.launch.sampled_matmul(i.gy, i.x, i.mask, i.block, splits=splits, lists=lists, tile=tile, features=features),)

    return prepare


def choices_of(stage: str, dtype: str, block: int, device: torch.device) -> dict[str, tuple[Provider, Cost]]:
    """What a stage tries for a block, by name, the library's own first; and what each costs."""
    kind, sides = TORCH_DTYPES[dtype], (block, block)
    if stage == "splits":
        found: dict[str, tuple[Provider, Cost]] = {OWN: (by_splits(0), triton_cost)}
        for t, features, splits in dw_choices(kind, sides, device):
            name = f"{t.strip}x{features}x{t.step}-w{t.warps}-s{t.stages}-splits-{splits}"
            found[name] = by_splits(splits, t, features), partial(triton_cost, tile=t, splits=splits, features=features)
        return found
    tiles = [None, *tiles_of(kind, sides, device)]
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
