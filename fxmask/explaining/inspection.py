"""Look at a masked model: its masks, and the report on what became of its layers. The rows are made in `explain_rows`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..compiler.backend_watch import seen
from ..compiler.computed import computed
from ..dropping import dropped_layers, other_dropouts
from ..fused import resting_dropouts
from ..health import HealthLog
from ..inputs import DROPPED_INPUT, PRUNED_INPUT, RESTS
from ..kernels.errors import ConfigError, first_of
from ..nm.nm_layers import any_nm, element_mask, nm_layers
from ..passes.counting.traced import backend_of
from ..passes.finding.candidate import Candidate, join
from ..passes.finding.conv import KINDS, find_layers
from ..passes.finding.find import find
from ..passes.finding.graph_linears import is_unflattened
from ..passes.finding.nm_find import find_nm
from ..passes.finding.outside import outside
from ..passes.finding.outside import words as words_of
from ..passes.finding.weights import peek_weight
from ..passes.graphs.exported import exported_masks
from ..passes.state.pruning_schedule import words
from ..passes.state.site_mask import mask_outside
from ..passes.stepping.bypass import never_run, read_by_adapters
from ..pruning import pruned_layers
from ..report import Report
from ..sites import FINAL, REASONS, any_masked, expect_module, read_dense, refuse_scripted, required_sites, sites, values_of
from .explain_rows import Known, history_of, rows_of

NO_GRAPH = "no graph of backend='fxmask' that has run is known to mask it"
_NOTES = [
    "masked_dense and reference multiply by the masked weight and save no time.",
    "A GPU can skip next to nothing at 16x16 and 50 %; in large layers 64x64 pays from 70 % up.",
]
_NM_NOTES = ["N:M masks multiply densely by W∘M and save no time; fxmask.finalize(model, '2:4') is the hardware's form."]
UNSEEN = "fxmask.apply has not seen it, or its masks were taken off or made permanent"


@torch.no_grad()
def masks(model: nn.Module) -> dict[str, Tensor]:
    """The masks of the next forward.

    Returns: {parameter's name: bool [ceil(N / block_rows), ceil(K / block_cols)], True = kept}; all True before `start` and inside `fxmask.dense`. Of an
    `NMMask`: bool of the weight's shape, one for each element; of a learned one the argmax of its logits, which is that of forwards in eval(). A weight
    that a graph computes has a mask only while the graph runs, and is left out; `explain` has its row. Under fully_shard weights are gathered one at a time,
    so all ranks call this, and `explain`, together.
    Raises: StateError without masks, UnsupportedError for meta weights. Cost: one `block_index` a layer that has no cached mask.
    """
    expect_module(model, "fxmask.masks")
    if FINAL in model.__dict__ and not any_masked(model) and not any_nm(model):  # after fxmask.finalize there are none, and that is no mistake
        return {}
    nm = {}
    for name, m in nm_layers(model):
        values_of(name, peek_weight(m), "fxmask.masks")
        nm[join(name, "weight")] = element_mask(m)
    if nm and not any_masked(model):
        return nm
    found = [t for t in required_sites(model, "fxmask.masks") if t[2] is not None]
    return {**nm, **{name: mask_outside(site, values_of(name, weight, "fxmask.masks")).clone() for name, site, weight in found}}


def explain(model: nn.Module | Callable[..., Any], health: HealthLog | bool = False) -> Report:
    """What became of every linear, and of every convolution where `apply` was asked for these: a `Report` with a row for each, masked or not, and why.

    Columns: name, masked, reason, shape, block, blocks, target_ratio (now), final_ratio, achieved_ratio (share of weight elements in masked blocks, now),
    backward, masked_weights (the guard's policy), ranks_by (None: the norm), impl, why, step, mask_age (optimiser steps; None where each forward builds it),
    flips (blocks that changed place, for cached masks), activations (what is dropped of the input that is saved for the backward), dropout
    (of the input, in blocks). Under `ActivationPruning(affine=True)` rows of products with parameters follow, by the parameters' names.
    Of `torch.compile(model, backend="fxmask")` it says what its graphs have done so far: call the model once, then ask. Parameters of no Linear have rows, too.
    Achieved figures are None where the weight has no values. Cost: one `block_index` a layer that has no cached mask.

    Args:
        health: True: kept_norm_fraction (of the squared norm), dead_rows and dead_cols (shares) of every masked weight, too (one pass over each). A
            `HealthLog` of this model: also flip_rate, age_mean, age_max and never_kept of its last update.
    Raises: ConfigError for a `health` that is neither, and for a compiled function: ask for its model.
    """
    expect_module(model, "fxmask.explain")
    assert isinstance(model, nn.Module)  # what torch.compile gives is one, though its type does not say so
    refuse_scripted(model, "fxmask.explain")
    if not isinstance(health, (bool, HealthLog)):
        raise ConfigError(f"explain: health: expected True, False or a fxmask.HealthLog, got {health!r}.")
    if isinstance(health, HealthLog) and {id(m) for m in health.model.modules()}.isdisjoint(id(m) for m in model.modules()):
        raise ConfigError(f"explain: health: expected a fxmask.HealthLog of this model, got one of another {type(health.model).__name__}.")
    pruned, dropped = {name: words(m) for name, m in pruned_layers(model)}, {name: config.words() for name, config in dropped_layers(model)}
    reasons, nm = _reasons(model, pruned, dropped), dict(nm_layers(model))
    traced, by_graphs = list(exported_masks(model)), computed(model.parameters())
    parts = {i for (_, ids), done in by_graphs.items() if done.mask is not None for i in ids}  # of weights that graphs compute and mask
    by_backend = backend_of(model) == "fxmask" or bool(by_graphs) or any(seen(p) for p in model.parameters())
    history = history_of(health) if isinstance(health, HealthLog) else None
    masked = {name: (site, weight) for name, site, weight in sites(model)}
    known = Known(masked, reasons, nm, by_graphs, NO_GRAPH if by_backend else UNSEEN, health is not False, history)
    found = [c for c in _candidates(model, reasons) if not any(i.node is n for i in traced for n in c.nodes)]
    told, products = rows_of(model, found, traced, known)
    rows = [row for row, _ in told]
    _name_inputs(rows, products, pruned, dropped)
    every = [{k: v for k, v in row.items() if k not in ("elements", "kept")} for row in (*rows, *products)]
    left = [c for c in outside(model, found) if not seen(c.weight) and id(c.weight) not in parts]  # those have rows, or what is made of them has one
    notes = (_NM_NOTES if nm else _NOTES) if any(r["masked"] for r in rows) else []
    more = map(plain, _notes(model, left, by_backend, bool(dropped), bool(traced)))
    layers = "layers" if any(nn.Conv2d in c.types for c in found) else "linears"
    return Report("fxmask.explain", every, [*notes, *more], _summary(layers, told, products))


def _name_inputs(rows: list[dict[str, Any]], products: list[dict[str, Any]], pruned: dict[str, str], dropped: dict[str, str]) -> None:
    """What is pruned and dropped of inputs, into the rows, which get their last names."""
    for row in (*rows, *products):
        row |= {"activations": pruned.get(row["name"], row.get("activations")), "dropout": dropped.get(row["name"])}
    for row in rows:
        if (row["reason"] in (PRUNED_INPUT, RESTS) and not row["activations"]) or (row["reason"] == DROPPED_INPUT and not row["dropout"]):
            row["reason"] = UNSEEN  # another layer is in its place now, or it was restored
        row["name"] = plain(row["name"]) or "(the model itself)"


def _summary(layers: str, told: list[tuple[dict[str, Any], Tensor]], products: list[dict[str, Any]]) -> dict[str, int]:
    """How many layers and weight elements there are. A weight of two layers is one in memory, and whole where one of them is dense."""
    held: dict[int, tuple[int, int | None]] = {}
    for row, weight in told:
        kept = [k for k in (row["kept"], held.get(id(weight), (0, None))[1]) if k is not None]
        held[id(weight)] = row["elements"], max(kept, default=None)
    summary = {layers: len(told), "masked": sum(row["masked"] for row, _ in told), f"weight elements in {layers}": sum(n for n, _ in held.values())}
    summary["of them in kept blocks"] = sum(k or 0 for _, k in held.values())
    if unknown := sum(n for n, k in held.values() if k is None):
        summary["of them under masks that nobody knows here"] = unknown
    if products:
        summary["products with parameters"] = len(products)
    return summary


def plain(text: str) -> str:
    """Names without what torch.compile puts before them: rows are named as patterns and state_dict keys of the model itself."""
    return re.sub(r"(?<!\w)_orig_mod\.|\.?(?<!\w)_orig_mod(?!\w)", "", text)


def _notes(model: nn.Module, left: list[Candidate], by_backend: bool, drops: bool, frozen: bool) -> Iterator[str]:
    """What no row can say."""
    if left:
        yield f"In no nn.Linear, where masks do not reach: {words_of(left)}."
    if idle := never_run(sites(model)):
        why = "it is older than the masks, or made inside fxmask.dense, or something reads .weight whole"
        yield f"Have a gradient, and their masked forward has not run: {first_of(idle)}; {why}."
    if read := read_by_adapters(model):
        yield f"Frozen, and never run though the adapter around them trains: {first_of(read)}; it computes with the weight as it is, which is dense."
    if read := read_dense(model):
        yield f"Read dense by a module that fxmask.apply was not given: {first_of(read)}; restore, then apply to the whole model, with include."
    resting, lost = resting_dropouts(model)
    if resting:
        yield f"Dropouts whose work the next linear does: {', '.join(resting)}; whoever else calls them drops nothing."
    if lost:
        yield f"Dropouts that drop nothing, as the linear that did their work is in the model no more: {', '.join(lost)}; fxmask.restore wakes them."
    if by_backend:
        yield "Masks of backend='fxmask' are made in its graphs: rows are of the last that ran; other code is dense. FXMASK_DUMP=dir writes them down."
    if frozen:
        yield "Masks that are part of a trace: their ratio, start and schedule rest as they were; apply, guard, step and restore need the model itself."
    if is_unflattened(model):
        yield "Graphs of torch.export.unflatten, as stages of pipelining have them, are not looked into: masks that are part of them have no rows."
    if drops and (others := other_dropouts(model)):
        yield f"Dropouts that are left alone: {', '.join(others)}."


def _candidates(model: nn.Module, reasons: dict[str, str]) -> list[Candidate]:
    """Linears, and the convolutions that `apply` has masked or has left dense for a reason."""
    found = find_nm(model, KINDS) if any_nm(model) else find_layers(model, KINDS)
    found = [c for c in found if nn.Conv2d not in c.types or c.masked or c.name in reasons]
    return found if any(nn.Conv2d in c.types for c in found) else find(model)


def _reasons(model: nn.Module, pruned: Iterable[str], dropped: Iterable[str]) -> dict[str, str]:
    """Why layers are dense: by their inputs, where the model is a part of what `apply` was given, and by what that says of the others."""
    found = dict.fromkeys(pruned, PRUNED_INPUT) | dict.fromkeys(dropped, DROPPED_INPUT)
    for prefix, m in model.named_modules():
        for name, reason in m.__dict__.get(REASONS, {}).items():
            found[join(prefix, name)] = reason
    return found
