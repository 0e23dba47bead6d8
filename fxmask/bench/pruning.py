"""Stage `pruning`: dW from a pruned input, at the operator shapes of Barley and Fröning 2023 (figures 4 and 5), beside the product with the whole input."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels import prune, prune_ops, reference
from ..kernels.dispatch import triton_ops
from ..kernels.layer_cost import pruned_dw as cost_of
from .inputs import TORCH_DTYPES, make_mask
from .part import Part, Prepared
from .tolerance import missed

INPUT, OUTPUTS = (64, 196, 384), (384, 1536)  # samples, rows and features; D of the figures
TINY_INPUT, TINY_OUTPUTS = (2, 20, 72), (40,)
CPU_INPUT = (16, 196, 384)
FEATURES = (64, 16, 32, 128)
RATIOS = (0.5, 0.8, 0.9, 0.1, 0.2, 0.3, 0.4, 0.6, 0.7)
W_BLOCK, W_RATIO = (64, 64), 0.8  # of the weight mask beside it
OWN = ("triton", "kernel")


class Pruned(NamedTuple):
    """`form`: dense, the product with the whole input; reference, the pruned one expanded; triton, list and kernel; kernel, the list given; fxmask, what the
    library takes on a CPU. The input is samples x rows x K; N: out_features; block: features of a block of the input, which `ratio` is of; `w_ratio`: of a
    weight mask in blocks of 64x64, 0 without one.
    """

    form: str
    samples: int
    rows: int
    K: int
    N: int
    dtype: str
    block: int
    ratio: float
    w_ratio: float


def cells(device: torch.device, quick: bool) -> list[Pruned]:
    """The ratios that decide first."""
    on_gpu = device.type == "cuda"
    outputs, dtypes = (OUTPUTS, ("bf16", "tf32", "fp32")) if on_gpu else (TINY_OUTPUTS, ("fp16",))
    return _of(INPUT if on_gpu else TINY_INPUT, outputs, dtypes, quick, OWN)


def cpu_cells(quick: bool) -> list[Pruned]:
    """A quarter of the figures' samples, in float32."""
    return _of(CPU_INPUT, OUTPUTS, ("fp32",), quick, ("fxmask",))


def _of(shape: tuple[int, int, int], outputs: tuple[int, ...], dtypes: tuple[str, ...], quick: bool, own: tuple[str, ...]) -> list[Pruned]:
    ratios, blocks = (RATIOS[:2], FEATURES[:1]) if quick else (RATIOS, FEATURES)
    found = [Pruned("dense", *shape, n, dtype, 0, 0.0, 0.0) for n in outputs for dtype in dtypes]
    for ratio in ratios:
        for dtype in dtypes:
            for n in outputs:
                for block in blocks:
                    forms = ("reference", *own) if block == FEATURES[0] else own
                    found += [Pruned(form, *shape, n, dtype, block, ratio, 0.0) for form in forms]
                found += [Pruned(form, *shape, n, dtype, FEATURES[0], ratio, W_RATIO) for form in ("reference", own[0])]
    return found


class Operands(NamedTuple):
    x: Tensor
    gy: Tensor
    values: Tensor
    numbers: Tensor  # of the blocks


@cache
def _inputs(shape: tuple[int, int, int], n: int, dtype: str, device: torch.device) -> tuple[Tensor, Tensor]:
    g = torch.Generator(device=device).manual_seed(0)
    x, gy = (torch.randn(*shape[:2], features, generator=g, device=device).to(TORCH_DTYPES[dtype]) for features in (shape[2], n))
    return x, gy


def _operands(cell: Pruned, device: torch.device) -> Operands:
    x, gy = _inputs((cell.samples, cell.rows, cell.K), cell.N, cell.dtype, device)
    width = cell.block or x.shape[2]
    blocks = prune.block_count(x.shape[1], x.shape[2], width)
    return Operands(x, gy, *prune.compress(x, width, blocks - prune.dropped_count(blocks, cell.ratio), False))


def prepare(cell: Pruned, device: torch.device) -> Prepared:
    o, tf32 = _operands(cell, device), cell.dtype == "tf32"
    shape, k = tuple(o.x.shape), o.x.shape[2]
    grid = (-(-cell.N // W_BLOCK[0]), -(-k // W_BLOCK[1]))
    mask = make_mask(grid, cell.w_ratio, "random", 0).to(device) if cell.w_ratio else None

    def plain(o: Operands) -> Tensor:  # the oracle, too
        dw = prune.dw(o.gy, o.values, o.numbers, shape, False)
        return dw if mask is None else reference.masked(dw, mask, W_BLOCK)

    def ours(lists: tuple[Tensor, Tensor, Tensor] | None = None) -> Tensor:
        return triton_ops().prune_launch.pruned_dw(o.gy, o.values, o.numbers, shape, mask, W_BLOCK, tf32=tf32, by_strip=lists)

    placed = prune.strip_rows(o.numbers, shape[1], -(-k // cell.block)) if cell.form == "kernel" else None
    calls: dict[str, Callable[[], Tensor]] = {
        "dense": lambda: o.gy.reshape(-1, cell.N).t() @ o.x.reshape(-1, k),
        "reference": lambda: plain(o),
        "triton": ours,
        "kernel": lambda: ours(placed),
        "fxmask": lambda: prune_ops.pruned_dw(o.gy, o.values, o.numbers, list(shape), False, mask, *W_BLOCK),
    }

    torch.backends.cuda.matmul.allow_tf32 = tf32

    def call() -> tuple[Tensor]:
        return (calls[cell.form](),)

    def check() -> tuple[float, str]:
        exact, low = plain(Operands(o.x.double(), o.gy.double(), o.values.double(), o.numbers)), plain(o)
        return missed(call()[0], exact, low, shape[0] * shape[1], tf32)

    by_kernel = cost_of(o.numbers.numel(), shape[0] * shape[1], (cell.N, k), cell.block or k, o.gy.dtype, mask, W_BLOCK, tf32=tf32)
    issued = {"flop_issued": by_kernel.flop_issued if cell.form in OWN else 2 * cell.N * o.x.numel()}

    def worth(ms: float) -> dict[str, float | int]:  # what a CPU's choice issues is not known here
        return {"flop": by_kernel.flop_useful, "tflop_per_s": by_kernel.flop_useful / ms / 1e9} | (issued if cell.form != "fxmask" else {})

    return Prepared(call, check, worth)


ALIKE = ("samples", "rows", "K", "N", "dtype")
PRUNING = Part("pruning", Pruned, ("flop", "flop_issued", "tflop_per_s"), cells, prepare, on_cpu=cpu_cells, alike=ALIKE, by="form")
