"""What the tensors of a run on fake ones are made of, by their memory: which are parameters, which are computed from these alone, which are masks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from ...kernels.grid import as_matrix, grid_shape, matrix_shape
from ..graphs.graph_calls import BLOCK_INDEX
from .calls import Call, Mask, Place, is_real, storage_of, typical_mask
from .known_ops import KEEP_ELEMENTS, is_pointwise, number_made

JOIN = {"aten.cat", "aten.stack"}
OTHERS = (-0.7, 1.3)  # what an op of a masked element may be given beside it


class Origins:
    """`real`: {storage of a fake parameter: (its name, the real parameter)}; `neutral`: storages of constants, at first of fake buffers."""

    def __init__(self, real: dict[int, tuple[str, Tensor]], neutral: set[int]) -> None:
        self.real, self.neutral = real, neutral
        self.values: dict[int, Tensor] = {}  # by storage of a fake: inputs and buffers that are real, such as a Dynamo graph's number of kept blocks
        self.cached: dict[int, tuple[tuple[int, int], tuple[int, int]]] = {}  # by storage of a cached mask: its block, its weight's shape
        self.computed: dict[str, Tensor] = {}  # by module: the mask of a weight that a parametrisation makes
        self.masked_dw: set[str] = set()  # weights whose gradient is wanted in kept blocks alone
        self.typical: set[str] = set()  # weights whose masks were drawn, because they have no values
        self.uncounted: set[str] = set()  # weights whose number of kept blocks has no value
        self._numbers: dict[int, float | None] = {}  # by storage: the number that each of its elements is; None of what an op has written to
        self._derived: dict[int, tuple[str, Mask | None]] = {}  # storages computed from parameters alone
        self._copies: dict[int, tuple[str, Tensor]] = {}  # storages with a parameter's elements in their order, as `real` has parameters
        self._kept: list[Any] = []  # a storage that was freed would give its address to another

    def place(self, t: Tensor) -> Place:
        """A tensor of a call, with what it is."""
        storage = t.untyped_storage()
        key = storage._cdata
        self._kept.append(storage)
        name, whole, mask, neutral = "", key in self.real, None, key in self.neutral
        if whole:
            name = self.real[key][0]
        elif key in self._derived:
            name, mask = self._derived[key]
        elif not isinstance(t, FakeTensor):  # a constant of the model's code
            neutral, mask = True, self._constant(t)
        elif neutral and key in self.values:  # a buffer, as a trace by make_fx has its constants; of inputs, what a mask holds
            mask = self._constant(self.values[key])
        offset = int(t.storage_offset()) * t.dtype.itemsize
        return Place(tuple(map(int, t.shape)), tuple(map(int, t.stride())), t.dtype, key, name, whole, mask, neutral, offset, self._number(t, neutral))

    def _number(self, t: Tensor, neutral: bool) -> float | None:
        """The number that all elements are, where it is known: of a constant of one element, and no view of more, its value; bools are masks."""
        key = storage_of(t)
        if key in self._numbers or not neutral or t.numel() != 1 or t.untyped_storage().nbytes() > t.itemsize or t.dtype == torch.bool:
            return self._numbers.get(key)
        real = self.values.get(key, t.constant) if isinstance(t, FakeTensor) else t
        if real is None or not is_real(real):
            return None
        with _disable_current_modes(), torch.no_grad():
            return real.item()

    def _constant(self, t: Tensor) -> Mask | None:
        """The mask, or the flag of `rigl`, that a tensor with values is, if it is one."""
        block, shape = self.cached.get(storage_of(t), (None, None))
        return Mask(t, block, shape=shape) if t.dtype == torch.bool and t.dim() in (0, 2) and is_real(t) else None

    def mask_made(self, call: Call, args: Any) -> Mask | None:
        """The mask that a call makes. Of a `block_index` its values, from the real weight; typical ones where there are no real values."""
        if call.func is not BLOCK_INDEX:
            return _either(call)
        w, keep, block = args[0], self.values.get(storage_of(args[1]), args[1]), (args[3], args[4])
        real, grid = self.real.get(storage_of(w), self._copies.get(storage_of(w))), grid_shape(w.shape, block)
        with _disable_current_modes(), torch.no_grad():
            computed = self.computed.get(call.module) if real is None else None
            if real is not None and is_real(real[1]) and real[1].dim() >= 2 and matrix_shape(real[1].shape) == w.shape and is_real(keep):
                step = self.values.get(storage_of(args[2]), args[2])
                given = (as_matrix(real[1].detach()).to(w.dtype), keep, step, *args[3:8])
                values = call.func(*given, cover=call.named["cover"]).cpu()  # by any impl, all give the same bits
            elif computed is not None and tuple(computed.shape) == grid:
                values = computed
            else:
                name = self._derived.get(storage_of(w), (real[0] if real else "", None))[0]
                (self.typical if is_real(keep) else self.uncounted).add(name)
                values = typical_mask(grid, int(keep) if is_real(keep) else grid[0] * grid[1])
            return Mask(values, block, shape=tuple(w.shape))

    def note(self, call: Call, made: Mask | None, t: Tensor) -> None:
        """Note of a result what it is made of: parameters alone, with what mask, or nothing that an input moves. `made`: the mask that the call makes."""
        key, inputs = storage_of(t), call.inputs
        number = number_made(call)
        if number is not None or call.writes:
            self._numbers[key] = number
        if made is None:
            if any(p.of_inputs for p in inputs) or (call.differentiates and all(p.storage != key for p in inputs)):
                self.neutral.discard(key)
                self._derived.pop(key, None)
                return
            if call.differentiates:  # a view of what it was
                return
        if key in self.real:  # likewise
            return
        mask = made or _inherited(call, t)
        name = "+".join(sorted({n for p in inputs for n in p.weight.split("+") if n}))
        if not name:
            self.neutral.add(key)
            if mask is not None:  # a cached one, expanded
                self._derived[key] = ("", mask)
            return
        whole = mask is not None and mask.whole_dw and name not in self.masked_dw
        self._derived[key] = (name, mask and mask._replace(whole_dw=whole, storage=_rows_of(mask, inputs, t)))
        real = self.real.get(inputs[0].storage) if call.op == "aten.clone" else None
        if real is not None and real[1].shape == inputs[0].shape:  # a channels_last convolution is copied before it is seen as a matrix
            self._copies[key] = real


def _inherited(call: Call, made: Tensor) -> Mask | None:
    """The mask of what is made of a masked weight: an op that moves elements keeps zeros, and one that computes each by itself does where it gives 0 for 0.

    One that fills them, or adds to them, gives what is made of a mask and has no blocks.
    """
    masks = [p.mask for p in (call.inputs[1:] if call.op == "aten.copy_" else call.inputs) if p.mask is not None]
    if not masks:
        return None
    mask = next((m for m in masks if m.block is not None), masks[0])
    if call.op in JOIN:  # of how many elements its zeros are is not known
        return mask._replace(shape=None)
    if call.op == "aten.expand" and mask.shape is None and tuple(mask.values.shape) == tuple(made.shape[::2]) and made.stride()[1::2] == (0, 0):
        return mask._replace(block=(int(made.shape[1]), int(made.shape[3])))  # a mask that a graph was given, bit by bit
    if call.op == "fxmask.graft":  # has the gradient of the other one
        return mask._replace(whole_dw=_reaches_all(call.named["other"]))
    if call.aliases or call.op in KEEP_ELEMENTS or not (made.dtype.is_floating_point or is_pointwise(call)):
        return mask
    if call.op == "aten.where" and isinstance(value := call.args[1], Place) and (other := call.args[2]).number == 0 and _is(call.args[0], mask):
        with _disable_current_modes():  # other than a 0 to mask with is the straight-through one, of the same weight: its gradient reaches what value's does
            whole = _reaches_all(value) if other.weight else bool(mask.values.all())
            return mask._replace(whole_dw=whole, shape=mask.shape or matrix_shape(made.shape))
    return mask if is_pointwise(call) and _gives_zero(call, mask) else mask._replace(block=None)


def _is(p: Place, mask: Mask) -> bool:
    """Whether a tensor is a mask, or is told by one."""
    return p.mask is not None and p.mask.values is mask.values and p.mask.block == mask.block


def _reaches_all(p: Place) -> bool:
    """Whether the gradient of what a masked weight is made of reaches all of its elements."""
    return p.mask is None or p.mask.whole_dw


def _gives_zero(call: Call, mask: Mask) -> bool:
    """Whether an op that computes each element by itself gives 0 where a mask leaves something out, whatever its other arguments are."""

    def one(a: Any) -> Any:
        if not isinstance(a, Place):
            return a
        kind = None if a.dtype.is_floating_point or a.dtype.is_complex else a.dtype
        if a.number is not None:
            return torch.full((2,) if a.shape else (), a.number, device="cpu", dtype=kind)
        here = a.mask is not None and a.mask.block is not None and a.mask.values is mask.values
        others = OTHERS if kind is None else (False, True) if kind == torch.bool else (1, 2)
        return torch.tensor((0, 0) if here else others, device="cpu", dtype=kind or torch.float32)

    with _disable_current_modes(), torch.no_grad():
        try:
            found = call.func(*tree_map(one, call.args), **tree_map(one, call.kwargs))
        except (RuntimeError, TypeError):
            return False
        return isinstance(found, Tensor) and not found.any()


def _either(call: Call) -> Mask | None:
    """The values of a mask with the flag of `rigl`: the blocks whose gradient a backward wants."""
    if call.op != "aten.bitwise_or":
        return None
    masks = [p.mask for p in call.inputs]
    known = [m for m in masks if m is not None]
    if len(known) != 2 or sorted(m.values.dim() for m in known) != [0, 2]:
        return None
    with _disable_current_modes():
        one = next((m for m in known if m.block is not None), known[0])
        return Mask(known[0].values | known[1].values, one.block, shape=one.shape)


def _rows_of(mask: Mask, inputs: list[Place], made: Tensor) -> int:
    """The storage of a tensor made of a masked weight, where its elements lie as the weight's rows do; else 0."""
    key = storage_of(made)
    if mask.storage == key or made.dim() < 2 or not made.is_contiguous() or matrix_shape(made.shape) != mask.shape:
        return mask.storage if mask.storage == key else 0
    multiplied = any(p.mask is not None and p.dtype == torch.bool for p in inputs)
    copied = any(p.mask is not None and p.mask.storage == p.storage and p.shape == made.shape and p.stride == made.stride() for p in inputs)
    return key if multiplied or copied else 0
