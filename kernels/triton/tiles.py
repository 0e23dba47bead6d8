"""Tile sizes of the matmul programs. Every one of them compiles without spills on sm_80, sm_90 and sm_100, where it may run there (`make aot`)."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..lists import STEP, STRIP, layout

TOKEN_GROUP = 2048  # tokens whose tiles run together, so that X is read from L2
SPLIT_FILL, SPLIT_TOKENS = 264, 1024  # dW's programs fill a device of 132 multiprocessors twice; a share has at least so many tokens
TILE_FEATURES = 128  # features of a tile of dW on the reduction axis of the forward
SELECT_MAX = 16_384  # blocks that one program selects among in registers
DRAWN = 1024  # blocks that a program of dropout's mask draws
CHUNK = 4096  # keys of a histogram's program, of selections above that


class Tile(NamedTuple):
    """Sizes of a matmul program: a tile of `tokens` x `strip`, `step` features of the reduction axis at a time."""

    tokens: int
    strip: int
    step: int
    warps: int
    stages: int
    tma: bool = False  # operands by host-made TMA descriptors: sm_90 and later, blocks that leave no bits (`takes_tma`)


def takes_tma(block: tuple[int, int], transposed: bool) -> bool:
    """Whether a strip is one block wide and a step within one block: then every entry is a rectangle of W."""
    across, along = block[::-1] if transposed else block
    return across >= STRIP and along >= STEP


def candidates(dtype: torch.dtype, block: tuple[int, int], transposed: bool, tf32: bool = False) -> list[Tile]:
    """Tiles of the list matmul that are worth a measurement; the first is the default until a recorded run says otherwise."""
    if dtype == torch.float32:
        return [Tile(128, STRIP, 32 if tf32 else 16, 8, 3)]
    plain = [Tile(128, STRIP, STEP, 8, 3), Tile(128, STRIP, STEP, 8, 4)]
    if min(block) < 64:
        return plain
    found = [*plain, Tile(256, STRIP, STEP, 8, 3)]
    if takes_tma(block, transposed):
        found += [Tile(128, STRIP, STEP, 8, 4, True), Tile(256, STRIP, STEP, 8, 3, True)]
    return found


def runs_on(tile: Tile, major: int) -> bool:
    """Whether a tile is for devices of compute capability `major`: before sm_90 there is no TMA, and 256 tokens spill."""
    return major >= 9 or (tile.tokens <= 128 and not tile.tma)


def tile_for(dtype: torch.dtype, tf32: bool = False) -> Tile:
    """The default tile of a dtype, for every block."""
    return candidates(dtype, (16, 16), False, tf32)[0]


def splits_of(tokens: int, programs: int) -> int:
    """Shares of the tokens that dW is cut into, so that `programs` programs a share fill the device."""
    return max(1, min(-(-SPLIT_FILL // max(1, programs)), tokens // SPLIT_TOKENS))


def pruned_tiles(features: int, block: int, mask_grid: tuple[int, int] | None = None, mask_block: tuple[int, int] = (1, 1)) -> int:
    """Tiles that a strip of dW from a pruned input has, of `features` out_features or, under a mask of W, of the entries of a list in strips of `block`."""
    if mask_grid is None:
        return -(-features // TILE_FEATURES)
    lay = layout(mask_grid, mask_block, True, block)
    return -(-lay.units * lay.unit // TILE_FEATURES)
