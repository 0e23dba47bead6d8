"""What a model does, op by op: it runs once on fake tensors, which have shapes and no memory, and every ATen op that arrives below autograd is written down.

Forward and backward are both run, so the record holds what autograd really does: no gradient for an input that needs none, recomputation inside checkpoints,
both gradients of an attention matmul. A backward op is put to the forward op that it belongs to by autograd's sequence numbers, and that one to its module by
the frames of the call stack: nothing is hooked into the model. What the tensors of an op are made of is known to `origins`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from ..frames import frames
from .calls import Call
from .fakes import Views, sparse_result, view_of
from .origins import Origins
from .shapes import run
from .work import meets_weight, weights_gradients

CALL_CODE = nn.Module._call_impl.__code__
BACKWARD_CODE = torch.autograd.graph._engine_run_backward.__code__
OURS = {__file__, torch._compile.__file__, str(Path(torch.__file__).parent / "_dynamo" / "eval_frame.py")}  # between an op and the recorder
SILENT = {"prim::device", "prim::layout", "aten::sym_size", "aten::sym_stride", "aten::sym_numel", "aten::sym_storage_offset", "aten::is_contiguous"}


class Recorder(TorchDispatchMode):
    """Writes down the ops of a model inside a FakeTensorMode.

    `modules`: {id(module): name}; `fakes`: {id of a real tensor: (it, and the fake one in its place)}; `views`: of the parameters, for views of real ones;
    `progress`: told how many ops there are so far.
    """

    def __init__(
        self, modules: dict[int, str], origins: Origins, fakes: dict[int, tuple[Tensor, Tensor]], views: Views, progress: Callable[[int], None] | None
    ) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.modules, self.origins, self.fakes, self.views, self.progress = modules, origins, fakes, views, progress
        self.node, self.stack = "", ""  # of the graph that is being run
        self.frames: dict[int, tuple[FrameType, str]] = {}  # every call of a module that ran an op, and its name; a frame that is held keeps its id
        self.watched: dict[int, Tensor] = {}  # real tensors that were looked at; one that is held keeps its id
        self.leaves: dict[int, tuple[Tensor, Tensor | None]] = {}  # real tensors that a gradient would be written to, and the one that they had
        self.trained: set[int] = set()  # ids of those that got one
        self.written: dict[int, tuple[Tensor, Tensor]] = {}  # real tensors that an op wrote to, and what they held
        self._by_seq: dict[int, Call] = {}
        self._inside: dict[int, Call] = {}  # of a function that has a backward of its own: the op in it that meets a weight, where its first one does not
        self._of_weights: set[int] = set()  # storages of gradients of weights
        self._seq = torch.autograd._get_sequence_nr()

    supports_higher_order_operators = True  # they come here, to be refused in words

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Not one that the compiler must trace."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(func, HigherOrderOperator):
            raise NotImplementedError(f"the bodies of {func.name()} are not counted, as which of them run, and how often, values may decide.")
        args, kwargs = tree_map(self._fake_of, (args, kwargs or {}))
        schema = getattr(func, "_schema", None)
        if schema is not None and schema.name in SILENT:
            return func(*args, **kwargs)
        if schema is not None and schema.is_mutable:
            self._keep(func, args, kwargs)
        if hasattr(func, "decompose") and torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            with self:
                found = func.decompose(*args, **kwargs)
            if found is not NotImplemented:
                return found
        now = torch.autograd._get_sequence_nr()
        out = run(func, args, kwargs)
        self._note(func, args, kwargs, out, now)
        return out

    def watch(self, t: Tensor) -> None:
        """Set the gradients of a real tensor, or of what it was made of, aside, so that this run's are seen: until `restore`."""
        if t.requires_grad and id(t) not in self.watched:
            self.watched[id(t)] = t
            for leaf in _leaves(t):
                if id(leaf) not in self.leaves:
                    self.leaves[id(leaf)] = (leaf, leaf.grad)
                    leaf.grad = None

    def _fake_of(self, a: Any) -> Any:
        """The fake tensor in the place of a real one, which an object or a closure of the model has kept."""
        if not isinstance(a, Tensor) or isinstance(a, FakeTensor):
            return a
        self.watch(a)
        return self.fakes[id(a)][1] if id(a) in self.fakes else view_of(a, self.views)

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
        places = tree_map(lambda a: self.origins.place(a) if isinstance(a, Tensor) else a, (tuple(args), dict(kwargs)))
        node = torch._C._current_autograd_node()
        backward, recomputed = node is not None, node is not None and _runs_again()
        fresh = now > self._seq  # autograd made a node for this op just before it came here
        call = Call(func, places[0], places[1], [], *self.module(), self.node, backward, recomputed)
        if call.differentiates:
            number = node._sequence_nr()
            call.forward = self._by_seq.get(number)  # none of AccumulateGrad, whose number is no op's
            if isinstance(node, torch.autograd.function.BackwardCFunction):
                call.forward = self._inside.get(number, call.forward)
            if call.forward is not None:
                call.module, call.kind, call.node = call.forward.module, call.forward.kind, call.forward.node
            call.summed = call.op == "aten.add" and len(call.inputs) == 2 and _by_the_engine()
            call.of_weight = call.summed and all(p.storage in self._of_weights for p in call.inputs)
        elif not (fresh or torch.is_grad_enabled()) and meets_weight(call) and not meets_weight(self._by_seq.get(self._seq - 1)) and _in_a_function():
            self._inside.setdefault(self._seq - 1, call)
        if fresh:
            self._by_seq[now - 1], self._seq = call, now
        made = self.origins.mask_made(call, args)
        for t in tree_leaves(out):
            if isinstance(t, Tensor):
                if t.layout != torch.strided:
                    raise sparse_result(call, t)
                self.origins.note(call, made, t)
                call.outputs.append(self.origins.place(t))
        if call.differentiates:
            self._of_weights |= {p.storage for p in weights_gradients(call)}
        self.calls.append(call)
        if self.progress is not None:
            self.progress(len(self.calls))

    def module(self) -> tuple[str, str]:
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


def _leaves(t: Tensor) -> list[Tensor]:
    """The tensors that a backward writes a gradient to: itself, or what it was made of before the run."""
    if t.is_leaf:
        return [t]
    todo, seen = list[Any]([t.grad_fn]), set[Any]()
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            todo += [n for n, _ in node.next_functions]
    return [node.variable for node in seen if hasattr(node, "variable")]


def _in_a_function() -> bool:
    """Whether an op is of the forward of a function that has a backward of its own."""
    forwards, classes = set[Any](), list[Any]([torch.autograd.Function])
    for c in classes:  # grows
        classes += c.__subclasses__()
        forwards.add(getattr(c.forward, "__code__", None))
    return any(f.f_code in forwards for f in frames())


def _runs_again() -> bool:
    """Whether an op of a backward is of a second forward: of a module's call or a checkpoint inside it, or under grad mode without create_graph."""
    on = torch.is_grad_enabled()  # custom ops run without
    for f in frames():
        if f.f_code is CALL_CODE or (on and f.f_code.co_filename == checkpoint.__file__):
            return True
        if f.f_code is BACKWARD_CODE:
            return on and not f.f_locals["args"][2]  # create_graph
    return on and not _by_the_engine()


def _by_the_engine() -> bool:
    """Whether no Python code calls an op of a backward, nor a node of autograd that Python code made: the engine sums gradients so, under the node before."""
    return next((f.f_code is BACKWARD_CODE for f in frames() if f.f_code.co_filename not in OURS), True)  # none but ours: a thread of the engine
