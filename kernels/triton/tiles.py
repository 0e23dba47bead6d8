"""Tile sizes of the matmul programs. Every one of them compiles without spills on sm_80, sm_90 and sm_100, where it may run there (`make aot`).

`best_tile` and `best_dw_tile` choose by what an H200 measured (`examples/results/h200/tile_scan.csv`); what was not measured gets the plain tile of `tile_for`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..lists import STEP, STRIP, strip_of

TOKEN_GROUP = 2048  # tokens whose tiles run together, so that X is read from L2
MULTIPROCESSORS = 132  # of an H200; other devices have about as many
SPLIT_FILL, SPLIT_TOKENS = 4 * MULTIPROCESSORS, 1024  # programs of dW that are wanted, most of which have nothing to do; a share has at least so many tokens
SUM_TILE = (4, 128)  # of a program that adds splits up: many small ones, as each waits for its splits one after the other
TILE_FEATURES = 128  # features of a tile of dW on the reduction axis of the forward
LARGE_TILES = (9, 10)  # major compute capabilities
LONG = 2048  # features of a reduction axis from which larger tiles pay off their longer beginning and end
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


def keys_tile(block: tuple[int, int]) -> tuple[int, int]:
    """Rows and columns of W that one program of the keys takes, and of the scores off gradients."""
    return max(block[0], min(16, 4096 // max(block[1], 16))), max(block[1], 64)


def strip_for(block: tuple[int, int], transposed: bool) -> int:
    """Features of a strip of one direction's lists."""
    return strip_of(block[1] if transposed else block[0])


def other_strip(strip: int, block: tuple[int, int], transposed: bool) -> int | None:
    """What lists in strips of `strip` features are made and read with: None for the library's own, whose two directions may have strips of different widths."""
    return None if strip == strip_for(block, transposed) else strip


def takes_tma(block: tuple[int, int], transposed: bool, strip: int) -> bool:
    """Whether a strip is one block wide and a step within one block: then every entry is a rectangle of W."""
    across, along = block[::-1] if transposed else block
    return across >= strip and along >= STEP


def tile_for(dtype: torch.dtype, strip: int, tf32: bool = False) -> Tile:
    """The plain tile of a dtype, for every block, device and layout."""
    return Tile(128, strip, STEP if dtype != torch.float32 else 32 if tf32 else 16, 8, 3)


def candidates(dtype: torch.dtype, block: tuple[int, int], transposed: bool) -> list[Tile]:
    """Tiles of the list matmul that are worth a measurement; the plain one is the first."""
    strip = strip_for(block, transposed)
    plain = tile_for(dtype, strip)
    if dtype == torch.float32:
        return [plain]
    found = [plain, plain._replace(warps=4, stages=3 if strip == STRIP else 4), plain._replace(tokens=256, stages=4)]
    if takes_tma(block, transposed, strip):
        found += [plain._replace(stages=4, tma=True), Tile(256, strip, STEP, 8 if strip == STRIP else 4, 4, True)]
    return found


def runs_on(tile: Tile, major: int) -> bool:
    """Whether a tile is for devices of compute capability `major`. Others than 9 and 10 have no instruction that reads operands from shared memory, so that 256
    tokens, or 4 warps for 128 x 128, spill; 8 has no TMA, and 12 too little shared memory."""
    return major in LARGE_TILES or (tile.tokens <= 128 and not tile.tma and tile.warps == 8)


def best_tile(
    dtype: torch.dtype, block: tuple[int, int], transposed: bool, sizes: tuple[int, int, int], *, tf32: bool = False, inner: bool = False, tma: bool = True,
    act: bool = False, major: int = 9,
) -> Tile:  # fmt: skip
    """The tile of a list matmul of `sizes` (tokens, features of the output, features of the reduction axis).

    inner: x's tokens lie side by side. tma: whether descriptors can name the operands, whose rows are then a multiple of 16 bytes apart. act: an activation
    follows, for which 4 warps have too few registers. major: the device's.
    """
    (m, n, k), strip = sizes, strip_for(block, transposed)
    if dtype == torch.float32 or inner or major not in LARGE_TILES:
        return tile_for(dtype, strip, tf32)
    fills = -(-m // 256) * -(-n // strip) >= MULTIPROCESSORS
    if tma and takes_tma(block, transposed, strip) and fills and k >= LONG:
        return Tile(256, strip, STEP, 8 if act or strip == STRIP else 4, 4, True)
    return Tile(128, strip, STEP, 8 if act and strip == STRIP else 4, 3 if strip == STRIP else 4)


def best_dw_tile(
    dtype: torch.dtype, block: tuple[int, int], features: int, *, tf32: bool = False, inner: bool = False, major: int = 9
) -> tuple[Tile, int]:
    """(tile, features of it on the reduction axis of the forward) of dW; `features`: all of that axis. inner: either operand's tokens lie side by side."""
    strip = strip_for(block, False)
    if dtype == torch.float32 or inner or major not in LARGE_TILES:
        return tile_for(dtype, strip, tf32), TILE_FEATURES
    wide = strip < STRIP and features >= LONG  # where lists are short, few entries would fill it
    return Tile(128, strip, STEP, 8, 3 if block[1] == 16 else 4), 2 * TILE_FEATURES if wide else TILE_FEATURES


def splits_of(tokens: int, programs: int) -> int:
    """Shares of the tokens that dW is cut into, so that `programs` programs a share fill the device."""
    return max(1, min(-(-SPLIT_FILL // max(1, programs)), tokens // SPLIT_TOKENS))
