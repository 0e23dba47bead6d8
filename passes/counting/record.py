"""What a model does, op by op: it runs once on fake tensors, which have shapes and no memory, and every ATen op that arrives below autograd is written down.

Forward and backward are both run, so the record holds what autograd really does: no gradient for an input that needs none, recomputation inside checkpoints,
both gradients of an attention matmul. A backward op is put to the forward op that it belongs to by autograd's sequence numbers, and that one to its module by
the frames of the call stack: nothing is hooked into the model.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from ...kernels.grid import as_matrix, grid_shape, matrix_shape
from ..frames import frames
from ..graphs.graph_calls import BLOCK_INDEX
from .calls import Call, Mask, Place, is_real, storage_of, typical_mask
from .shapes import run
from .work import weights_gradients

CALL_CODE = nn.Module._call_impl.__code__
BACKWARD_CODE = torch.autograd.graph._engine_run_backward.__code__
OURS = {__file__, torch._compile.__file__, str(Path(torch.__file__).parent / "_dynamo" / "eval_frame.py")}  # between an op and the recorder
KEEP_ZEROS = {"aten.mul", "aten.div", "aten.where", "aten.copy_", "fxmask.graft"}  # ops of several tensors whose result is 0 wherever one of them is masked
SILENT = {"prim::device", "prim::layout", "aten::sym_size", "aten::sym_stride", "aten::sym_numel", "aten::sym_storage_offset", "aten::is_contiguous"}


class Recorder(TorchDispatchMode):
    """Writes down the ops of a model inside a FakeTensorMode.

    `modules`: {id(module): name}; `weights`: {storage of a fake parameter: (its name, the real parameter)}; `constants`: storages of fake buffers.
    """

    def __init__(self, modules: dict[int, str], weights: dict[int, tuple[str, Tensor]], constants: set[int]) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.typical: set[str] = set()  # weights whose masks were drawn, because they have no values
        self.modules, self.real, self.neutral = modules, weights, constants
        self.node, self.stack = "", ""  # of the graph that is being run
        self.frames: dict[int, tuple[FrameType, str]] = {}  # every call of a module that ran an op, and its name; a frame that is held keeps its id
        self.values: dict[int, Tensor] = {}  # by storage of a fake: inputs and buffers that are real, such as a Dynamo graph's number of kept blocks
        self.cached: dict[int, tuple[tuple[int, int], tuple[int, int]]] = {}  # by storage of a cached mask: its block, its weight's shape
        self.computed: dict[str, Tensor] = {}  # by module: the mask of a weight that a parametrisation makes
        self.masked_dw: set[str] = set()  # weights whose gradient is wanted in kept blocks alone
        self.uncounted: set[str] = set()  # weights whose number of kept blocks has no value
        self.fakes: dict[int, tuple[Tensor, Tensor]] = {}  # by id of a real tensor: it, and the fake one in its place
        self.leaves: dict[int, tuple[Tensor, Tensor | None]] = {}  # real tensors that a gradient would be written to, and the one that they had
        self.trained: set[int] = set()  # ids of those that got one
        self.written: dict[int, tuple[Tensor, Tensor]] = {}  # real tensors that an op wrote to, and what they held
        self.progress: Callable[[int], None] | None = None  # told how many ops there are so far
        self._derived: dict[int, tuple[str, Mask | None]] = {}  # storages computed from parameters alone
        self._copies: dict[int, tuple[str, Tensor]] = {}  # storages with a parameter's elements in their order, as `real` has parameters
        self._kept: list[Any] = []  # a storage that was freed would give its address to another
        self._by_seq: dict[int, Call] = {}
        self._of_weights: set[int] = set()  # storages of gradients of weights
        self._seq = torch.autograd._get_sequence_nr()

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Not one that the compiler must trace."""
        return True

    def _place(self, t: Tensor) -> Place:
        storage = t.untyped_storage()
        key = storage._cdata
        self._kept.append(storage)
        name, whole, mask, neutral = "", key in self.real, None, key in self.neutral
        if whole:
            name = self.real[key][0]
        elif key in self._derived:
            name, mask = self._derived[key]
        elif not isinstance(t, FakeTensor):  # a constant of the model's code
            neutral = True
            block, shape = self.cached.get(key, (None, None))
            mask = Mask(t, block, shape=shape) if t.dtype == torch.bool and t.dim() in (0, 2) and not t.is_meta else None
        offset = int(t.storage_offset()) * t.dtype.itemsize
        return Place(tuple(map(int, t.shape)), tuple(map(int, t.stride())), t.dtype, key, name, whole, mask, neutral, offset)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(self._fake_of, (args, kwargs or {}))
        schema = getattr(func, "_schema", None)  # of a higher-order op there is none
        if schema is not None and schema.name in SILENT:
            return func(*args, **kwargs)
        if schema is not None and schema.is_mutable:
            self._keep(func, args, kwargs)
        composite = hasattr(func, "decompose") and torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
        if composite:
            with self:
                found = func.decompose(*args, **kwargs)
            if found is not NotImplemented:
                return found
        now = torch.autograd._get_sequence_nr()
        out = run(func, args, kwargs)
        self._note(func, args, kwargs, out, now)
        return out

    def _fake_of(self, a: Any) -> Any:
        """The fake tensor in the place of a real one, which an object or a closure of the model has kept."""
        if not isinstance(a, Tensor) or isinstance(a, FakeTensor):
            return a
        if a.requires_grad and a.is_leaf and id(a) not in self.leaves:
            self.leaves[id(a)] = (a, a.grad)
            a.grad = None  # so that this run's is seen
        return self.fakes.get(id(a), (a, a))[1]

    def _keep(self, func: Any, args: Any, kwargs: Any) -> None:
        """Note what a real tensor holds before an op writes to it: one that is no parameter and no buffer has no fake in its place."""
        given = {a.name: value for a, value in zip(func._schema.arguments, args, strict=False)} | kwargs
        for t in tree_leaves([given.get(a.name) for a in func._schema.arguments if a.is_write]):
            if isinstance(t, Tensor) and not isinstance(t, FakeTensor) and not t.is_meta and id(t) not in self.written:
                with _disable_current_modes(), torch.no_grad():
                    self.written[id(t)] = (t, t.detach().clone())

    def restore(self) -> None:
        """Give back to real tensors what they held, and the gradients that they had."""
        with _disable_current_modes(), torch.no_grad():
            for t, held in self.written.values():
                t.detach().copy_(held)
            for t, grad in self.leaves.values():
                if t.grad is not None:
                    self.trained.add(id(t))
                t.grad = grad

    def _note(self, func: Any, args: Any, kwargs: Any, out: Any, now: int) -> None:
        places = tree_map(lambda a: self._place(a) if isinstance(a, Tensor) else a, (tuple(args), dict(kwargs)))
        node = torch._C._current_autograd_node()
        backward, recomputed = node is not None, node is not None and (torch.is_grad_enabled() or _in_a_call())
        module, kind = self._module()
        call = Call(func, places[0], places[1], [], module, kind, self.node, backward, recomputed)
        if call.differentiates:
            call.forward = self._by_seq.get(node._sequence_nr())  # none of AccumulateGrad, whose number is no op's
            if call.forward is not None:
                call.module, call.kind, call.node = call.forward.module, call.forward.kind, call.forward.node
            call.summed = call.op == "aten.add" and len(call.inputs) == 2 and _by_the_engine()
            call.of_weight = call.summed and all(p.storage in self._of_weights for p in call.inputs)
        elif now > self._seq:  # autograd made a node for this op just before it came here
            call.seq, self._seq = now - 1, now
            self._by_seq[call.seq] = call
        made = self._mask_of(func, args, kwargs) or _either(call)
        for t in tree_leaves(out):
            if isinstance(t, Tensor):
                self._note_origin(call, made, t)
                call.outputs.append(self._place(t))
        if call.differentiates:
            self._of_weights |= {p.storage for p in weights_gradients(call)}
        self.calls.append(call)
        if self.progress is not None:
            self.progress(len(self.calls))

    def _note_origin(self, call: Call, made: Mask | None, t: Tensor) -> None:
        """Note of a result what it is made of: parameters alone, with what mask, or nothing that an input moves. `made`: the mask that the call makes."""
        key, inputs = storage_of(t), call.inputs
        if made is None:
            if any(p.of_inputs for p in inputs) or (call.differentiates and all(p.storage != key for p in inputs)):
                self.neutral.discard(key)
                self._derived.pop(key, None)
                return
            if call.differentiates:  # a view of what it was
                return
        if key in self.real:  # likewise
            return
        mask = made or _inherited(call)
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

    def _mask_of(self, func: Any, args: Any, kwargs: Any) -> Mask | None:
        """The values of the mask that a `block_index` gives, from the real weight; a typical one where there are no real values."""
        if func is not BLOCK_INDEX:
            return None
        w, keep, block = args[0], self.values.get(storage_of(args[1]), args[1]), (args[3], args[4])
        real, grid = self.real.get(storage_of(w), self._copies.get(storage_of(w))), grid_shape(w.shape, block)
        with _disable_current_modes(), torch.no_grad():
            computed = self.computed.get(self._module()[0]) if real is None else None
            if real is not None and is_real(real[1]) and real[1].dim() >= 2 and matrix_shape(real[1].shape) == w.shape and is_real(keep):
                scalars, cover = (keep, self.values.get(storage_of(args[2]), args[2])), args[9] if len(args) > 9 else kwargs.get("cover", False)
                values = func(as_matrix(real[1].detach()).to(w.dtype), *scalars, *args[3:8], cover=cover).cpu()  # by any impl, all give the same bits
            elif computed is not None and tuple(computed.shape) == grid:
                values = computed
            else:
                name = self._derived.get(storage_of(w), (real[0] if real else "", None))[0]
                (self.typical if is_real(keep) else self.uncounted).add(name)
                values = typical_mask(grid, int(keep) if is_real(keep) else grid[0] * grid[1])
            return Mask(values, block, shape=tuple(w.shape))

    def _module(self) -> tuple[str, str]:
        """Name and class of the innermost module whose call is on the stack, and what the graph says of its node."""
        found: tuple[str, str] | None = None
        for frame in frames():
            if frame.f_code is CALL_CODE:
                m = frame.f_locals["self"]
                name = self.modules.get(id(m))
                if name is not None:
                    self.frames.setdefault(id(frame), (frame, name))
                    found = found or (".".join(p for p in (name, self.stack if isinstance(m, torch.fx.GraphModule) else "") if p), type(m).__name__)
        return found or (self.stack, "")


def _inherited(call: Call) -> Mask | None:
    """The mask of what is made of a masked weight: zeros stay where they are unless numbers of another tensor are added, or multiplied as a matrix."""
    if call.op not in KEEP_ZEROS and sum(p.dtype.is_floating_point and p.numel > 1 for p in call.inputs) > 1:
        return None
    return next((p.mask for p in call.inputs if p.mask is not None), None)


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


def _in_a_call() -> bool:
    """Whether an op of a backward is of a module's call inside it: a checkpoint's second forward, also where it runs, as custom ops do, without grad mode."""
    return next((f.f_code is CALL_CODE for f in frames() if f.f_code in (CALL_CODE, BACKWARD_CODE)), False)


def _by_the_engine() -> bool:
    """Whether no Python code calls an op of a backward, nor a node of autograd that Python code made: the engine sums gradients so, under the node before."""
    for f in frames():
        if f.f_code.co_filename not in OURS:
            return f.f_code is BACKWARD_CODE
    return True  # a thread of the engine
