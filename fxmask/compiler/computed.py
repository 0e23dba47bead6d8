"""Weights that compiled graphs compute (weight_norm, `F.linear(x, w * g)`): noted at the parameters that they are made of, as they are no model's own."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.fx import Node
from torch.utils.weak import WeakTensorKeyDictionary

from ..passes.finding.candidate import Candidate
from ..passes.graphs.bodies import Body
from ..passes.graphs.input_sources import is_held

if TYPE_CHECKING:
    from .backend_watch import Done

Key = tuple[str, frozenset[int]]  # a weight's name, and the ids of the Parameters that it is made of
_books = WeakTensorKeyDictionary()  # real Parameter -> {Key of a weight that it takes part in: what the last graph that has run does to that}


def made_of(found: Iterable[Candidate], bodies: Sequence[Body], real: Mapping[Node, Any]) -> dict[int, tuple[int, ...]]:
    """For the weights that a graph computes, by their ids: the places among the graph's inputs of the Parameters that they are made of.

    A part of a Parameter counts as one that it computes where code between two graphs has made it, as the weight of an expert that tokens choose.
    """
    origin = {n: source for body in bodies for n, source in body.origin.items()}
    places = {n: i for i, n in enumerate(real) if isinstance(_whole(real[n]), nn.Parameter)}
    own = {n for n, value in real.items() if _whole(value) is value or is_held(n)}
    computed = {id(c.weight): c.weight_node for c in found if c.weight_node is not None and origin.get(c.weight_node) not in own}
    return {w: tuple(sorted({places[n] for n in bodies[0].behind(node) if n in places})) for w, node in computed.items()}


def noting(found: Sequence[tuple[str, Tensor, Done]]) -> Callable[[Sequence[Any]], None] | None:
    """What a graph is to do in each call, with its inputs: note what it does to the weights that it computes. None where there are none."""
    ours = [(name, done) for name, _, done in found if done.made_of]
    last: list[tuple[list[Any], Key, list[dict[Key, Done]]]] = [([], ("", frozenset()), []) for _ in ours]
    if not ours:
        return None

    def note(args: Sequence[Any]) -> None:
        for j, (name, done) in enumerate(ours):
            known, key, books = last[j]
            given = [_whole(args[i]) for i in done.made_of]
            if not known or any(ref() is not p for ref, p in zip(known, given, strict=True)):  # looked up only then, as a lookup costs microseconds
                key, books = (name, frozenset(map(id, given))), [_books.setdefault(p, {}) for p in given]
                last[j] = [weakref.ref(p) for p in given], key, books
            for book in books:
                book[key] = done

    return note


def _whole(value: Any) -> Any:
    """The tensor that a view is of; anything else as it is."""
    return value._base if isinstance(value, Tensor) and value._base is not None else value


def computed(parameters: Iterable[Tensor]) -> dict[Key, Done]:
    """The weights that graphs have made of some of these parameters."""
    found: dict[Key, Done] = {}
    for p in parameters:
        found |= _books.get(p) or {}
    return found


def forget_computed(parameters: Iterable[Tensor]) -> None:
    """`apply` has decided about a model of these: what graphs did before is past."""
    for p in parameters:
        (_books.get(p) or {}).clear()
