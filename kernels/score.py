"""Block scores as int32 keys: a larger key is a better block, and the selection never sees a float.

`fro` and `l1` are sums, and float sums depend on their order: two orders of summation disagree in the last bit for about half of all blocks, which is
enough to flip a mask between a CPU and a GPU. Here every block is scaled by a power of two (exact), its terms are truncated to integers (the same for each
term wherever it is computed), and integers add exactly in any order. So their keys have the same bits everywhere; the other criteria are deterministic
per device.

Keys are never negative; a NaN of either sign scores highest, then an Inf, so that a broken weight stays in the product and is seen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .bits import bits_as
from .errors import ConfigError
from .grid import to_blocks

KEY_NAN, KEY_INF = 0x7FFFFFFF, 0x7F800000
MANTISSA = 21  # bits of the sum kept below its leading bit; with 10 bits of exponent the key fills an int32
OFFSET = 320  # makes the smallest exponent positive: float32 squares reach 2 ** -298


def block_keys(w: Tensor, block: tuple[int, int], criterion: str, step: Tensor | None = None, stream: int = 0) -> Tensor:
    """Score every block of a weight.

    Args:
        w: weight (N, K), any floating dtype; float64 is rounded to float32 first.
        block: (rows, cols); the edges may be ragged (missing elements count as zero).
        criterion: `fro` (sqrt of the sum of squares, eq. 5.1 of Bespalov 2025), `spectral` (what that thesis' code computes), `l1`, `linf`, `random`.
        step: 0-d int64 tensor, the counter of `random`; `stream` is its seed. Both are ignored by the others.

    Returns: int32 (NB, KB), on the device of `w`. Not differentiable. No host sync.
    Cost: one read of `w` and temporaries of its size; `spectral` runs one SVD a block.
    """
    b = to_blocks(w.detach().float(), block)
    finite = torch.isfinite(b).all(-1)
    clean = torch.where(finite[..., None], b, 0.0)
    if criterion in NORMS:
        keys = NORMS[criterion].keys(clean, min(block[1], w.shape[1]))
    elif criterion == "random":
        keys = random_keys(b.shape[:2], w.device, step, stream)
    else:
        raise ConfigError(f"unknown criterion: expected one of {', '.join(CRITERIA)}, got {criterion!r}.")
    bad = torch.where(torch.isnan(b).any(-1), KEY_NAN, KEY_INF)
    return torch.where(finite, keys, bad).to(torch.int32)


def norms_of(keys: Tensor, w: Tensor, criterion: str) -> Tensor:
    """The norms of a weight's blocks that keys stand for, float32; infinite or NaN for a broken block."""
    return NORMS[criterion].values(keys, w) if w.numel() else bits_as(keys, torch.float32)


def _scale(b: Tensor, axes: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Scale by the power of two that brings the largest magnitude over `axes` into [0.5, 1): returns (scaled, exponent), both exact."""
    exponent = torch.frexp(b.abs().amax(axes, keepdim=True)).exponent
    half = torch.div(-exponent, 2, rounding_mode="floor")  # in two steps, since 2 ** 148 is no float32
    return b * torch.exp2(half.float()) * torch.exp2((-exponent - half).float()), exponent


def sum_shift(elements: int) -> int:
    """Fixed-point bits of a term: 44, or fewer in blocks so large that the sum would reach 2 ** 62."""
    return min(44, 62 - max(1, elements - 1).bit_length())


def _sum_keys(b: Tensor, squared: bool) -> Tensor:
    """Order-free key of the sum of |b| or of b ** 2 over the last axis: (exponent + 320) << 21 | the 21 bits below the leading one."""
    u, exponent = _scale(b, (-1,))
    term = u * u if squared else u.abs()  # the float32 product must not be fused with what follows
    shift = sum_shift(b.shape[-1])
    total = (term * 2.0**shift).to(torch.int64).sum(-1)
    return sum_bits(total, exponent.squeeze(-1), shift, squared)


def sum_bits(total: Tensor, exponent: Tensor, shift: int, squared: bool) -> Tensor:
    """Key of a sum of integers [int64] that count 2^-shift of terms scaled by 2^-exponent."""
    lead = torch.frexp(total.double()).exponent.long() - 1
    lead = lead - ((total >> lead.clamp(min=0)) == 0).long()  # rounding to double may carry into the next power of two
    below, above = (lead - MANTISSA).clamp(min=0), (MANTISSA - lead).clamp(min=0)
    mantissa = ((total >> below) << above) & ((1 << MANTISSA) - 1)
    e = exponent.long()
    key = ((lead + 44 - shift + (2 * e if squared else e) + OFFSET) << MANTISSA) | mantissa
    return torch.where(total == 0, 0, key)


def sum_of_keys(keys: Tensor) -> Tensor:
    """The sums that keys of `fro` (of squares) or `l1` stand for, float64, rounded down to 21 bits below the leading one; infinite for a broken block.

    Exact, so that the sums have the same bits wherever the keys were made.
    """
    mantissa = 1 + (keys & ((1 << MANTISSA) - 1)).double() / (1 << MANTISSA)
    sums = torch.ldexp(mantissa, (keys >> MANTISSA) - OFFSET - 44)
    return torch.where(keys == 0, 0.0, torch.where(keys >= KEY_INF, torch.inf, sums))


def _spectral_keys(b: Tensor, width: int) -> Tensor:
    """Largest singular value of each block, as float32 bits.

    The weight is scaled as a whole: its magnitude does not matter, but blocks 2^126 times smaller than the largest element count as zero.
    """
    if not b.numel():
        return b.sum(-1)
    u, _ = _scale(b.unflatten(-1, (-1, width)), (0, 1, 2, 3))
    return bits_as(torch.linalg.matrix_norm(u, ord=2).clamp(min=0), torch.int32)


def _spectral_values(keys: Tensor, w: Tensor) -> Tensor:
    return torch.ldexp(bits_as(keys, torch.float32), torch.frexp(torch.where(torch.isfinite(w), w.float(), 0).abs().amax()).exponent)


class Norm(NamedTuple):
    """A criterion that is a norm of a block."""

    keys: Callable[[Tensor, int], Tensor]  # of blocks of finite elements, [NB, KB, elements], and of their width
    values: Callable[[Tensor, Tensor], Tensor]  # what keys stand for: of the keys and the weight, not empty
    captured: bool = True  # by CUDA graphs; an SVD is not


NORMS = {  # a new one is a line here; kernels that have it say so themselves, and others are this plain form
    "fro": Norm(lambda b, _: _sum_keys(b, squared=True), lambda keys, _: sum_of_keys(keys).sqrt().float()),
    "spectral": Norm(_spectral_keys, _spectral_values, captured=False),
    "l1": Norm(lambda b, _: _sum_keys(b, squared=False), lambda keys, _: sum_of_keys(keys).float()),
    "linf": Norm(lambda b, _: bits_as(b.abs().amax(-1), torch.int32), lambda keys, _: bits_as(keys, torch.float32)),  # bits of floats from 0 on sort like these
}
CRITERIA = (*NORMS, "random")


def mix(h: Tensor) -> Tensor:
    """32-bit finaliser of MurmurHash3 (A. Appleby, public domain) in int64 arithmetic, the same bits on every device."""
    low = 0xFFFFFFFF
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & low
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & low
    return h ^ (h >> 16)


def random_keys(grid: torch.Size, device: torch.device, step: Tensor | None, stream: int) -> Tensor:
    """Counter-based random keys: a hash of (stream, step, flat index), equal on all ranks and devices; no generator is touched."""
    index = torch.arange(grid[0] * grid[1], device=device)
    count = torch.zeros((), dtype=torch.int64, device=device) if step is None else step
    h = mix(mix(count & 0xFFFFFFFF) ^ (stream & 0xFFFFFFFF))
    h = mix(h ^ (stream >> 32 & 0xFFFFFFFF))
    return (mix(mix(index & 0xFFFFFFFF) ^ h) >> 2).reshape(grid)
