"""Requested bytes in the granules that memory moves: 32-byte sectors, 128-byte lines.

A program asks for runs of neighbouring bytes, a row of a tile each. A run of w bytes that begins at offset a costs ⌈(a mod g + w) / g⌉ granules of g bytes:
narrow runs waste a part of each granule, and misaligned ones cost one more.
"""

from __future__ import annotations

from math import gcd


def rounded(requested: int, width: int, pitch: int, granule: int) -> int:
    """Bytes of the granules that `requested` bytes touch, asked for in runs of `width` bytes.

    Runs begin at multiples of gcd(pitch, width): rows lie `pitch` bytes apart, and a tile begins at a multiple of its own width. Those starts are taken as
    equally frequent, so the result is exact for whole periods of them and an average otherwise; what is left behind whole runs counts as one.
    """
    if requested <= 0 or width <= 0:
        return 0
    runs, left = divmod(requested, width)
    starts = range(0, granule, gcd(pitch, width, granule))
    phases = len(starts)

    def cost(w: int) -> int:
        return sum(-(-(a + w) // granule) for a in starts) * granule

    total = -(-runs * cost(width) // phases)
    return max(requested, total + (-(-cost(left) // phases) if left else 0))
