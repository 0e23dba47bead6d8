"""What `fxmask.apply` says of what stays dense though a ratio was asked for: nothing selected, blocks too large, graphs that lost something."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn
from torch.fx import GraphModule
from torch.nn.parameter import is_lazy

from .kernels.errors import first_of, message, warn
from .kernels.grid import grid_shape, keep_count, matrix_shape
from .passes.finding.candidate import Candidate, join
from .passes.finding.choose import Decision, reasons_of
from .passes.finding.find import is_table
from .passes.finding.graph_linears import graph_modules, is_unflattened, weight_reads
from .passes.finding.outside import elements, unsaid, words
from .passes.finding.patterns import Patterns, as_patterns, matches_other
from .passes.graphs.exported import exported_masks
from .passes.graphs.trace_check import frozen_randomness
from .passes.settings.phases import in_turn
from .swapped import Swapped


def warn_of_graphs(model: nn.Module) -> None:
    """Say which calls of a trace are fixed in the mode that it was made in."""
    for name, gm in graph_modules(model):
        frozen = frozen_randomness(gm)
        if frozen:
            warn(f"the trace {name or type(gm).__name__} no longer follows train() and eval() here: {', '.join(frozen)}; the nn.Module itself would.")


def warn_of_reads(model: nn.Module, decisions: list[Decision]) -> None:
    """Warn where a graph that masks the calls of a layer reads its weight in another way, too."""
    chosen = [d.candidate for d in decisions if d.config is not None]
    masked = {id(c.parameter(model)): c.name for c in chosen}
    found: dict[GraphModule, dict[str, str]] = {}
    for weight, gm, read in weight_reads(model):
        if id(weight) in masked:
            found.setdefault(gm, {})[masked[id(weight)]] = read.node.name
    for reads in found.values():
        shown = first_of([f"{name} ({by})" for name, by in reads.items()], 3)
        what = f"a graph reads masked weights whole, in products that are no linear calls: {shown}."
        warn(message(what, fix="call fxmask.apply on the nn.Module instead of its trace, or exclude these."))


def warn_of_holders(model: nn.Module, chosen: Iterable[Decision], decisions: list[Decision]) -> None:
    """Warn where a masked layer's Parameter is also one of a module that is no linear: what reads it there meets the dense weight, and no row says so."""
    masked = {id(d.candidate.parameter(model)): d.candidate.name for d in chosen}
    known = {id(d.candidate.module) for d in decisions}  # whatever is done to them has a row
    graphs = [gm for _, gm in graph_modules(model)]
    called = {id(m) for gm in graphs for node in gm.graph.find_nodes(op="call_module") for m in _in_call(gm.get_submodule(str(node.target)))}
    known |= {id(m) for gm in graphs for m in gm.modules()} - called  # what a graph itself reads `warn_of_reads` has seen
    held = [
        f"{masked[id(p)] or 'the model itself'} (as {join(name, key)})"
        for name, m in model.named_modules()
        if id(m) not in known and not is_table(m)  # a tie to an embedding is asked for by name
        for key, p in m._parameters.items()
        if id(p) in masked
    ]
    if held:
        what = f"weights of masked layers are parameters of other modules, too, where whatever reads them reads them dense: {first_of(held, 3)}."
        fix = "none is needed where nothing reads them there; else let an nn.Linear that shares the weight stand for the other use, or exclude the layer."
        warn(message(what, fix=fix))


def _in_call(m: nn.Module) -> Iterator[nn.Module]:
    """What Python may run in a graph's call of a module: without the graphs in it."""
    if not isinstance(m, GraphModule):
        yield m
        for child in m.children():
            yield from _in_call(child)


def warn_of_outside(left: list[Candidate], decisions: list[Decision], include: Patterns, exclude: Patterns) -> None:
    """Warn where weights in no Linear have more elements than those that are masked. Whoever includes layers means these, so then: than all linears."""
    patterns = as_patterns("exclude", exclude) or []
    counted = [c for c in unsaid(left) if not any(matches_other(p, c) for p in patterns)]
    masked = elements([d.candidate for d in decisions if d.config is not None or include is not None])
    if counted and masked < elements(counted) and any(d.config is not None for d in decisions):
        what = f"most of this model is in no nn.Linear, and masks do not reach it: {words(counted)}, beside {masked:,} in linears."
        fix = f"write them as nn.Linear; exclude={counted[0].name!r}, or a glob for all of them, says that it is meant."
        warn(message(what, fix=fix))


def warn_of_regions(model: nn.Module, chosen: Iterable[Decision]) -> None:
    """Warn where a region that the compiler traces once for all layers alike (`torch.compiler.nested_compile_region`) stays dense before one that does not:
    PyTorch compares no classes, nor what a dense layer does not have, so that the dense code may serve both. `chosen`: what is about to change.

    Before: in the order of the modules. Neither another order of calls is seen, nor a layer that is restored by itself later on.
    """
    changed = {id(d.candidate.module) for d in chosen}
    dense: dict[Any, str] = {}
    for place, name, m in _in_regions(model):
        if id(m) in changed and place in dense:
            what = f"torch.compile takes the code of one region for all that are alike (nested_compile_region), and {dense[place]} is dense before {name}"
            fix = "mask all alike, those that are to stay dense with ratio=0.0, which keeps all of their blocks; or leave nested_compile_region out."
            warn(message(f"{what}: compiled, {name} and its like may run dense.", fix=fix))
            return
        if not isinstance(m, Swapped) and id(m) not in changed:
            dense.setdefault(place, name)


def _in_regions(model: nn.Module) -> Iterator[tuple[Any, str, nn.Module]]:
    """(its place in all regions that are alike, name, module) of what is inside of such regions."""
    for prefix, region in model.named_modules():
        traced = getattr(region.forward, "__marked_compile_region_fn__", None)
        if traced is not None:
            alike = tuple((n, p.dtype, None if is_lazy(p) else p.shape) for n, p in region.named_parameters())
            yield from (((id(getattr(traced, "__func__", traced)), alike, name), join(prefix, name), m) for name, m in region.named_modules())


def lacking(model: nn.Module, kinds: tuple[type[nn.Module], ...]) -> str:
    """What a model without any layer of these kinds is told."""
    none = " and ".join(f"no {'linear' if kind is nn.Linear else kind.__name__}" for kind in kinds)
    beside = nn.Conv2d not in kinds and any(isinstance(m, nn.Conv2d) for m in model.modules())
    return f"it has {none}" + " (layers=nn.Conv2d is for its convolutions)" * beside


def warn_if_dense(model: nn.Module, decisions: list[Decision], left: list[Candidate], kinds: tuple[type[nn.Module], ...]) -> None:
    """Whatever stays dense though a ratio was asked for is named. `left`: weights in no Linear; `kinds`: of layers that were looked for."""
    selected = [d for d in decisions if d.config is not None]
    if not selected:
        none, others = lacking(model, kinds), unsaid(left)
        if is_unflattened(model):
            others = []  # which hold the weights of linears by themselves
            none = "its graphs are those of torch.export.unflatten, which it does not look into; mask the model that was exported, before the export"
        elif next(exported_masks(model), None) is not None:
            none = "its linears were masked before it was traced, and their masks are part of the graph"
        beside = f"; in no nn.Linear, where masks do not reach: {words(others)}" if others else ""
        warn(f"fxmask.apply masked nothing: {reasons_of(decisions, none)}{beside}.")
    whole, uncovered, fixed = [], [], []
    for d in selected:
        assert d.config is not None
        name = d.candidate.name or "the model itself"
        for c in {(c.block, c.cover): c for c in in_turn(d.config)}.values():
            nb, kb = grid_shape(matrix_shape(d.candidate.weight.shape), c.block)
            kept = keep_count(nb * kb, c.final_ratio)
            if c.final_ratio > 0 and kept == nb * kb:
                whole.append(f"{name} ({nb * kb} block{'s' * (nb * kb > 1)} of {c.block})")
            if c.cover and kept < max(nb, kb):
                uncovered.append(f"{name} ({kept} blocks kept of {nb}x{kb})")
            if c.regrow is not None and not c.regrow.exchanged(0, kept):
                fixed.append(f"{name} ({kept} blocks kept)")
    if whole:
        warn(f"no block can be masked at this ratio, so these stay dense: {', '.join(whole)}; choose a smaller block for them.")
    if fixed:
        warn(f"regrow exchanges floor(fraction * kept) blocks, which is none in: {', '.join(fixed)}; choose a larger fraction or a smaller block for them.")
    if uncovered:
        warn(f"cover=True with fewer blocks than rows or columns, so some stay empty: {', '.join(uncovered)}; choose a smaller ratio or block for them.")
