"""Look at a masked model: its masks, and a row a layer that says what became of it."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from .conv_layers import LISTS, why_dense
from .dropping import dropped_layers, other_dropouts, resting_dropouts
from .errors import ConfigError
from .health import HealthLog
from .health_signs import HISTORY, SIGNS, signs
from .inputs import DROPPED_INPUT, PRUNED_INPUT
from .kernels.cpu import deciding
from .kernels.grid import kept_elements, matrix_shape
from .kernels.tune import Choice
from .nm_layers import any_nm, element_mask, has_values, nm_layers
from .nm_masking import nm_row
from .passes import ranks
from .passes import site as state
from .passes.bypass import first_of, never_run
from .passes.capture import backend_of
from .passes.config import WeightMask
from .passes.conv import KINDS, find_layers
from .passes.find import Candidate, find
from .passes.nm_find import find_nm
from .passes.products import find_products
from .passes.pruning_schedule import words
from .passes.site import Site
from .pruning import pruned_layers
from .report import Report
from .sites import FINAL, REASONS, any_masked, expect_module, required_sites, sites, values_of

OPS = ("forward", "dx", "dw", "backward")  # as `kernels.cpu` names them
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
    if FINAL in model.__dict__ and not any_masked(model):  # after fxmask.finalize there are none, and that is no mistake
        return {}
    nm = {f"{name}.weight".removeprefix("."): element_mask(m) for name, m in nm_layers(model) if has_values(name, m, "fxmask.masks")}
    if nm and not any_masked(model):
        return nm
    found = [t for t in required_sites(model, "fxmask.masks") if t[2] is not None]
    return {**nm, **{name: state.mask_outside(site, values_of(name, weight, "fxmask.masks")).clone() for name, site, weight in found}}


def explain(model: nn.Module, health: HealthLog | bool = False) -> Report:
    """What became of every linear, and of every convolution where `apply` was asked for these: a `Report` with a row for each, masked or not, and why.

    Columns: name, masked, reason, shape, block, blocks, target_ratio (now, and in the end), achieved_ratio (share of weight elements in masked blocks, now),
    backward, masked_weights (the guard's policy), ranks_by (None: the norm), impl, why, step, mask_age (optimiser steps; None where each forward builds it),
    flips (blocks that changed place, for cached masks), activations (what is dropped of the input that is saved for the backward), dropout
    (of the input, in blocks). Under `ActivationPruning(affine=True)` rows of products with parameters follow, by the parameters' names.
    Achieved figures are None where the weight has no values. Cost: one `block_index` a layer that has no cached mask.

    Args:
        health: True: kept_norm_fraction, dead_rows and dead_cols of every masked weight, too (one pass over each weight). A `HealthLog` of this model: also
            flip_rate, age_mean, age_max and never_kept of its last update.
    Raises: ConfigError for a `health` that is neither.
    """
    expect_module(model, "fxmask.explain")
    if not isinstance(health, (bool, HealthLog)):
        raise ConfigError(f"explain: health: expected True, False or a fxmask.HealthLog, got {health!r}.")
    masked = {name: (site, weight) for name, site, weight in sites(model)}
    reasons = _reasons(model)
    rows = []
    nm = dict(nm_layers(model))
    found = _candidates(model, reasons)
    for c in found:
        entry = masked.pop(c.param_name, None)
        if c.name in nm:
            rows.append({**_row(c.name, c.weight, "selected"), **nm_row(nm[c.name])})
        elif entry is None:
            rows.append(_row(c.name, c.weight, reasons.get(c.name, UNSEEN)))
        else:
            rows.append({**_masked_row(c.name, *entry), **(_health(c.param_name, *entry, health) if health is not False else {})})
    pruned, dropped = {name: words(m) for name, m in pruned_layers(model)}, {name: config.words() for name, config in dropped_layers(model)}
    held: dict[int, tuple[int, int]] = {}  # a weight of two layers is one in memory, and whole where one of them is dense
    for c, row in zip(found, rows, strict=True):
        row |= {"activations": pruned.get(row["name"]), "dropout": dropped.get(row["name"])}
        if (row["reason"] == PRUNED_INPUT and not row["activations"]) or (row["reason"] == DROPPED_INPUT and not row["dropout"]):
            row["reason"] = UNSEEN  # another layer is in its place now
        row["name"] = row["name"] or "(the model itself)"
        held[id(c.weight)] = row.pop("elements"), max(row.pop("kept") or 0, held.get(id(c.weight), (0, 0))[1])
    total, kept = (sum(part) for part in zip(*held.values(), strict=True)) if held else (0, 0)
    products = [_row(c.name, c.weight, reasons[c.name]) for c in find_products(model) if c.name in reasons]
    for row in products:
        del row["elements"], row["kept"]
        row |= {"activations": pruned.get(row["name"]), "dropout": None}
    notes = [
        "masked_dense and reference multiply by the masked weight and save no time.",
        "A GPU can skip next to nothing at 16x16 and 50 %; 64x64 from 70 % up pays.",
    ]
    layers = "layers" if any(nn.Conv2d in c.types for c in found) else "linears"
    summary = {layers: len(rows), "masked": sum(r["masked"] for r in rows), f"weight elements in {layers}": total, "of them in kept blocks": kept}
    summary |= {"products with parameters": len(products)} if products else {}
    notes = ["N:M masks multiply densely by W∘M and save no time; fxmask.finalize(model, '2:4') is the hardware's form."] if nm else notes
    notes = notes if any(r["masked"] for r in rows) else []
    if idle := never_run(sites(model)):
        why = "it is older than the masks, or made inside fxmask.dense, or something reads .weight whole"
        notes.append(f"Have a gradient, and their masked forward has not run: {first_of(idle)}; {why}.")
    resting, lost = resting_dropouts(model)
    if resting:
        notes.append(f"Dropouts whose work the next linear does: {', '.join(resting)}; whoever else calls them drops nothing.")
    if lost:
        notes.append(f"Dropouts that drop nothing, as the linear that did their work is in the model no more: {', '.join(lost)}; fxmask.restore wakes them.")
    if backend_of(model) == "fxmask":
        notes.append("Compiled by backend='fxmask': its masks live in the compiled graphs alone, which FXMASK_DUMP=dir writes down; rows are of apply.")
    if dropped and (left := other_dropouts(model)):
        notes.append(f"Dropouts that are left alone: {', '.join(left)}.")
    return Report("fxmask.explain", [*rows, *products], notes, summary)


def _candidates(model: nn.Module, reasons: dict[str, str]) -> list[Candidate]:
    """Linears, and the convolutions that `apply` has masked or has left dense for a reason."""
    found = find_nm(model, KINDS) if any_nm(model) else find_layers(model, KINDS)
    found = [c for c in found if nn.Conv2d not in c.types or c.masked or c.name in reasons]
    return found if any(nn.Conv2d in c.types for c in found) else find(model)


@torch.no_grad()
def _health(name: str, site: Site, weight: Tensor | None, health: HealthLog | bool) -> dict[str, Any]:
    """A masked weight's signs now, and what a log has seen of it."""
    found: dict[str, Any] = dict.fromkeys(SIGNS)
    if weight is not None and not weight.is_meta:
        w = weight.detach()
        found.update(signs(ranks.whole(w), state.mask_outside(site, w), site._fxmask_config.block)[0])
    if isinstance(health, HealthLog):
        last: dict[str, Any] = next((r for r in reversed(health.rows) if r["name"] == name), {})
        found.update({k: last.get(k) for k in HISTORY})
    return found


def _reasons(model: nn.Module) -> dict[str, str]:
    found: dict[str, str] = {}
    for prefix, m in model.named_modules():
        for name, reason in m.__dict__.get(REASONS, {}).items():
            found[".".join(p for p in (prefix, name) if p)] = reason
    return found


def _row(name: str, weight: Tensor, reason: str) -> dict[str, Any]:
    columns = ["block", "blocks", "target_ratio", "final_ratio", "achieved_ratio", "backward", "masked_weights", "ranks_by", "impl", "why", "step"]
    row, shape = dict.fromkeys([*columns, "mask_age", "flips"]), "x".join(map(str, weight.shape))
    return {"name": name, "masked": False, "reason": reason, "shape": shape, **row, "elements": weight.numel(), "kept": weight.numel()}


def _policy(site: Site, weight: Tensor | None) -> str:
    why = "no guard" if site._fxmask_guard is None or isinstance(weight, nn.Parameter) else "other parameters make this weight"
    policy = site._fxmask_policy or f"left to the optimiser ({why})"
    return f"{policy}, from step {site._fxmask_config.softened_from}; free till then" if site._fxmask_softening and policy in ("freeze", "decay") else policy


def _ranking(c: WeightMask) -> str | None:
    """What decides which blocks are kept, where it is more than the norm of the weight."""
    parts = [] if c.criterion == "fro" else [c.criterion]
    parts += [f"{name} {value:g}" for name, value in (("average", c.average), ("hysteresis", c.hysteresis)) if value]
    parts += [f"regrow {c.regrow.by} {c.regrow.fraction:g}"] if c.regrow is not None else []
    parts += [name for name in ("cover", "soft", "gain") if getattr(c, name)]
    return ", ".join(parts) or None


def _implementation(site: Site, weight: Tensor | None, mask: Tensor | None) -> dict[str, str]:
    """What runs a layer, and why: the numbers of the choices where some were made."""
    c = site._fxmask_config
    if c.read == "weight":
        return {"impl": "reference", "why": "its owner reads W∘M"}
    if isinstance(site, nn.Conv2d) and weight is not None:
        dense = why_dense(site, weight)
        if dense or c.impl not in LISTS:
            why = dense or ("asked for" if c.impl == "reference" else "no recorded run shows a faster one")
            return {"impl": "masked_dense", "why": f"PyTorch's convolution of W∘M: {why}"}
    if c.impl not in ("auto", "cpu") or weight is None or weight.device.type != "cpu":
        return {"impl": "reference" if c.impl == "auto" else c.impl, "why": "no recorded run shows a faster one" if c.impl == "auto" else "asked for"}
    density = 1.0 if mask is None or not mask.numel() else float(mask.count_nonzero()) / mask.numel()
    if density == 1:
        return {"impl": "masked_dense", "why": "no block is masked"}
    found = {op: deciding.made(op, matrix_shape(weight.shape), c.block, density, c.impl == "cpu") for op in OPS}
    ran = {op: f for op, f in found.items() if f}
    if not ran:
        return {"impl": c.impl, "why": "chosen when it first runs"}
    why = "; ".join(f"{op} {_reasons_of(choice)}" for op, f in ran.items() for choice in f.values())
    return {"impl": ", ".join(f"{op} {_names_of(f)}" for op, f in ran.items()), "why": why}


def _names_of(choices: dict[int, Choice]) -> str:
    """The plan; where calls of layers of this kind differ in tokens and plans, each with its number of tokens."""
    if len({c.name for c in choices.values()}) == 1:
        return next(iter(choices.values())).name
    return " or ".join(f"{c.name} ({f'about {tokens:,} tokens' if tokens else 'few tokens'})" for tokens, c in choices.items())


def _reasons_of(choice: Choice) -> str:
    """A choice's times in ms, fastest first, and over how many tokens."""
    times = sorted(choice.times.items(), key=lambda t: t[1])[:4]
    busy = ", on a busy machine: will be repeated" if choice.busy else ""
    return f"{choice.why} over {choice.tokens:,} tokens{busy}: " + ", ".join(f"{name} {1e3 * t:.3g} ms" for name, t in times)


@torch.no_grad()
def _masked_row(name: str, site: Site, weight: Tensor | None) -> dict[str, Any]:
    c = site._fxmask_config
    nb, kb = site._fxmask_grid
    known = weight is not None and not weight.is_meta
    shape = tuple(weight.shape) if weight is not None else (nb * c.block[0], kb * c.block[1])
    mask = state.mask_outside(site, weight.detach()) if known and weight is not None else None
    kept = None if mask is None else int(kept_elements(mask, matrix_shape(shape), c.block))
    elements = math.prod(shape)
    soft = f"selected; soft: computes densely until step {c.softened_from}, masked blocks at {c.soft_scale_at(site._fxmask_step):.3g}"
    row = _row(name, torch.empty(shape, device="meta"), soft if site._fxmask_softening else "selected")
    row.update(
        masked=True,
        block="x".join(map(str, c.block)),
        blocks=nb * kb,
        target_ratio=0.0 if site._fxmask_is_dense else c.ratio_at(site._fxmask_step),
        final_ratio=site._fxmask_given.final_ratio,
        achieved_ratio=None if kept is None or not elements else 1 - kept / elements,
        backward=c.backward,
        masked_weights=_policy(site, weight),
        ranks_by=_ranking(c),
        **_implementation(site, weight, mask),
        step=site._fxmask_step,
        mask_age=site._fxmask_step - site._fxmask_built if c.cached else None,
        flips=None if site._fxmask_flips is None or site._fxmask_flips.is_meta else int(site._fxmask_flips),
        kept=kept,
        elements=elements,
    )
    return row
