"""What PyTorch's own ops cost, in closed form: matmuls, convolutions, attention, and ops that only move data. `matmul_cost` and its like have our kernels.

The library's matmul kernels cannot be looked into. Their requested bytes are those of an output tile of `tile` (tokens, features) whose programs share nothing
else, which a device's table entry gives (`fxmask.analysis.devices`): cluster multicast makes it larger than a program's own tile. Useful FLOP are exact.
"""

from __future__ import annotations

from math import prod

from .cost import Cost, cdiv

Tile = tuple[int, int]
ATTENTION_TILE = 128  # rows of Q that a program of a fused attention keeps, reading K and V past it (Dao et al., arXiv:2205.14135)


def matmul(
    m: int, n: int, k: int, itemsize: int, tile: Tile, *, batch: int = 1, names: tuple[str, str, str] = ("x", "w", "y"), bias: int = 0,
    least: dict[str, int] | None = None,
) -> Cost:  # fmt: skip
    """`batch` products (m, k) @ (k, n), operands named by `names`; `bias` elements are read, too.

    Useful FLOP   2 batch m n k: the products, without the bias
    Issued FLOP   2 batch ⌈m/BM⌉ BM ⌈n/BN⌉ BN k, with the tile (BM, BN) at most as large as the output, rounded up to 16
    Requested B   first ⌈n/BN⌉ b m k; second ⌈m/BM⌉ b n k; output b m n
    Compulsory B  b m k + b n k, b m n written; `least` names operands that have fewer distinct bytes, as an expanded one
    """
    bm, bn = min(tile[0], cdiv(m, 16) * 16 or 16), min(tile[1], cdiv(n, 16) * 16 or 16)
    x, w, y = names
    tiles_m, tiles_n, live = cdiv(m, bm), cdiv(n, bn), min(1, m * n)
    reads = {x: itemsize * batch * m * k * tiles_n, w: itemsize * batch * n * k * tiles_m}
    reads_min = {x: itemsize * batch * m * k * live, w: itemsize * batch * n * k * live} | (least or {})
    out = {y: itemsize * batch * m * n}
    if bias:
        reads["bias"], reads_min["bias"] = itemsize * bias * tiles_m, itemsize * bias * live
    flop = 2 * batch * m * n * k
    return Cost(flop, 2 * batch * tiles_m * bm * tiles_n * bn * k, reads, out, reads_min, dict(out))


def products_of(op: str, pixels: int, c_out: int, c_in: int, kernel: tuple[int, ...], groups: int) -> tuple[int, int, int]:
    """(m, n, k) of each group's product in a convolution's forward, dx or dw, of as many multiplications all three."""
    n, k, taps = c_out // groups, c_in // groups, prod(kernel)
    return {"dx": (pixels, k, n * taps), "dw": (n, k * taps, pixels)}.get(op, (pixels, n, k * taps))


def convolution(
    pixels: int, c_out: int, c_in: int, kernel: tuple[int, ...], itemsize: int, tile: Tile, *, groups: int = 1, x: int, w: int, y: int,
    names: tuple[str, str, str] = ("x", "w", "y"), bias: int = 0, op: str = "forward",
) -> Cost:  # fmt: skip
    """A convolution as the matmul that it is, in `groups`, with `pixels` (batch x spatial positions of the output) and a kernel of `taps` positions.

    Forward       (pixels, c_in taps) @ (c_in taps, c_out)
    dX            (pixels, c_out taps) @ (c_out taps, c_in)
    dW            (c_out, pixels) @ (pixels, c_in taps)
    x, w, y: bytes of the operands by their place in the product, each moved once at least. Requested bytes count what slides over the kernel unfolded.
    """
    a, b, c = names
    found = matmul(*products_of(op, pixels, c_out, c_in, kernel, groups), itemsize, tile, batch=groups, names=names, bias=bias)
    moved = {a: x, b: w}
    reads = {n: max(v, moved.get(n, v)) for n, v in found.reads.items()}
    return Cost(found.flop_useful, found.flop_issued, reads, {c: y}, found.reads_min | moved, {c: y})


def attention(batch: int, heads: int, q: int, kv: int, d: int, dv: int, itemsize: int, kv_heads: int, extra: int = 0) -> Cost:
    """softmax(Q K^T) V, fused: batch x heads, q queries, kv keys, widths d (of Q and K) and dv (of V); causal masks do not lower the count.

    Useful FLOP   2 batch heads q kv (d + dv)
    Requested B   Q once, K and V for every ATTENTION_TILE queries, output once, `extra` bytes (a mask, the log-sum-exp) once
    """
    qb, ob = itemsize * batch * heads * q * d, itemsize * batch * heads * q * dv
    kb, vb = itemsize * batch * kv_heads * kv * d, itemsize * batch * kv_heads * kv * dv
    passes = cdiv(q, ATTENTION_TILE) * (heads // kv_heads)
    flop = 2 * batch * heads * q * kv * (d + dv)
    least = {"q": qb, "k": kb, "v": vb} | ({"saved": extra} if extra else {})
    reads = least | {"k": kb * passes, "v": vb * passes}
    return Cost(flop, flop, reads, {"y": ob}, least, {"y": ob})


def attention_backward(batch: int, heads: int, q: int, kv: int, d: int, dv: int, itemsize: int, kv_heads: int, extra: int = 0) -> Cost:
    """Its fused backward: dV, dP, dQ and dK, and S = Q K^T once more, which was not saved.

    Useful FLOP   2 batch heads q kv (2 d + 2 dv): twice the forward, the mathematics alone, as for attention that is not fused
    Issued FLOP   with S again: 2.5 times the forward for d = dv
    """
    qb, ob = itemsize * batch * heads * q * d, itemsize * batch * heads * q * dv
    kb, vb = itemsize * batch * kv_heads * kv * d, itemsize * batch * kv_heads * kv * dv
    passes = cdiv(kv, ATTENTION_TILE)
    product = 2 * batch * heads * q * kv
    least = {"dy": ob, "q": qb, "k": kb, "v": vb, "y": ob} | ({"saved": extra} if extra else {})
    reads = least | {"dy": ob * passes, "q": qb * passes}
    out = {"dq": qb, "dk": kb, "dv": vb}
    return Cost(product * (2 * d + 2 * dv), product * (3 * d + 2 * dv), reads, out, least, dict(out))


def stream(reads: dict[str, int], writes: dict[str, int]) -> Cost:
    """An op that reads and writes everything once: elementwise, reductions, copies. No products, so no FLOP."""
    return Cost(reads=dict(reads), writes=dict(writes), reads_min=dict(reads), writes_min=dict(writes))
