"""A model as a list of shapes: what closed forms of FLOP and of bytes need to know of it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..kernels.errors import FxMaskError, ShapeError


def positive(value: object, name: str, error: type[FxMaskError] = ShapeError) -> int:
    """`value`, or `error` unless it is a positive int."""
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    raise error(f"{name}: expected a positive int, got {value!r}.")


@dataclass(frozen=True)
class LinearShape:
    """`count` linears of one shape, each applied to `rows` vectors a sample (tokens, or channels where tokens are mixed).

    `name` is the weight's name in the model, so that `fxmask.masks` finds it; the bias is loaded where the linear is not masked.
    """

    name: str
    out_features: int
    in_features: int
    masked: bool = True
    rows: int = 1
    count: int = 1
    bias: bool = True

    def __post_init__(self) -> None:
        for part in ("out_features", "in_features", "rows", "count"):
            positive(getattr(self, part), f"{self.name}: {part}")

    @property
    def shape(self) -> tuple[int, int]:
        """(out_features, in_features)."""
        return self.out_features, self.in_features

    @property
    def elements(self) -> int:
        """Elements of one weight."""
        return self.out_features * self.in_features

    @property
    def macs(self) -> int:
        """Multiplications a sample, all `count` linears."""
        return self.count * self.rows * self.elements


@dataclass(frozen=True)
class ModelShapes:
    """Linears, the shapes of all other parameters, and the sizes of the activations of one sample, each counted once."""

    linears: tuple[LinearShape, ...]
    tensors: tuple[tuple[int, ...], ...] = ()
    activations: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        names = [linear.name for linear in self.linears]
        if not names or len(set(names)) < len(names):
            raise ShapeError(f"linears: expected at least one, each with a name of its own, got {names}.")
        for size in (*self.activations, *(n for shape in self.tensors for n in shape)):
            positive(size, "sizes of tensors and activations")

    @classmethod
    def resmlp(cls, *, image: int = 32, channels: int = 3, patch: int = 4, dim: int = 64, depth: int = 5, expansion: int = 4, classes: int = 10) -> ModelShapes:
        """A ResMLP with masked linears in its blocks, as [T] (see `thesis`) counts it; the defaults are its CIFAR-10 model, table 5.1.

        Activations once a sample: the image and `dim` of the patch embedding, in and out features of each linear of the blocks, `dim` and `classes` of norm
        and head. Parameters: a linear on flattened patches, two affines and two gains a block, a last affine.
        """
        sizes = (image, channels, patch, dim, depth, expansion, classes)
        for size, name in zip(sizes, ("image", "channels", "patch", "dim", "depth", "expansion", "classes"), strict=True):
            positive(size, name)
        if image % patch:
            raise ShapeError(f"image: expected a multiple of patch={patch}, got {image}.")
        tokens, hidden = (image // patch) ** 2, expansion * dim
        linears = [LinearShape("embed.weight", dim, channels * patch**2, masked=False, rows=tokens)]
        for i in range(depth):
            linears.append(LinearShape(f"blocks.{i}.patch_mix.weight", tokens, tokens, rows=dim))
            linears.append(LinearShape(f"blocks.{i}.fc1.weight", hidden, dim, rows=tokens))
            linears.append(LinearShape(f"blocks.{i}.fc2.weight", dim, hidden, rows=tokens))
        linears.append(LinearShape("head.weight", classes, dim, masked=False))
        inside = [n for linear in linears[1:-1] for n in (linear.in_features, linear.out_features)]
        return cls(tuple(linears), ((dim,),) * (6 * depth + 2), (channels * image**2, dim, *inside, dim, classes))

    @property
    def parameters(self) -> int:
        """Elements of all parameters."""
        return sum(m.count * (m.elements + m.bias * m.out_features) for m in self.linears) + sum(math.prod(shape) for shape in self.tensors)

    @property
    def maskable(self) -> int:
        """Weight elements of the masked linears."""
        return sum(m.count * m.elements for m in self.linears if m.masked)

    @property
    def macs(self) -> int:
        """Multiplications of one sample's forward, linears only; a FLOP count is twice that."""
        return sum(m.macs for m in self.linears)

    @property
    def maskable_macs(self) -> int:
        """Those of them that the masked linears make."""
        return sum(m.macs for m in self.linears if m.masked)

    @property
    def activations_by_token(self) -> tuple[int, ...]:
        """Elements of one sample that linears read and write, each for all its rows."""
        return tuple(n for m in self.linears for _ in range(m.count) for n in (m.rows * m.in_features, m.rows * m.out_features))
