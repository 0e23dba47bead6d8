"""What is written down of an op that ran: the call, the places of its tensors, and the masks among them."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


def storage_of(t: Tensor) -> int:
    """What tensors that share memory have in common."""
    return t.untyped_storage()._cdata


class Mask(NamedTuple):
    """The values of a block mask, bool [NB, KB], or of the flag of `rigl`, 0-d; the block where it is known."""

    values: Tensor
    block: tuple[int, int] | None = None
    whole_dw: bool = True  # the gradient of a weight that was multiplied by it is wanted everywhere, or nobody knows
    shape: tuple[int, int] | None = None  # of the weight as a matrix, where it is known
    storage: int = 0  # the memory that holds a weight multiplied by it row after row, so that a slice shows which elements it has


@dataclass(frozen=True)
class Place:
    """One tensor of a call: sizes, and what it is. Two places with the same `storage` are the same memory."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    storage: int
    weight: str = ""  # the parameter that it is, or is computed from alone; joined by + where there are several
    whole: bool = False  # it is that parameter itself, or a view of it
    mask: Mask | None = field(default=None, compare=False, repr=False)  # of a mask, and of a weight that was multiplied by one
    neutral: bool = False  # a constant: neither a weight nor computed from the model's inputs
    offset: int = 0  # bytes from the storage's begin
    number: float | None = None  # that each of its elements is, where it is known

    @property
    def of_inputs(self) -> bool:
        """Whether the model's inputs move it: neither a weight's nor a constant."""
        return not self.weight and not self.neutral

    @property
    def bytes(self) -> int:
        """Distinct bytes: an axis that is only expanded counts once, and windows that overlap do, where nothing lies between them."""
        n = self.dtype.itemsize
        for size, stride in zip(self.shape, self.stride, strict=True):
            n *= size if stride or size == 0 else 1
        return min(n, self.span)

    @property
    def span(self) -> int:
        """Bytes from the first element to the end of the last one."""
        if 0 in self.shape:
            return 0
        return self.dtype.itemsize * (1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True)))

    @property
    def view(self) -> tuple[int, int, tuple[int, ...], tuple[int, ...]]:
        """What tells it from other views of its storage."""
        return self.storage, self.offset, self.shape, self.stride

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def tokens(self) -> int:
        """Rows of features: the product of all axes but the last."""
        return prod(self.shape[:-1])


@dataclass
class Call:
    """One op that ran."""

    func: Any
    args: tuple[Any, ...]  # as given, every tensor a Place
    kwargs: dict[str, Any]
    outputs: list[Place]
    module: str
    kind: str  # the module's class
    node: str  # of the graph, where a graph was run
    backward: bool = False
    recomputed: bool = False
    forward: Call | None = None  # of a backward op, the forward op that it differentiates
    summed: bool = False  # by autograd itself: two gradients of one tensor
    of_weight: bool = False  # such a sum, of a weight's

    @property
    def op(self) -> str:
        """`aten.mm`, `fxmask.masked_linear`."""
        return str(getattr(self.func, "overloadpacket", self.func))

    @property
    def differentiates(self) -> bool:
        """Whether it is of a backward, and not of a forward that a backward runs again."""
        return self.backward and not self.recomputed

    @property
    def inputs(self) -> list[Place]:
        return [p for p in tree_leaves((self.args, self.kwargs)) if isinstance(p, Place)]

    @property
    def named(self) -> dict[str, Any]:
        """The arguments by the names of the op's schema, defaults included; none of an op without a schema."""
        schema = getattr(self.func, "_schema", None)
        arguments = [] if schema is None else schema.arguments
        found = {a.name: a.default_value for a in arguments if a.has_default_value()}
        return found | {a.name: value for a, value in zip(arguments, self.args, strict=False)} | self.kwargs

    @property
    def weights(self) -> set[str]:
        return {p.weight for p in self.inputs if p.weight}

    @property
    def aliases(self) -> bool:
        """Whether the op's schema says that all that it gives is memory of its arguments, and that it writes nothing."""
        schema = getattr(self.func, "_schema", None)
        return schema is not None and not schema.is_mutable and bool(schema.returns) and all(r.alias_info is not None for r in schema.returns)

    @property
    def writes(self) -> bool:
        """Whether the op writes into its arguments."""
        schema = getattr(self.func, "_schema", None)
        return schema is not None and schema.is_mutable

    @property
    def is_view(self) -> bool:
        """Whether nothing is moved: every output is memory of an input, and none is written to."""
        schema = getattr(self.func, "_schema", None)
        if schema is None or schema.is_mutable or not self.outputs:
            return False
        known = {p.storage for p in self.inputs}  # on fake tensors a view of a real one, such as a constant, lies elsewhere
        return self.aliases or all(p.storage in known for p in self.outputs)


def typical_mask(grid: tuple[int, int], keep: int) -> Tensor:
    """A mask with `keep` kept blocks, drawn at random, the same in every run: for weights that have no values."""
    n = grid[0] * grid[1]
    mask = torch.zeros(n, dtype=torch.bool, device="cpu")
    mask[torch.randperm(n, generator=torch.Generator().manual_seed(n), device="cpu")[:keep]] = True
    return mask.view(grid)


def is_real(t: Tensor) -> bool:
    return type(t) in (Tensor, nn.Parameter) and not t.is_meta
