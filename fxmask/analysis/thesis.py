"""The memory model of a thesis on weight masking, and one that counts tokens: closed forms over a list of layer shapes.

[T] is S. Bespalov, *Reducing Global Memory Accesses in DNN Training using Structured Weight Masking*, MSc thesis, Heidelberg 2025. Its model is the forward of
one batch: every weight once, and activations once a *sample*, in whole cache lines of 128 bytes, float32. The token-aware model beside it counts what a
linear reads and writes for every row, which is what moves: 36 times as much on the thesis' own model.

Not in the source, and so derived wherever they are used: how many lines a kept block takes (`VARIANTS`), and the number of batches.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from ..kernels.errors import ConfigError, ShapeError, message
from ..kernels.grid import RATIO_UNIT, check_block, clipped, grid_shape, keep_count, kept_elements, ratio_units
from ..passes.settings.checks import one_of
from .model_shapes import LinearShape, ModelShapes, positive

LINE = 128  # bytes of a cache line of the A30 that [T] trains on
GIB = 2**30
VARIANTS = {  # lines of a kept block of `rows` lines of `a` bytes each; what [T]'s text leaves open
    "A": "every row of a block begins a line: rows * ceil(a / 128)",
    "C": "a block lies in one piece, and its start is unaligned: ceil(rows * a / 128) + 1",
    "D": "every row begins anywhere: rows * (ceil(a / 128) + 1)",
    "K": "as A, and one line more a block: rows * ceil(a / 128) + 1",
}
MODELS = ("thesis", "tokens")


@dataclass(frozen=True)
class Movement:
    """Bytes that the forward of one batch moves, whole lines. `total` is at most `dense` where `cap` is set, as in [T]'s figures 6.1 and 6.2."""

    masked_weights: int  # lines of the kept blocks
    dense_weights: int  # the same weights without masks
    other_weights: int  # tensors that are not masked; biases of masked layers are left out, as [T] does
    activations: int
    cap: bool = True

    @property
    def dense(self) -> int:
        """Bytes a batch without masks."""
        return self.dense_weights + self.other_weights + self.activations

    @property
    def total(self) -> int:
        """Bytes a batch with masks."""
        moved = self.masked_weights + self.other_weights + self.activations
        return min(moved, self.dense) if self.cap else moved

    def gib(self, batches: float) -> float:
        """`total` of `batches` batches in GiB (2^30 bytes); [T] says GB. `batches` may be broken: 390.625 * 200 = 50,000 / 128 * 200."""
        return float(self.total * positive_real(batches) / GIB)

    def dense_gib(self, batches: float) -> float:
        """`dense` of `batches` batches in GiB."""
        return float(self.dense * positive_real(batches) / GIB)


def positive_real(batches: object) -> Fraction:
    """`batches` as an exact fraction; raises ConfigError unless it is a positive finite number."""
    if isinstance(batches, (int, float, Fraction)) and not isinstance(batches, bool) and math.isfinite(batches) and batches > 0:
        return Fraction(batches)
    raise ConfigError(f"batches: expected a positive finite number, got {batches!r}.")


def block_lines(rows: Any, cols: Any, *, itemsize: int = 4, variant: str = "A") -> Any:
    """128-byte lines of one kept block of `rows` x `cols` elements, by one of `VARIANTS`. Ints, or int64 tensors that broadcast.

    Derived: [T] describes variant D, whose figure at 32x32 and 80 % (291 GB) its text excludes (about 277).
    """
    if variant not in VARIANTS:
        known = "; ".join(f"{name}: {text}" for name, text in VARIANTS.items())
        raise ConfigError(message(f"variant: expected one of {', '.join(VARIANTS)}, got {variant!r}.", fix=known))
    row = -(-cols * positive(itemsize, "itemsize", ConfigError) // LINE)
    if variant == "C":
        return -(-rows * cols * itemsize // LINE) + 1
    return rows * (row + 1) if variant == "D" else rows * row + (variant == "K")


def tensor_bytes(elements: int, itemsize: int = 4) -> int:
    """Bytes of a dense tensor, rounded up to lines."""
    return -(-elements * itemsize // LINE) * LINE


def loaded_elements(linear: LinearShape, block: tuple[int, int], ratio: float | None = None, *, mask: Tensor | None = None) -> int:
    """Elements of the kept blocks of `linear`, all `count` of them: table 6.2 of [T] is their sum over the masked layers, times 391 * 200 batches.

    Exact with `mask` (bool, one entry a block). With `ratio` alone nobody knows whether ragged blocks are kept: every kept block counts whole there, at
    most the weight, which is an upper bound; where the block divides the weight both agree.
    """
    block, n = _checked(linear, block, ratio, mask)
    if mask is not None:
        return int(kept_elements(mask, linear.shape, block))
    return linear.count * min(n * math.prod(clipped(block, linear.shape)), linear.elements)


def kept_bytes(
    linear: LinearShape, block: tuple[int, int], ratio: float | None = None, *, mask: Tensor | None = None, itemsize: int = 4, variant: str = "A"
) -> int:
    """Bytes of the lines of the kept blocks of `linear`, all `count` of them; exact with `mask`, else with every kept block whole."""
    block, n = _checked(linear, block, ratio, mask)
    if mask is None:
        return linear.count * n * block_lines(*clipped(block, linear.shape), itemsize=itemsize, variant=variant) * LINE
    rows, cols = (_sides(size, b, mask.device) for size, b in zip(linear.shape, block, strict=True))
    return int((mask * block_lines(rows[:, None], cols[None, :], itemsize=itemsize, variant=variant)).sum()) * LINE


def movement(
    model: ModelShapes, block: tuple[int, int], ratio: float | None = None, *, masks: Mapping[str, Tensor] | None = None, batch: int = 128, variant: str = "A",
    memory_model: str = "thesis", itemsize: int = 4, cap: bool = True,
) -> Movement:  # fmt: skip
    """Bytes that one forward of a batch moves, by the model of [T] (figures 6.1 and 6.2) or with activations of every token.

    Args:
        model: layer shapes; `ModelShapes.resmlp()` is the thesis' CIFAR model.
        block: (rows, cols) of a block of the masked linears.
        ratio: masked fraction of the blocks, in [0, 1); or
        masks: {linear's name: bool [ceil(N / rows), ceil(K / cols)]}, as `fxmask.masks` gives them; a masked linear without one is loaded whole.
        batch: samples.
        variant: lines of a kept block, see `VARIANTS`.
        memory_model: "thesis": activations once a sample; "tokens": what every linear reads and writes.
        itemsize: bytes an element.
        cap: a masked forward moves no more than the dense one.

    Raises: ConfigError for options, ShapeError for masks that do not fit. Cost: none.

    Example:
        >>> moved = movement(ModelShapes.resmlp(), (32, 32), 0.8)
        >>> round(moved.dense_gib(391 * 200), 2), round(moved.gib(391 * 200), 2)
        (318.29, 278.01)
    """
    one_of("memory_model", memory_model, MODELS)
    positive(batch, "batch", ConfigError)
    positive(itemsize, "itemsize", ConfigError)
    masks = _masks(model, ratio, masks)
    whole = {m: m.count * tensor_bytes(m.elements, itemsize) for m in model.linears}
    maskable = [m for m in model.linears if m.masked]
    chosen = [m for m in maskable if ratio is not None or m.name in masks]
    loaded = {m: kept_bytes(m, block, ratio, mask=masks.get(m.name), itemsize=itemsize, variant=variant) for m in chosen}
    others = sum(whole[m] + m.bias * m.count * tensor_bytes(m.out_features, itemsize) for m in model.linears if not m.masked)
    others += sum(tensor_bytes(math.prod(shape), itemsize) for shape in model.tensors)
    samples = model.activations if memory_model == "thesis" else model.activations_by_token
    activations = sum(tensor_bytes(batch * n, itemsize) for n in samples)
    return Movement(sum(loaded.get(m, whole[m]) for m in maskable), sum(whole[m] for m in maskable), others, activations, cap)


def flop(model: ModelShapes, ratio: float) -> int:
    """FLOP of one sample's forward, 2 a multiplication, linears only, by the *target* ratio: figure 6.7 of [T], which calls it "per epoch".

    On its CIFAR model 23,987,456 - 23,592,960 * ratio. What a mask really keeps is `flop_kept`.
    """
    saved = Fraction(2 * model.maskable_macs * ratio_units(ratio), RATIO_UNIT)
    return round(2 * model.macs - saved)


def flop_kept(model: ModelShapes, block: tuple[int, int], ratio: float | None = None, *, masks: Mapping[str, Tensor] | None = None) -> int:
    """FLOP of one sample's forward by the elements that are kept: 64x64 blocks at 80 % keep a third of the thesis' model."""
    masks = _masks(model, ratio, masks)
    masked = [m for m in model.linears if m.masked and (ratio is not None or m.name in masks)]
    left_out = sum(m.macs - m.rows * loaded_elements(m, block, ratio, mask=masks.get(m.name)) for m in masked)
    return 2 * (model.macs - left_out)


def _sides(size: int, step: int, device: torch.device) -> Tensor:
    """Lengths of the blocks along one axis; the last may be ragged."""
    starts = torch.arange(0, size, step, device=device)
    return torch.clamp(size - starts, max=step)


def _masks(model: ModelShapes, ratio: float | None, masks: Mapping[str, Tensor] | None) -> Mapping[str, Tensor]:
    """`masks`, or none of them beside a ratio; raises unless exactly one of the two is given and every name is a masked linear's."""
    if (ratio is None) == (masks is None):
        raise ConfigError(f"expected either ratio or masks, got {'neither' if masks is None else 'both'}.")
    names = [m.name for m in model.linears if m.masked]
    unknown = sorted(set(masks or {}) - set(names))
    if unknown:
        raise ShapeError(message(f"masks: expected names of masked linears, got {unknown}.", fix=f"they are {', '.join(names)}"))
    return masks or {}


def _checked(linear: LinearShape, block: tuple[int, int], ratio: float | None, mask: Tensor | None) -> tuple[tuple[int, int], int]:
    """Block, and kept blocks of one weight."""
    block = check_block(block)
    grid = grid_shape(linear.shape, block)
    if (ratio is None) == (mask is None):
        raise ConfigError(f"{linear.name}: expected either ratio or a mask, got {'neither' if mask is None else 'both'}.")
    if mask is None:
        return block, keep_count(grid[0] * grid[1], ratio)  # type: ignore[arg-type]  # not None, by the line above
    if tuple(mask.shape) != grid or linear.count != 1 or mask.dtype != torch.bool:
        what = f"{linear.name}: expected a bool mask of {grid} blocks for one weight, got {mask.dtype} {tuple(mask.shape)} for {linear.count}."
        raise ShapeError(message(what, fix="one LinearShape with count=1 for each mask, and the block that the mask was made with"))
    return block, int(mask.sum())
