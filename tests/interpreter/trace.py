"""A recorder for Triton's interpreter: which elements of which operand a kernel loads and stores, and how often.

    with recording() as launches:
        launch.list_matmul(...)
    launches[-1].kernel, launches[-1].operands["w"].bytes_read, launches[-1].operands["w"].reads   # reads: counts in the shape of w

An access that is no element of an operand raises before it happens, in the gap between two rows of a strided operand too: the interpreter itself would read
whatever is there. Hooks Triton 3.6 and 3.7: all loads and stores go through the two masked builder calls, whatever form the kernel writes them in.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder
from triton.tools.tensor_descriptor import TensorDescriptor


class StrayAccess(AssertionError):
    """A load or store outside every operand."""


class Operand:
    """One tensor argument of one launch, with its counters."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor  # also keeps the memory, so that no later tensor gets the same addresses
        reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1 if tensor.numel() else 0
        self._loads, self._stores, self._exists = np.zeros(reach, np.int64), np.zeros(reach, np.int64), np.zeros(reach, bool)
        self._shaped(self._exists)[...] = True

    def _shaped(self, counts: np.ndarray) -> Tensor:
        return torch.from_numpy(counts).as_strided(self.tensor.shape, self.tensor.stride())

    def offsets(self, addresses: np.ndarray) -> np.ndarray | None:
        """Element offsets of byte addresses, or None where one of them is no element of this tensor."""
        size = self.tensor.element_size()
        relative = addresses.astype(np.int64) - self.tensor.data_ptr()
        if relative.min() < 0 or relative.max() >= len(self._exists) * size or (relative % size).any():
            return None
        at = relative // size
        return at if self._exists[at].all() else None

    def count(self, at: np.ndarray, store: bool) -> None:
        counts = self._stores if store else self._loads
        counts += np.bincount(at, minlength=len(counts))

    @property
    def reads(self) -> Tensor:
        """How often each element was loaded, int64 in the tensor's shape."""
        return self._shaped(self._loads)

    @property
    def writes(self) -> Tensor:
        """How often each element was stored."""
        return self._shaped(self._stores)

    @property
    def bytes_read(self) -> int:
        return int(self._loads.sum()) * self.tensor.element_size()

    @property
    def bytes_written(self) -> int:
        return int(self._stores.sum()) * self.tensor.element_size()

    @property
    def distinct_read(self) -> int:
        """Bytes that were loaded at least once."""
        return int((self._loads > 0).sum()) * self.tensor.element_size()

    @property
    def distinct_written(self) -> int:
        return int((self._stores > 0).sum()) * self.tensor.element_size()


@dataclass
class Launch:
    """One launch: the kernel's name, its operands and its other arguments by parameter name (`w_ptr` is `w`), and the FLOP of its dots."""

    kernel: str
    grid: tuple[int, ...]
    operands: dict[str, Operand] = field(default_factory=dict)
    scalars: dict[str, Any] = field(default_factory=dict)
    flop: int = 0

    def record(self, pointers: Any, mask: Any, store: bool) -> None:
        wanted = np.asarray(mask.data).astype(bool)  # a comparison of two scalars is 0 and 1 here, the mask of a descriptor a bare array
        addresses = np.broadcast_to(pointers.data, wanted.shape)[wanted]
        if not addresses.size:
            return
        # a tensor that a kernel gets twice, to work in place, is read by its first name and written by its last
        names = list(self.operands)
        for name in reversed(names) if store else names:
            at = self.operands[name].offsets(addresses)
            if at is not None:
                self.operands[name].count(at, store)
                return
        what = f"{self.kernel}: a {'store' if store else 'load'} of {addresses.size} elements is not within one operand"
        raise StrayAccess(f"{what}; first byte from each: { {name: int(addresses.min()) - o.tensor.data_ptr() for name, o in self.operands.items()} }")


@contextmanager
def recording() -> Iterator[list[Launch]]:
    """Record every launch of the block."""
    launches: list[Launch] = []
    arguments = GridExecutor._init_args_hst
    load, store, dot, atomic = (getattr(InterpreterBuilder, f"create_{name}") for name in ("masked_load", "masked_store", "dot", "atomic_rmw"))

    def begin(self: Any, args: Any, kwargs: Any) -> Any:
        args_hst, kwargs_hst = arguments(self, args, kwargs)  # these are the tensors that the kernel sees
        grid = self.grid if isinstance(self.grid, tuple) else ()
        launches.append(Launch(self.fn.__name__, grid))
        for name, value in {**dict(zip(self.arg_names, args_hst, strict=False)), **kwargs_hst}.items():
            value = value.base if isinstance(value, TensorDescriptor) else value
            if isinstance(value, Tensor):
                launches[-1].operands[name.removesuffix("_ptr")] = Operand(value)
            else:
                launches[-1].scalars[name] = value
        return args_hst, kwargs_hst

    def recorded_load(self: Any, pointers: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        launches[-1].record(pointers, mask, store=False)
        return load(self, pointers, mask, *rest, **named)

    def recorded_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        launches[-1].record(pointers, mask, store=True)
        return store(self, pointers, value, mask, *rest, **named)

    def recorded_dot(self: Any, a: Any, b: Any, *rest: Any, **named: Any) -> Any:
        launches[-1].flop += 2 * a.data.size * b.data.shape[-1]
        return dot(self, a, b, *rest, **named)

    def recorded_atomic(self: Any, op: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        launches[-1].record(pointers, mask, store=False)
        launches[-1].record(pointers, mask, store=True)
        return atomic(self, op, pointers, value, mask, *rest)

    def refused(self: Any, *args: Any, **named: Any) -> Any:
        raise NotImplementedError("the recorder does not count compare-and-swap")

    hooks = {"create_masked_load": recorded_load, "create_masked_store": recorded_store, "create_dot": recorded_dot}
    hooks |= {"create_atomic_cas": refused, "create_atomic_rmw": recorded_atomic}
    with mock.patch.object(GridExecutor, "_init_args_hst", begin), mock.patch.multiple(InterpreterBuilder, **hooks):
        yield launches
