"""What graphs of the backend do to weights, noted as they run: `backend_steps` asks whether they are the ones that train, and `explain` what they have done."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.utils.weak import WeakTensorKeyDictionary

from ..decided import decided_by_apply, decided_weights, mark_again
from ..kernels.errors import StateError, message, warn
from ..passes.graphs.lifted import looked_up
from ..passes.settings.config import WeightMask
from ..passes.state.weak_sets import alive
from .computed import forget_computed, noting
from .shards import gathered, look


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

    def runs(self, done: Done, counts: bool) -> None:
        """A graph runs that does this to the weight; `counts`: it masks it, with gradients on."""
        self.calls += counts
        self.done = done


@dataclasses.dataclass
class Met:
    """Where a graph is given a weight; the weight of its last call, and what is noted of that."""

    place: int
    name: str
    done: Done
    last: weakref.ref[Tensor]
    use: Use


uses = WeakTensorKeyDictionary()  # real Parameter, under fully_shard the gathered one -> Use


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
    met = [Met(places[id(w)], name, done, weakref.ref(w), _use(name, w, done)) for name, w, done in found if id(w) in places]

    @functools.wraps(compiled)
    def counted(*args: Any) -> Any:
        nonlocal warns
        trains = torch.is_grad_enabled()  # an evaluation between two steps says nothing of what trains
        for use, done in fixed:
            use.runs(done, done.changes and trains)
        for m in met:
            w, last, changes = args[m.place], m.last(), m.done.changes
            other = last is not w
            if other and isinstance(w, FakeTensor):  # DDP's splitting of a graph asks a part what it would give
                return compiled(*args)
            new = other and w not in uses  # looked up only then, as a lookup costs microseconds
            if new and changes:
                mark_again()
            if changes and decided_by_apply(w):
                raise _decided(m.name)
            if new and warns and last is not None and m.done.is_random and not m.done.told:  # no new weight of the same layer
                warns = False
                _warn_of_sharing(m.name)
            if other:
                m.use = _use(f"{m.name} (of another layer, which shares its graph)", w, m.done)
                m.last = weakref.ref(w)
            m.use.runs(m.done, changes and trains)
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
    use = use_of(w)
    return None if use is None else use.done


def gradients_are_known(grads: Sequence[Any]) -> bool:
    """Whether gradients of matrices are there, all of weights that graphs have met, and under gradients those that they mask; or some are of a model that
    `apply` has decided about."""
    trained = [w for w in alive(uses) if (use := uses.get(w)) is not None and (use.calls or not use.masks)]  # type: ignore[arg-type,var-annotated]
    applied, met = ({id(w.grad) for w in known if w.is_leaf} for known in (decided_weights(), [*trained, *alive(looked_up)]))  # type: ignore[arg-type]
    of_matrices = [g for g in grads if g.dim() == 2]
    return any(id(g) in applied for g in grads) or (len(of_matrices) > 0 and all(id(g) in met for g in of_matrices))


def forget(model: torch.nn.Module, weights: Iterable[Tensor]) -> None:
    """`apply` has decided about a model, and these weights of it: what graphs did before is past."""
    forget_computed(model.parameters())
    for w in weights:
        if (use := uses.get(w)) is not None:
            use.done = None


def _use(name: str, w: Tensor, done: Done) -> Use:
    found: Use | None = uses.get(w)
    if found is None:
        found = uses[w] = Use(name)
    found.masks |= done.changes
    found.required |= done.changes and done.required
    return found


def use_of(w: Tensor) -> Use | None:
    """Of a weight as a model or an optimiser holds it."""
    found: Use | None = uses.get(w)
    if found is None and (whole := gathered(w)) is not None:
        found = uses.get(whole)
    return found
