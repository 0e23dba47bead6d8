"""Walk over the masks of a model, whatever form their layers have."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from .kernels.errors import ConfigError, StateError, UnsupportedError, message
from .kernels.grid import matrix_shape
from .loads import watch_loads
from .passes.counting.traced import backend_of
from .passes.finding.candidate import join
from .passes.finding.graph_linears import is_unflattened
from .passes.finding.readers import OF_TORCH, weight_readers
from .passes.finding.weights import peek_weight, refuse_wrapped
from .passes.graphs.exported import exported_masks
from .passes.graphs.graph_site import graph_sites
from .passes.state import ranks
from .passes.state.site import Site
from .passes.state.site_mask import refuse_layout, refuse_size
from .passes.state.tensors import is_taken
from .swap import MaskedLayer, ReadWeight, WeightReader

Masked = tuple[str, Site, "Tensor | None"]  # parameter's name, mask's owner, dense weight: None where a graph computes it, a DTensor under fully_shard
SELECTED = "_fxmask_selected"  # on the model that apply was given: names of the layers that it has masked
REASONS = "_fxmask_reasons"  # on the model that apply was given: {a candidate's key: why a linear stays dense}
EXPECTED = "expected one that fxmask.apply has changed"
INPUTS = {"_fxmask_pruning", "_fxmask_dropping"}  # on layers and calls whose input is pruned or dropped: how
FINAL = "_fxmask_final"  # on a model that finalize was given: its format


def expect_module(model: object, caller: str) -> None:
    """ConfigError for what is no model, before anything asks it for its modules."""
    if not isinstance(model, nn.Module):
        what = f"{caller}: expected an nn.Module, got {model.__name__ if isinstance(model, type) else type(model).__name__}"
        if isinstance(model, type) and issubclass(model, nn.Module):
            raise ConfigError(message(f"{what}, the class itself.", fix="make an instance of the class first."))
        exported = isinstance(model, torch.export.ExportedProgram)
        raise ConfigError(message(f"{what}.", fix="give it the program's module, by its method module()." if exported else ""))


def refuse_scripted(model: nn.Module, caller: str) -> None:
    """UnsupportedError for a model that torch.jit has compiled, or a part of it: its layers are no Python modules any more, and masks are part of it."""
    name = next((name or type(m).__name__ for name, m in model.named_modules() if isinstance(m, torch.jit.ScriptModule)), "")
    if name:
        what = f"{caller} looks at Python modules: expected none that torch.jit has compiled."
        raise UnsupportedError(message(what, name, "give it the model that was scripted or traced, or a graph of it by torch.export."))


def sites(model: nn.Module) -> Iterator[Masked]:
    """Every masked weight of a model."""
    ranks.at_rest(model)
    for prefix, m in model.named_modules():
        if isinstance(m, MaskedLayer):
            yield join(prefix, "weight"), m, peek_weight(m)
        elif isinstance(m, GraphModule):
            watch_loads(m)  # pickling a graph module loses the hooks of its root
            for site, weight in graph_sites(m):
                yield join(prefix, site._fxmask_name), site, weight


def any_masked(model: nn.Module) -> bool:
    """Whether anything in the model is masked."""
    return any(isinstance(m, Site) for m in model.modules())


def required_sites(model: nn.Module, caller: str) -> list[Masked]:
    """The masks of a model; StateError where there are none, UnsupportedError where a wrapper has taken a weight's values or its shape."""
    expect_module(model, caller)
    found = list(sites(model))
    if not found:
        what, fix = _why_none(model, caller)
        raise StateError(message(what, type(model).__name__, fix))
    flattened = any(type(m).__name__ == "FullyShardedDataParallel" for m in model.modules())
    for name, site, weight in found:
        if weight is not None and weight.dim() > 1 and matrix_shape(weight.shape) != site._fxmask_shape:
            refuse_size(site, weight)
        if weight is not None and (flattened or is_taken(weight)):
            raise _taken(name, weight, caller, f"one of {site._fxmask_grid} blocks")
    return found


def _why_none(model: nn.Module, caller: str) -> tuple[str, str]:
    """(what, fix) for a model without block masks. Raises: UnsupportedError for one that torch.jit has compiled."""
    if any("_fxmask_nm" in m.__dict__ for m in model.modules()):
        what = f"{caller} is for block masks: expected a WeightMask in this model, and it has N:M masks alone."
        return what, "leave it out: fxmask.freeze(model) fixes N:M masks, and fxmask.step(model) counts for a temperature that moves (tau_from)."
    if any(not INPUTS.isdisjoint(m.__dict__) for m in model.modules()):
        what = f"{caller}: nothing is masked in this model: expected weight masks, got inputs that are pruned or dropped, which keep no state."
        return what, "leave the call out, or give fxmask.apply a WeightMask, too; a schedule of pruned inputs alone is counted by fxmask.step."
    if backend_of(model) == "fxmask":
        what = f"{caller}: this model is compiled by backend='fxmask', whose masks live in the compiled graphs alone: {EXPECTED}."
        return what, "give fxmask.apply the backend's options instead, then torch.compile without a backend; fxmask.explain lists what graphs mask."
    if next(exported_masks(model), None) is not None:
        what = f"{caller}: the masks of this model are part of its trace, which was made after fxmask.apply: {EXPECTED}."
        return what, "use the model that was traced, or call fxmask.apply on the trace of a dense one."
    if is_unflattened(model):
        what = f"{caller} does not look into graphs of torch.export.unflatten, as stages of torch.distributed.pipelining.pipeline have them: {EXPECTED}."
        fix = "use the model that was exported, or modules of your own as stages (PipelineStage); masks in such graphs go on, weights are the optimiser's."
        return what, fix
    refuse_scripted(model, caller)
    if FINAL in model.__dict__:
        what = f"{caller}: nothing is masked in this model, whose masks fxmask.finalize has made permanent: {EXPECTED}."
        return what, "do that before fxmask.finalize; fxmask.apply(model, ...) masks it anew."
    return f"{caller}: nothing is masked in this model: {EXPECTED}.", "call fxmask.apply(model, ...) first."


def read_dense(model: nn.Module) -> list[str]:
    """Names of masked layers whose weight a module of PyTorch's reads that was out of sight of `fxmask.apply`, and so reads it dense.

    Adapters that are put around a masked layer may read it, too, but in a merge; `passes.stepping.bypass` tells of those that do when they train.
    """
    readers, found = weight_readers(model), []
    for name, m in model.named_modules():
        others = [o for o in readers.get(id(m), ()) if isinstance(o, OF_TORCH)] if isinstance(m, MaskedLayer) else []
        if others and not (isinstance(m, ReadWeight) and all(isinstance(o, WeightReader) for o in others)):
            found.append(name)
    return found


def sites_in_force(model: nn.Module, caller: str, others: object = None) -> list[Masked]:
    """`required_sites`, and StateError inside `fxmask.dense`. `others`: what else of the model the call is for; where there is some it may have no masks."""
    found = [] if others and not any_masked(model) else required_sites(model, caller)
    for name, site, _ in found:
        refuse_dense(name, site, caller)
    return found


def refuse_dense(name: str, site: Site, caller: str) -> None:
    """StateError inside `fxmask.dense`."""
    if site._fxmask_is_dense:
        raise StateError(message(f"{caller} inside fxmask.dense: expected masks in force.", name, "leave the with block first."))


def refuse_shared(name: str, weight: Tensor, users: dict[int, str]) -> None:
    """UnsupportedError before zeros are written into a weight that one of these `users`, by the ids of weights, uses without its mask."""
    if id(weight) in users:
        what = f"{users[id(weight)]} uses this weight unmasked, and would get the zeros."
        raise UnsupportedError(message(what, name, "untie the two first: give the masked layer a Parameter of its own."))


def values_of(name: str, weight: Tensor | None, caller: str) -> Tensor:
    """The weight, where it has values; UnsupportedError for a meta tensor, for what a wrapper has taken, and where a graph computes it."""
    if weight is None:
        what = f"{caller} needs the weight's values: expected a parameter, but this graph computes the weight."
        raise UnsupportedError(message(what, name, "call fxmask.apply on the nn.Module instead of its trace."))
    if weight.is_meta:
        what = f"{caller} needs the weight's values: expected real memory, got a meta tensor."
        raise UnsupportedError(message(what, name, "materialise the model first (to_empty, then load_state_dict)."))
    refuse_wrapped(name, weight)
    if weight.layout is not torch.strided:
        refuse_layout(name, weight)
    if is_taken(weight):
        raise _taken(name, weight, caller, "a matrix in memory")
    return weight


def _taken(name: str, weight: Tensor, caller: str, expected: str) -> UnsupportedError:
    what = f"{caller}: a wrapper has flattened or freed this weight: expected {expected}, got shape {tuple(weight.shape)}."
    fix = "FullyShardedDataParallel and ZeRO-3 do so; use torch.distributed.fsdp.fully_shard or DistributedDataParallel."
    return UnsupportedError(message(what, name, fix))
