"""Stage `metadata`: a refresh, mask and lists of both directions, of one weight and of all of a model's, one by one and grouped, and its launches."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..kernels import lists, ops, reference
from ..kernels.dispatch import triton_ops
from ..kernels.grid import grid_shape, keep_count
from .cells import BLOCKS
from .gate import list_parts
from .inputs import TORCH_DTYPES
from .part import Part, Prepared

RATIO = 0.8
LAYER = (14_336, 4096)
MODEL = (LAYER, *((1536, 384), (384, 1536)) * 12, *(LAYER,) * 3)  # four of a language model, and twelve MLPs of a vision model
TINY_LAYER = (72, 100)
TINY_MODEL = (TINY_LAYER, (48, 32), (32, 48), (48, 32))
Parts = list[tuple[Tensor, Tensor]]  # (mask, packed lists) a weight


class Refresh(NamedTuple):
    """`scope`: layer or model. `form`: single, a weight after the other; or group, all in one set of launches. N, K: of a layer's weight."""

    scope: str
    form: str
    weights: int
    N: int | None
    K: int | None
    dtype: str
    block: int
    ratio: float


def _model(device: torch.device) -> tuple[tuple[int, int], ...]:
    return MODEL if device.type == "cuda" else TINY_MODEL


def cells(device: torch.device, quick: bool) -> list[Refresh]:
    model = _model(device)
    scopes = (("layer", 1, *model[0]), ("model", len(model), None, None))
    return [
        Refresh(scope, form, count, n, k, dtype, block, RATIO)
        for dtype in (("bf16",) if quick else ("bf16", "fp32"))
        for scope, count, n, k in scopes
        for block in BLOCKS
        for form in ("single", "group")
    ]


@cache
def _weights(dtype: str, device: torch.device) -> list[Tensor]:
    g = torch.Generator(device=device).manual_seed(0)
    return [torch.randn(shape, generator=g, device=device).to(TORCH_DTYPES[dtype]) for shape in _model(device)]


def _keeps(weights: list[Tensor], block: tuple[int, int], ratio: float) -> list[Tensor]:
    grids = [grid_shape(w.shape, block) for w in weights]
    return list(torch.tensor([keep_count(nb * kb, ratio) for nb, kb in grids], device=weights[0].device).unbind())


def _single(w: Tensor, keep: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    mask = ops.block_index(w, keep, keep, *block, "fro", "lowest", 0, "triton")  # `fro` does not look at the step
    return mask, ops.strip_lists(mask, *block, "triton")


@cache
def _expected(dtype: str, index: int, block: tuple[int, int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Mask and lists of a weight by plain PyTorch, which has the same bits on every device: here, where a CPU would take seconds."""
    w = _weights(dtype, device)[index]
    keep = _keeps([w], block, RATIO)[0]
    mask = reference.block_index(w, keep, torch.zeros_like(keep), block, "fro", "lowest", 0)
    return mask, lists.packed(mask, block)


def differs(got: Parts, cell: Refresh, device: torch.device) -> str:
    """Which weight's mask or lists are not those of plain PyTorch; empty where all are."""
    block = (cell.block, cell.block)
    for i, (mask, packed) in enumerate(got):
        want, listed = _expected(cell.dtype, i, block, device)
        pairs = zip(list_parts(packed, want, block), list_parts(listed, want, block), strict=True)
        if not torch.equal(mask, want) or not all(torch.equal(a, b) for a, b in pairs):
            return f"mask or lists of weight {i} differ from plain PyTorch's"
    return "" if len(got) == cell.weights else f"expected {cell.weights} weights, got {len(got)}"


def launches_of(call: Callable[[], Any]) -> int:
    """How many Triton kernels one call launches."""
    counter = triton_ops().launch.device.LAUNCHES
    before = counter.total()
    call()
    return int(counter.total() - before)


def prepare(cell: Refresh, device: torch.device) -> Prepared:
    weights, block = _weights(cell.dtype, device)[: cell.weights], (cell.block, cell.block)
    keeps = _keeps(weights, block, cell.ratio)

    def single() -> Parts:
        return [_single(w, keep, block) for w, keep in zip(weights, keeps, strict=True)]

    def group() -> Parts:
        return list(triton_ops().refresh_group(weights, keeps, block))

    call = group if cell.form == "group" else single
    size = sum(w.numel() * w.element_size() for w in weights)

    def check() -> tuple[float, str]:
        why = differs(call(), cell, device)
        return (1.0 if why else 0.0), why

    return Prepared(call, check, lambda ms: {"launches": launches_of(call), "bytes": size, "tb_per_s": size / ms / 1e9})


METADATA = Part("metadata", Refresh, ("launches", "bytes", "tb_per_s"), cells, prepare)
