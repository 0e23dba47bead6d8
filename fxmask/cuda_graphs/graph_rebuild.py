"""Rebuilds of cached masks between replays, as CUDA graphs of their own: one by one their launches would take longer than the step that is replayed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from ..kernels.errors import message, warn
from ..kernels.score import NORMS
from ..passes.state import ranks
from ..passes.state.rebuild import Job, computed
from ..passes.state.site import Site

KEPT = 16  # graphs; masks that are due together are one
STATE = ("keep", "count", "mask", "lists", "flips", "score")  # what a rebuild reads and writes of a site


class Rebuilds:
    """What `rebuild.rebuild` calls instead of `computed`. The first rebuild of its kind runs as it is, and makes ready what a capture could not."""

    def __init__(self, make: Callable[..., Any], stream: Any) -> None:
        self._make, self._stream = make, stream
        self._graphs: dict[tuple[Any, ...], tuple[Any, list[Any]]] = {}  # by what is rebuilt; the graph, None so far, and what it reads and writes
        self.replays = 0

    def __call__(self, jobs: Sequence[Job]) -> None:
        if len({id(j.weight) for j in jobs}) < len(jobs) or not all(map(_is_fixed, jobs)):  # layers that share a weight share their mask by what the host knows
            computed(jobs)
            return
        kind, tensors = tuple(map(_kind, jobs)), [t for j in jobs for t in _tensors(j)]
        graph, known = self._graphs.get(kind, (None, None))
        if known is None or any(a is not b for a, b in zip(known, tensors, strict=True)):
            computed(jobs)
            if len(self._graphs) >= KEPT:  # those that were of another phase, or of weights that have moved, go; the others stay, and this one has no place
                self._graphs = {k: held for k, held in self._graphs.items() if _is_of_now(k)}
            if kind in self._graphs or len(self._graphs) < KEPT:
                self._graphs[kind] = None, [t for j in jobs for t in _tensors(j)]
            return
        if graph is None:
            graph = self._captured(jobs)
            self._graphs[kind] = graph, known
        if graph is False:
            computed(jobs)
            return
        graph.replay()
        self.replays += 1

    def _captured(self, jobs: Sequence[Job]) -> Any:
        """The graph; False, with a warning, where there can be none, as for want of memory: rebuilds run as they are."""
        graph = self._make(None, self._stream)
        try:
            graph.record(lambda: computed(jobs))
        except RuntimeError as e:
            what = f"rebuilds of masks cannot be captured, and run launch by launch between the replays: {str(e).splitlines()[0]}"
            warn(message(what, "fxmask.graphed", "make room on the device, or build masks less often (refresh)."))
            return False
        return graph


def _is_fixed(j: Job) -> bool:
    """Whether the device does the same in every such rebuild, and waits for nobody: exchanges count on the host, some norms wait, a first one comes once."""
    c, plain = j.site._fxmask_config, isinstance(j.weight, nn.Parameter) and not ranks.is_shard(j.weight)
    waits = c.criterion in NORMS and not NORMS[c.criterion].captured
    return plain and j.site._fxmask_in_place and not j.first and j.other is None and c.regrow is None and not waits


def _kind(j: Job) -> tuple[Any, ...]:
    """What Python decides in a rebuild, and where and how the weight lies, which `weight.data = ...` changes."""
    return j.site, j.weight, j.step, j.anew, _now(j.site, j.weight)


def _now(site: Site, weight: Tensor) -> tuple[Any, ...]:
    return site._fxmask_kind, site._fxmask_phase, weight.data_ptr(), weight.dtype, weight.stride()


def _is_of_now(kind: tuple[tuple[Any, ...], ...]) -> bool:
    """Whether such a rebuild can still come."""
    return all(then == _now(site, weight) for site, weight, _, _, then in kind)


def _tensors(j: Job) -> list[Any]:
    """Compared by identity, as a graph holds addresses."""
    return [j.site.__dict__[f"_fxmask_{name}"] for name in STATE]
