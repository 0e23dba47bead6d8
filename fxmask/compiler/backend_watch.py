"""Whether the graphs that the backend masked are the ones that train: Dynamo falls back to eager code without an error, and eager code is dense."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from ..decided import decided_by_apply, mark_again
from ..kernels.errors import StateError, UnsupportedError, first_of, message, warn
from ..passes.settings.config import WeightMask
from .backend_missed import APPLY, CONTAINER, SKIPPED, missed
from .computed import forget_computed, noting
from .shards import gathered, local, look


class Done(NamedTuple):
    """What a graph does to a linear: its mask, if it has one, the name that random masks of it go by, and what is dropped of its saved input."""

    mask: WeightMask | None = None
    stream_name: str = ""
    called: bool = True  # by a linear call, and not only an argument of something that takes weights
    activations: str | None = None
    product: bool = False  # with a parameter, and no linear
    dense: str = ""  # why it is not masked, or why one of its uses is not
    shape: tuple[int, ...] = ()  # of a weight that the graph computes
    made_of: tuple[int, ...] = ()  # and which inputs of the graph are Parameters that it is made of
    told: bool = False  # that names in the graph are not the model's
    required: bool = False  # by `require`

    @property
    def changes(self) -> bool:
        """Whether the graph is another one than without the backend."""
        return self.mask is not None or self.activations is not None

    @property
    def is_random(self) -> bool:
        """Whether the mask goes by the layer's name, not by its weight."""
        return self.mask is not None and self.mask.criterion == "random"


@dataclasses.dataclass
class Use:
    """What graphs do with one weight."""

    name: str
    masks: bool = False  # whether any masks it, or prunes the input
    required: bool = False
    done: Done | None = None  # by the last that ran
    calls: int = 0  # of those that mask it, with gradients on
    seen: int = 0  # how many these were at the last optimiser step
    gradient: weakref.ref[Tensor] | None = None  # at that step, and its version: several hooks may see one step, and several steps one gradient
    version: int = 0


@dataclasses.dataclass
class State:
    """Of a process that took the backend: whether a graph has reached it, and whether it was told that none has."""

    reached: bool = False
    told: bool = False


state = State()
_uses = WeakTensorKeyDictionary()  # real Parameter, under fully_shard the gathered one -> Use
_steps: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()  # with gradients of weights that no graph has met
_told = WeakTensorKeyDictionary()  # such weights, by their own memory, of which that was said
_installed: list[Any] = []


def asked() -> None:
    """Somebody took the backend: from now on optimiser steps are looked at."""
    if not _installed:
        _installed.append(register_optimizer_step_pre_hook(_before_step))


def watch(compiled: Callable[..., Any], found: list[tuple[str, Tensor, Done]], inputs: Sequence[Any]) -> Callable[..., Any]:
    """The compiled graph, noting its calls for the weights that it masks or leaves dense. `inputs`: what it was compiled for, among which the weights are.

    Dynamo calls one graph with the weights of several layers, where their frames are compiled on their own: those that are given count.
    Raises: StateError where one of them is a layer's that `apply` has left dense since, or in another model: Dynamo's guards do not see that.
    """
    if not found:
        return compiled
    places, note, warns = {id(given): i for i, given in enumerate(inputs)}, noting(found), True
    found = [f for f in found if not f[2].made_of]
    fixed = [(_use(name, w, done), done) for name, w, done in found if id(w) not in places]
    met = [(places[id(w)], name, done, weakref.ref(w), _use(name, w, done)) for name, w, done in found if id(w) in places]  # with the weight of the last call

    @functools.wraps(compiled)
    def counted(*args: Any) -> Any:
        nonlocal warns
        trains = torch.is_grad_enabled()  # an evaluation between two steps says nothing of what trains
        for use, done in fixed:
            use.calls, use.done = use.calls + (done.changes and trains), done
        for j, (i, name, done, last, use) in enumerate(met):
            w, other = args[i], last() is not args[i]
            if other:  # looked up only then, as a lookup costs microseconds
                if isinstance(w, FakeTensor):  # DDP's splitting of a graph asks a part what it would give
                    return compiled(*args)
                new = w not in _uses
                if new and done.changes:
                    mark_again()
            if done.changes and decided_by_apply(w):
                raise _decided(name)
            if other:
                if warns and new and last() is not None and done.is_random and not done.told:  # no new weight of the same layer
                    warns = False
                    _warn_of_sharing(name)
                use = _use(f"{name} (of another layer, which shares its graph)", w, done)
                met[j] = (i, name, done, weakref.ref(w), use)
            use.calls, use.done = use.calls + (done.changes and trains), done
        if note is not None:
            note(args)
        return compiled(*args)

    return counted


def _decided(name: str) -> StateError:
    what = "fxmask.apply has left a layer dense, and this graph, compiled before that or for another model, would mask it."
    return StateError(message(what, name, "call torch._dynamo.reset() and compile again, or compile the applied model without backend='fxmask'."))


def _warn_of_sharing(name: str) -> None:
    """Of a layer that has the random mask of another one, `name`: regional compilation of blocks of one class makes each of them the root of its names."""
    what = "criterion='random' goes by names, and several layers, each compiled as a model of its own, share this graph and its name: their masks are the same."
    fix = "use fxmask.apply(model, ...), which knows the whole model; layers of one name in several models have one mask there, too, and are as they should be."
    warn(message(what, name, fix))


def watch_left(compiled: Callable[..., Any], inputs: Sequence[Any], weights: Sequence[Tensor]) -> Callable[..., Any]:
    """The compiled graph, where it is dense because `apply` has decided about its linears' `weights`. Raises StateError where it meets a plain model's."""
    places = [i for i, given in enumerate(inputs) if any(given is w for w in weights) and decided_by_apply(given)]
    if not places:
        return compiled

    @functools.wraps(compiled)
    def checked(*args: Any) -> Any:
        if not any(decided_by_apply(args[i]) for i in places):
            mark_again()
            if not any(decided_by_apply(args[i]) for i in places):
                what = "this graph was compiled dense, as fxmask.apply had decided, and meets a layer that apply has not seen, or has restored."
                raise StateError(message(what, "torch.compile(backend='fxmask')", "call torch._dynamo.reset() and compile again."))
        return compiled(*args)

    return checked


def seen(w: Tensor) -> Done | None:
    """What the last graph of the backend that has run with a weight does to it; None where none has, or `apply` has decided since."""
    look([w])
    use = _use_of(w)
    return None if use is None else use.done


def forget(model: torch.nn.Module, weights: Iterable[Tensor]) -> None:
    """`apply` has decided about a model, and these weights of it: what graphs did before is past."""
    forget_computed(model.parameters())
    for w in weights:
        if (use := _uses.get(w)) is not None:
            use.done = None


def _use(name: str, w: Tensor, done: Done) -> Use:
    found: Use | None = _uses.get(w)
    if found is None:
        found = _uses[w] = Use(name)
    found.masks |= done.changes
    found.required |= done.changes and done.required
    return found


def _use_of(w: Tensor) -> Use | None:
    """Of a weight as a model or an optimiser holds it."""
    found: Use | None = _uses.get(w)
    if found is None and (whole := gathered(w)) is not None:
        found = _uses.get(whole)
    return found


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling():
        return
    around: list[tuple[Use, Tensor]] = []
    unmet = []
    params = [p for group in optimizer.param_groups for p in group["params"] if isinstance(p, Tensor) and p.grad is not None]
    look(params)
    for p in params:
        use = _use_of(p)
        if use is None and p.dim() == 2 and local(p) not in _told:
            unmet.append(p)
        if use is None or not use.masks:
            continue
        grad = local(cast(Tensor, p.grad))
        same = use.gradient is not None and use.gradient() is grad and use.version == grad._version
        if use.calls == use.seen and not same:
            around.append((use, grad))
        else:
            _note(use, grad)
    for text in _missed(optimizer, unmet):
        warn(text)
    if around:
        _of_eager_gradients([use for use, _ in around])
    for use, grad in around:
        _note(use, grad)


def _note(use: Use, grad: Tensor) -> None:
    use.seen, use.gradient, use.version = use.calls, weakref.ref(grad), grad._version


def _of_eager_gradients(around: list[Use]) -> None:
    """Of weights whose gradients no masked graph has made. Raises: UnsupportedError where `require` says that they are masked; the step is then not made."""
    names = [u.name for u in sorted(around, key=lambda u: not u.required)]
    what = f"an optimiser step has gradients of {first_of(names, 3)} though no masked graph ran since the last one with gradients on"
    why = "Dynamo fell back to eager code (force_eager, the recompile limit, a graph break in a loop), or the model was called past its compiled form"
    fix = f"{why}: that is dense; fxmask.apply(model, ...) is masked in eager code, too."
    if any(u.required for u in around):
        raise UnsupportedError(message(f"{what}, and `require` wants them masked.", "", fix))
    warn(message(f"{what}.", "", fix))


def _missed(optimizer: torch.optim.Optimizer, unmet: list[Tensor]) -> list[str]:
    """What is to be said of weights that no graph has met. Raises: UnsupportedError where `require` says that they are masked.

    Looked into at the 1st, 2nd, 4th, 8th, ... such step: it takes tenths of a second, and an embedding is such a weight for good.
    """
    n = 0
    if unmet:
        n = _steps[optimizer] = _steps.get(optimizer, 0) + 1
    found = missed(unmet) if n and n & (n - 1) == 0 else []
    for m in found:
        if m.required:
            raise UnsupportedError(m.text)
    texts = [m.text for m in found]
    for w in (w for m in found for w in m.weights):
        _told[local(w)] = True
    if not state.reached and not state.told:
        state.told = True
        what = "an optimiser step in a process that asked for torch.compile(backend='fxmask'), and no graph has reached it: everything is dense so far."
        texts = texts or [message(what, "", f"{SKIPPED}; {CONTAINER}: compile what torch.compile(fullgraph=True) takes, {APPLY}")]
    return texts
