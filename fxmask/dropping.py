"""`BlockDropout` on modules: another forward by class swap, or an attribute of a layer that is masked; a Dropout right before it in an nn.Sequential rests."""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Proxy
from torch.nn.parameter import is_lazy

from .kernels.errors import ConfigError, UnsupportedError, first_of, message, warn
from .passes.finding.candidate import join
from .passes.finding.choose import Decision
from .passes.finding.graph_linears import around, graph_modules, name_now
from .passes.finding.weights import raw_weight
from .passes.graphs.fused_dropout import DroppedCall, FuseDropout, UnfuseDropout, dropout_before, is_plain_dropout, left_in
from .passes.graphs.graph_calls import DROPPED
from .passes.graphs.writes import Writes
from .passes.infra import run_passes
from .passes.settings.block_dropout import BlockDropout
from .swap import MaskedLinear, ran
from .swapped import Swapped, look_at_asked, masked_class, note_asked, of_now

DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


class DroppedLinear(Swapped):
    """Forward of a Linear with block dropout on its input (..., K). Mixed into a subclass of the layer's own class, never constructed."""

    _fxmask_prefix = "Dropped"
    _fxmask_dropping: BlockDropout
    bias: Tensor | None

    def forward(self, input: Tensor) -> Any:
        if not isinstance(self, DroppedLinear):
            return of_now(self, input)
        if isinstance(input, Proxy):
            what = "torch.fx.symbolic_trace cannot look into a layer with block dropout: expected a dense model."
            raise UnsupportedError(message(what, type(self).__name__, "trace first, then fxmask.apply(traced, BlockDropout(...))."))
        ran(self)
        look_at_asked(self)
        return self._fxmask_dropping.linear(input, raw_weight(self), self.bias, self.training)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, dropout: {self._fxmask_dropping.words()}"


class Pair:
    """What a Dropout and the linear that does its work both hold, so that copies of a model hold a copy of it.

    waiting: the thread whose forward of the Dropout no forward of the linear has followed yet, or 0. p: the Dropout's when it was fused. on: whether its last
    forward was in train(). rests: the Dropout itself; of a copy since that has run.
    """

    waiting = 0
    rests: weakref.ref[nn.Module] | None = None
    p: float
    on: bool | None = None

    def met(self, m: nn.Module) -> None:
        """The linear runs: its work is done, by its own training flag, whatever the Dropout's says."""
        self.waiting, on, self.on = 0, self.on, None
        if on is not None and on != m.training and not m._fxmask_dropping.mc:  # type: ignore[union-attr]
            of = ("train()", "drops nothing") if on else ("eval()", "drops")
            warn_of_fused(f"a Dropout in {of[0]} rests for the linear behind it, which is not, and {of[1]}: expected both in one mode.")
        gone = self.rests is not None and self.rests() is None
        if gone and m.training and not m._fxmask_dropping.mc:  # type: ignore[union-attr]
            warn_of_fused("a linear drops for a Dropout that is in the model no more: expected that where it was, or no dropout, got the linear's.")

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "rests"}  # a copy's Dropout is another one, or with another part of the model


def warn_of_fused(what: str) -> None:
    """Say what was done to a fused Dropout, which is without effect."""
    fix = "fxmask.restore(model), change the Dropout, then fxmask.apply again; train() and eval() of the whole model, or of the linear, are seen."
    warn(message(what, "nn.Sequential", fix))


class FusedDropout(nn.Dropout):
    """A Dropout whose work the next linear does."""

    _fxmask_pair: Pair

    def forward(self, input: Tensor) -> Any:
        if not isinstance(self, FusedDropout):
            return of_now(self, input)
        compiling, pair = torch.compiler.is_compiling(), self._fxmask_pair
        if not compiling:
            pair.on, pair.rests = self.training, pair.rests or weakref.ref(self)
            if self.p != pair.p:
                warn_of_fused(f"the p of a Dropout that rests for the linear behind it was changed: expected {pair.p:g}, of which it knows, got {self.p:g}.")
        if self.training and not compiling and torch._C._current_graph_task_id() == -1:  # a checkpoint's second forward may end here
            if pair.waiting == threading.get_ident():  # another thread may be on its way to the linear
                what = f"a Dropout(p={self.p:g}) rests for the linear behind it, and that has not run since: nothing was dropped there."
                fix = "fxmask.restore(model) before a layer is replaced or called alone, then fxmask.apply again."
                warn(message(what, "nn.Sequential", fix))
            pair.waiting = threading.get_ident()
        return input

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, fused into the next linear"


def fused_dropouts(model: nn.Module) -> dict[int, nn.Dropout]:
    """{id of a Linear: the Dropout right before it in an nn.Sequential}, of modules that are in one place only."""
    places = Counter(id(m) for _, m in model.named_modules(remove_duplicate=False))
    found = {}
    for m in model.modules():
        if isinstance(m, nn.Sequential) and type(m).forward is nn.Sequential.forward:
            children = list(m)
            for first, then in pairwise(children):
                if is_plain_dropout(first) and isinstance(then, nn.Linear) and places[id(first)] == places[id(then)] == 1:
                    found[id(then)] = first
    return found


def resolved(model: nn.Module, chosen: list[tuple[Decision, BlockDropout]]) -> list[tuple[Decision, BlockDropout, nn.Dropout | None]]:
    """The layers that drop, with p and the Dropout that is fused; those of graphs as they are, the pass knows their dropouts."""
    before, found = fused_dropouts(model), []
    graphs: dict[int, Writes] = {}
    for d, config in chosen:
        gm = d.candidate.host
        if gm is not None and id(gm) not in graphs:
            graphs[id(gm)] = Writes(gm)
        writes = graphs.get(id(gm))
        rates = [at[1] for n in d.candidate.nodes if (at := dropout_before(writes, n)) is not None] if writes is not None else []
        if config.p is None and any(not 0 <= p < 1 for p in rates):
            raise ConfigError(f"{d.candidate.name!r} is behind a dropout with p={max(rates)}: expected p in [0, 1), or exclude={d.candidate.name!r}.")
        if gm is not None and config.p is None and not rates:
            continue
        dropout = before.get(id(d.candidate.module)) if gm is None else None
        if gm is None and config.p is None:
            if dropout is None:
                continue
            if not 0 <= dropout.p < 1:
                raise ConfigError(f"{d.candidate.name!r} is behind a Dropout with p={dropout.p}: expected p in [0, 1), or exclude={d.candidate.name!r}.")
            config = dataclasses.replace(config, p=dropout.p)
        found.append((d, config, dropout))
    return found


def drop_inputs(model: nn.Module, chosen: list[tuple[Decision, BlockDropout, nn.Dropout | None]]) -> None:
    """Change what was chosen; masks are in place by then."""
    for d, config, dropout in chosen:
        m = d.candidate.module
        if d.candidate.host is None and m is not None:
            if not isinstance(m, MaskedLinear):
                m.__class__ = masked_class(type(m), DroppedLinear)
            m._fxmask_dropping = config  # type: ignore[assignment]
            note_asked(m, config)
            if dropout is not None:
                dropout.__class__ = FusedDropout
                dropout._fxmask_pair = m._fxmask_pair = pair = Pair()  # type: ignore[assignment]
                pair.p, pair.rests = dropout.p, weakref.ref(dropout)
    rewrite = FuseDropout([(d, config) for d, config, _ in chosen])
    for _, gm in graph_modules(model):
        run_passes(gm, [rewrite])


def _shortly_before(owner: nn.Module, layer: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """What stands between a layer and the one before it: modules without children and without matrices."""
    children = [(name, m) for name, m in owner._modules.items() if m is not None]  # one that is used twice is there twice
    at = next(i for i, (_, m) in enumerate(children) if m is layer)
    for name, m in reversed(children[:at]):
        if next(m.children(), None) is not None or any(is_lazy(p) or p.dim() > 1 for p in m.parameters()):
            return
        yield name, m


def warn_of_siblings(model: nn.Module, chosen: list[tuple[Decision, BlockDropout, nn.Dropout | None]]) -> None:
    """FxMaskWarning where a Dropout may stand before such a layer: in the module that holds both, whose forward alone knows the order, or in nn.Sequential."""
    names, found = [d.candidate.name for d, _, dropout in chosen if d.candidate.host is None and dropout is None], []
    for name in names:
        path = name.rpartition(".")[0]
        owner = model.get_submodule(path)
        if not isinstance(owner, (nn.ModuleList, nn.ModuleDict)) and owner is not model.get_submodule(name):
            in_turn = isinstance(owner, nn.Sequential) and type(owner).forward is nn.Sequential.forward
            others = _shortly_before(owner, model.get_submodule(name)) if in_turn else owner.named_children()
            found += [join(path, other) for other, m in others if isinstance(m, DROPOUTS) and m.p > 0]
    if found:
        shown = first_of(list(dict.fromkeys(found)))
        what = f"BlockDropout(p=...) drops beside {shown}, which stays: expected one dropout before a layer, and where one of them feeds it there are two."
        fix = "set that one's p to 0 where it does; a trace (torch.fx.symbolic_trace) shows which, and has it fused."
        warn(message(what, first_of(names), fix))


def warn_of_exports(model: nn.Module, chosen: list[tuple[Decision, BlockDropout, nn.Dropout | None]]) -> None:
    """FxMaskWarning where a graph is to drop that torch.export has made: its train() and eval() raise."""
    for name, gm in graph_modules(model):
        here = [d.candidate.name for d, config, _ in chosen if d.candidate.host is gm and not config.mc] if "eval" in gm.__dict__ else []
        if here:
            what = "what torch.export makes has no train() and eval(), and block dropout in it drops in every forward until it is told."
            fix = f"call .eval(), and .train(), of {join(name, DROPPED)!r} in it; or fxmask.apply on the nn.Module."
            warn(message(what, first_of(here), fix))


def undrop(model: nn.Module) -> None:
    """Make layers and Dropouts what they were."""
    for _, gm in graph_modules(model):
        run_passes(gm, [UnfuseDropout()])
    for m in model.modules():
        if isinstance(m, DroppedLinear):
            m.__class__ = m._fxmask_base  # type: ignore[assignment]
        if isinstance(m, FusedDropout):
            m.__class__ = nn.Dropout  # type: ignore[assignment]
        m.__dict__.pop("_fxmask_dropping", None)
        m.__dict__.pop("_fxmask_pair", None)


def dropped_layers(model: nn.Module) -> Iterator[tuple[str, BlockDropout]]:
    """(name of the layer, its configuration)."""
    graphs = list(graph_modules(model))
    for name, m in model.named_modules():
        if isinstance(m, DroppedCall):
            yield name_now(m, name, graphs), m._fxmask_dropping
        elif "_fxmask_dropping" in m.__dict__:
            yield name, m.__dict__["_fxmask_dropping"]


def any_dropped(model: nn.Module) -> bool:
    """Whether any layer has block dropout, or any Dropout rests for one."""
    return next(dropped_layers(model), None) is not None or any(isinstance(m, FusedDropout) for m in model.modules())


def resting_dropouts(model: nn.Module) -> tuple[list[str], list[str]]:
    """Names of the modules whose work the next linear does, and of those whose linear is in the model no more."""
    dropping = {id(m.__dict__.get("_fxmask_pair")) for m in model.modules() if "_fxmask_dropping" in m.__dict__}
    rest = [(name, m) for name, m in model.named_modules() if isinstance(m, FusedDropout)]
    return [name for name, m in rest if id(m._fxmask_pair) in dropping], [name for name, m in rest if id(m._fxmask_pair) not in dropping]


def other_dropouts(model: nn.Module) -> list[str]:
    """Names of the dropouts that are left alone: modules, but for those of a graph that it calls no more, and a graph's calls of functions."""
    found: dict[int, str] = {}
    graphs = list(graph_modules(model))
    called = {id(m) for _, gm in graphs for n in gm.graph.nodes if n.op == "call_module" for m in gm.get_submodule(str(n.target)).modules()}
    for name, m in model.named_modules(remove_duplicate=False):
        drops = isinstance(m, DROPOUTS) and not isinstance(m, FusedDropout) and getattr(m, "p", 0) > 0
        if drops and (id(m) in called or not around(name, graphs)):
            found.setdefault(id(m), name)
    return [*found.values(), *(join(prefix, name) for prefix, gm in graphs for name in left_in(gm))]
