"""When `auto` takes the Triton kernels on a GPU: a closed form on the host, of sizes and the ratio; nothing is measured or read from the device.

The time of an op is taken to be `features @ SECONDS`, for our kernels and for masked-dense. The seconds are fitted to a recorded run,
`examples/results/h200/bench.csv`, by `python -m fxmask.bench.fit_choice FILE`, which prints the table `SECONDS` anew. A layer has one choice for forward, dX
and dW, by the time of the three together, and so its backward runs what its forward ran. What was not recorded stays masked-dense: devices but compute
capability 9, dtypes but bfloat16 and float16, fewer than `LEAST` tokens.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from .availability import capability, kernels_run, triton_ops
from .dispatch import MASKED_DENSE
from .grid import grid_shape
from .lists import UNITS, layout, skips
from .triton.tiles import MULTIPROCESSORS, best_dw_tile, best_tile, strip_for

# Seconds once, an issued FLOP, a byte asked of the L2 (masked-dense: of the operands), a byte of the result. Source: examples/results/h200/bench.csv, its last
# source. Forward and dX are bound by the L2, out of which they get 10 TB/s and less.
SECONDS = {
    ("triton", "product"): (6.006e-06, 1.607e-16, 9.584e-14, 4.175e-13),
    ("triton", "dw"): (1.088e-05, 0, 1.315e-13, 4.22e-13),
    ("masked_dense", "product"): (6.768e-06, 1.324e-15, 0, 1.234e-13),
    ("masked_dense", "dw"): (5.613e-06, 1.446e-15, 3.909e-14, 0),
}
# How much more time a byte of the L2 takes in rows of 32 bytes than in wider ones (bandwidth.csv: 5.0 and 8.9 TB/s).
NARROW = {128: 1.0, 64: 1.0, 32: 1.2, 16: 1.8}
LISTS = 10e-6  # seconds of a mask's lists, where every forward makes them (bench.csv, metadata)
MARGIN = 1.03  # masked-dense's predicted time over ours, from which ours is taken: the fit's steps are right to 9 %, one of 21 to 15 %
LEAST, NEVER = 1024, 1 << 40  # fewest tokens whose times were recorded; and more tokens than any input has
DTYPES = (torch.bfloat16, torch.float16)


def builds(w: Tensor, block: tuple[int, int], criterion: str, ties: str, cover: bool) -> bool:
    """Whether `auto` makes this mask by kernels: to the bit the plain form's, 7 to 31 times faster (bench.csv, block_index), on any device that runs them."""
    return kernels_run(w.device) and bool(triton_ops().builds(w, block, criterion, ties, cover))


def takes(device: torch.device, shape: tuple[int, int], block: tuple[int, int]) -> bool:
    """Whether `auto` may multiply a weight (N, K) by kernels on a device, if it pays."""
    found = capability(device)
    if found is None or found[0] != 9 or not skips("dx", shape, block) or not shape[0] * shape[1]:
        return False
    return listable(shape, block) and kernels_run(device)


def listable(shape: tuple[int, ...], block: tuple[int, int]) -> bool:
    """Whether lists can name every unit of a weight (N, K) along either axis; without, an explicit request raises."""
    grid = grid_shape(shape, block)
    return max(layout(grid, block, transposed).units for transposed in (False, True)) <= UNITS


def features(op: str, tokens: int, shape: tuple[int, int], block: tuple[int, int], density: float, own: bool) -> tuple[float, float, float, float]:
    """What `SECONDS` multiplies, in 16 bits. Ours: once; issued FLOP, of the expected union of the blocks in a strip, and the device's idle part where programs
    are few; bytes asked of the L2, more where pieces of rows are narrow; bytes of the result. Masked-dense: the FLOP and bytes of operands and result."""
    (n, k), m = shape, tokens
    read, written = {"forward": (m * k, m * n), "dx": (m * n, m * k), "dw": (m * (n + k), n * k)}[op]
    flop = 2.0 * m * n * k
    if not own:
        return 1.0, flop, 2.0 * read, 2.0 * written
    across, along, side = (k, n, block[1]) if op == "dx" else (n, k, block[0])
    strip = strip_for(block, op == "dx")
    strips = -(-across // strip)
    union = 1 - (1 - density) ** max(1, strip // side)
    issued = flop * union * strips * strip / across
    if op == "dw":  # splits its tokens where programs are few
        wide = best_dw_tile(DTYPES[0], block, k)[1]
        return 1.0, issued, issued * (1 / strip + 1 / wide) * NARROW[min(block)], 2.0 * written
    tile = best_tile(DTYPES[0], block, op == "dx", (m, across, along))
    idle = max(1.0, MULTIPROCESSORS / (strips * -(-m // tile.tokens)))
    return 1.0, issued * idle, (issued / strip + flop * density / tile.tokens) * NARROW[min(block)], 2.0 * written


def seconds(op: str, tokens: int, shape: tuple[int, int], block: tuple[int, int], density: float, backward: str, impl: str) -> float:
    """Predicted time of one op; products that the backward mode leaves dense cost masked-dense's time in both."""
    dense = (op == "dx" and backward == "unmasked") or (op == "dw" and backward in ("ste", "unmasked"))
    own = impl == "triton" and not dense
    rates = SECONDS["triton" if own else "masked_dense", "dw" if op == "dw" else "product"]
    return sum(f * s for f, s in zip(features(op, tokens, shape, block, density, own), rates, strict=True))


def factor(tokens: int, shape: tuple[int, int], block: tuple[int, int], density: float, backward: str = "masked", lists: bool = False) -> float:
    """Masked-dense's predicted time of a training step of a layer over ours; `lists`: every forward makes them."""
    own, dense = (sum(seconds(op, tokens, shape, block, density, backward, i) for op in ("forward", "dx", "dw")) for i in ("triton", "masked_dense"))
    return dense / (own + LISTS * lists)


@lru_cache(maxsize=4096)
def pays_from(shape: tuple[int, int], block: tuple[int, int], density: float, backward: str = "masked", lists: bool = False) -> int:
    """The fewest tokens from which the kernels are predicted to be faster, in quarters of a power of two, so that layers that are nearly alike share a compile.

    `NEVER` where none that is near the recorded ones makes up for it.
    """
    found = NEVER
    for t in reversed([LEAST * (4 + quarter) << power >> 2 for power in range(7) for quarter in range(4)]):
        if factor(t, shape, block, density, backward, lists) < MARGIN:  # from `found` on they pay at every number of tokens
            break
        found = t
    return found


def choice(device: torch.device, dtype: torch.dtype, tokens: int, shape: tuple[int, int], block: tuple[int, int], density: float) -> str:
    """`triton` or `masked_dense`: what `auto` would run of a layer in mode `masked` whose lists are given, for the benchmark."""
    pays = dtype in DTYPES and takes(device, shape, block) and tokens >= pays_from(shape, block, density)
    return "triton" if pays else MASKED_DENSE
