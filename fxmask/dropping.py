"""`BlockDropout` on modules: another forward by class swap, or an attribute of a layer that is masked. The Dropout that it stands for rests: `fused`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from .fused import FusedDropout, dropouts_before, fuse, runs_in_turn
from .fused import Pair as Pair  # the name by which models of before were pickled
from .kernels.errors import ConfigError, first_of, message, warn
from .passes.finding.candidate import join
from .passes.finding.choose import Decision
from .passes.finding.graph_linears import around, graph_modules, name_now
from .passes.finding.weights import raw_weight
from .passes.graphs.fused_dropout import DroppedCall, FuseDropout, UnfuseDropout, dropout_before, left_in
from .passes.graphs.graph_calls import DROPPED
from .passes.graphs.writes import Writes
from .passes.infra import run_passes
from .passes.settings.block_dropout import BlockDropout
from .passes.state import ranks
from .swap import MaskedLinear, ran
from .swapped import Swapped, begin, masked_class, note_asked, of_now

Dropped = tuple[Decision, BlockDropout, "nn.Dropout | None"]  # a layer, how its input is dropped, and the Dropout that rests for it
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


class DroppedLinear(Swapped):
    """Forward of a Linear with block dropout on its input (..., K). Mixed into a subclass of the layer's own class, never constructed."""

    _fxmask_prefix = "Dropped"
    _fxmask_dropping: BlockDropout
    bias: Tensor | None

    def forward(self, input: Tensor) -> Any:
        if not isinstance(self, DroppedLinear):
            return of_now(self, input)
        begin(self, input, "a layer with block dropout", "BlockDropout")
        ran(self)
        weight = raw_weight(self)
        if self._fxmask_dropping.drops(self.training):
            ranks.refuse_shard(weight, "a layer with block dropout", type(self).__name__)
        return self._fxmask_dropping.linear(input, weight, self.bias, self.training)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, dropout: {self._fxmask_dropping.words()}"


def resolved(model: nn.Module, chosen: list[tuple[Decision, BlockDropout]]) -> list[Dropped]:
    """The layers that drop, with p and the Dropout that is fused; those of graphs as they are, the pass knows their dropouts."""
    before, found = dropouts_before(model), []
    writes = {gm: Writes(gm) for gm in {d.candidate.host for d, _ in chosen} if gm is not None}
    for d, config in chosen:
        c = d.candidate
        dropout = before.get(id(c.module)) if c.host is None else None
        rates = [] if dropout is None else [dropout.p]
        if c.host is not None:
            rates = [at[1] for n in c.nodes if (at := dropout_before(writes[c.host], n)) is not None]
        if config.p is None and not rates:
            continue
        if config.p is None and any(not 0 <= p < 1 for p in rates):
            kind = "a dropout" if dropout is None else "a Dropout"
            raise ConfigError(f"{c.name!r} is behind {kind} with p={max(rates)}: expected p in [0, 1), or exclude={c.name!r}.")
        if config.p is None and dropout is not None:
            config = dataclasses.replace(config, p=dropout.p)
        found.append((d, config, dropout))
    return found


def drop_inputs(model: nn.Module, chosen: list[Dropped]) -> None:
    """Change what was chosen; masks are in place by then."""
    for d, config, dropout in chosen:
        m = d.candidate.module
        if d.candidate.host is None and m is not None:
            if not isinstance(m, MaskedLinear):
                m.__class__ = masked_class(type(m), DroppedLinear)
            m._fxmask_dropping = config  # type: ignore[assignment]
            note_asked(m, config)
            if dropout is not None:
                fuse(dropout, m)
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


def warn_of_siblings(model: nn.Module, chosen: list[Dropped]) -> None:
    """FxMaskWarning where a Dropout may stand before such a layer: in the module that holds both, whose forward alone knows the order, or in nn.Sequential."""
    names, found = [d.candidate.name for d, _, dropout in chosen if d.candidate.host is None and dropout is None], []
    for name in names:
        path = name.rpartition(".")[0]
        owner = model.get_submodule(path)
        if not isinstance(owner, (nn.ModuleList, nn.ModuleDict)) and owner is not model.get_submodule(name):
            others = _shortly_before(owner, model.get_submodule(name)) if runs_in_turn(owner) else owner.named_children()
            found += [join(path, other) for other, m in others if isinstance(m, DROPOUTS) and m.p > 0]
    if found:
        shown = first_of(list(dict.fromkeys(found)))
        what = f"BlockDropout(p=...) drops beside {shown}, which stays: expected one dropout before a layer, and where one of them feeds it there are two."
        fix = "set that one's p to 0 where it does; a trace (torch.fx.symbolic_trace) shows which, and has it fused."
        warn(message(what, first_of(names), fix))


def warn_of_exports(model: nn.Module, chosen: list[Dropped]) -> None:
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
        if "_fxmask_dropping" in m.__dict__:
            yield name_now(m, name, graphs) if isinstance(m, DroppedCall) else name, m.__dict__["_fxmask_dropping"]


def any_dropped(model: nn.Module) -> bool:
    """Whether any layer has block dropout, or any Dropout rests for one."""
    return any("_fxmask_dropping" in m.__dict__ or isinstance(m, FusedDropout) for m in model.modules())


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
