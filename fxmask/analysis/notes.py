"""What an analysis could not count as it is, in words: masks without values, rebuilds, forwards alone, what `impl="auto"` is taken for, masks of a backend."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from ..kernels import layer_cost
from ..kernels.grid import matrix_shape
from ..passes.counting.calls import Call, Place
from ..passes.counting.masked_rules import implementation
from ..passes.counting.recording import Recording
from ..passes.counting.traced import backend_of
from ..passes.counting.work import Target, Work
from .devices import Device

AUTO_MASKS = (
    "impl='auto' is counted as the kernels that skip blocks. On CUDA it takes them where a model fitted to recorded runs says that they pay (see "
    "fxmask.explain there), and elsewhere multiplies by W∘M, which impl='reference' counts."
)
AUTO_DROPOUT = (
    "impl='auto' of block dropout is counted as its kernels, a mask's draw as one launch; auto multiplies in plain PyTorch on CUDA, and eager PyTorch "
    "draws a mask by some fifty small ops, which impl='reference' counts."
)
FACTORS = {
    "aten.mm": ("self", "mat2"),
    "aten.bmm": ("self", "mat2"),
    "aten.addmm": ("mat1", "mat2"),
    "aten.baddbmm": ("batch1", "batch2"),
    "aten.convolution": ("input", "weight"),
    **{f"fxmask.{name}_linear": ("x", "w") for name in ("masked", "pruned", "dropped")},
}
MASKED = ("fxmask.masked_linear", "fxmask.pruned_linear")
BACKEND = (
    "The model is compiled by backend='fxmask', whose masks live in the compiled graphs alone: it is counted as it is without them; "
    "analyse fxmask.apply(model, ...) with the backend's options."
)


def notes_of(model: Any, recording: Recording, works: list[Work], impl: str | None, device: Device) -> Iterator[str]:
    """One sentence each."""
    yield from _of_unknown_masks(recording)
    yield from _of_mixed_dtypes(recording)
    yield from _of_dense_reads(works)
    yield from _of_bypassed(recording, works)
    if not recording.backward and "dX" not in {w.phase for w in works}:
        yield "No output requires a gradient, or none was asked for: forward only."
    sites = recording.sites.values()
    ratios = {(s._fxmask_config.ratio_at(s._fxmask_step), s._fxmask_given.final_ratio) for s in sites}
    for now, end in sorted(p for p in ratios if p[0] != p[1]):
        yield f"Masks are as they are now: a ratio of {now:.4g}, by schedule or start; at its end it is {end:.4g}."
    if recording.backward:
        yield from _of_rebuilds(recording, impl)
    on_gpu = impl is None and not device.is_cpu  # of a CPU the summary says what is not counted
    if on_gpu and any(s._fxmask_config.impl == "auto" and not s._fxmask_from and not isinstance(s, nn.Conv2d) for s in sites):
        yield AUTO_MASKS
    if not device.is_cpu and any(c.op == "fxmask.drop_mask" and c.named["impl"] == "auto" for c in recording.calls):
        yield AUTO_DROPOUT
    if backend_of(model) == "fxmask":
        yield BACKEND


def _of_unknown_masks(recording: Recording) -> Iterator[str]:
    made = {n for n in recording.typical if all(p in recording.parameters and not recording.parameters[p].is_meta for p in n.split("+"))}
    ragged = _ragged_weights(recording)
    for drawn, what in ((recording.typical - made, "have no values"), (made, "are computed in every forward, as by a parametrisation")):
        at_edges = ", but at ragged edges with another number of elements" if drawn & ragged else ""
        if drawn:
            yield f"{len(drawn)} weights {what}: their masks are drawn at random, with exactly as many kept blocks as real ones have{at_edges}."
    given = [c.named for c in recording.calls if c.op in MASKED and not c.backward]
    uncounted = recording.uncounted | {a["w"].weight for a in given if isinstance(a.get("mask"), Place) and a["mask"].mask is None}
    if uncounted:
        what = f"{len(uncounted)} masked weights come without the number of their kept blocks: they are counted as dense, an upper bound; "
        yield f"{what}analyse the model itself."


def _of_dense_reads(works: list[Work]) -> Iterator[str]:
    """Products that read what is made of W∘M, zeros and all, where nothing says how many of these each factor has: attention's keys, a copied part."""
    found = [w for w in works if w.phase == "fwd" and w.m and w.dense is None and not w.extra and w.call is not None and _reads_zeros(w.call)]
    if found and (call := found[0].call) is not None:
        where = call.module or call.node or "(model)"
        yield f"{len(found)} products with what is made of W∘M are counted densely, an upper bound, such as {call.op.partition('.')[2]} in {where}."


def _reads_zeros(call: Call) -> bool:
    return any(p.mask is not None and p.mask.block is not None and p.dtype.is_floating_point for p in call.inputs)


def _of_bypassed(recording: Recording, works: list[Work]) -> Iterator[str]:
    """Products that read the weight of a masked layer itself, as through a view that somebody holds."""
    calls = [w.call for w in works if w.phase == "fwd" and w.m and w.call is not None and not w.op.startswith("fxmask.") and not w.again]
    past = [(call, p) for call in calls for p in call.inputs if p.weight in recording.sites and p.whole and p.mask is None]
    if past:
        call, p = past[0]
        where = f"{call.op.partition('.')[2]} of {p.weight} in {call.module or '(model)'}"
        yield f"{len(past)} products read masked weights past their masks, such as {where}: they run densely."


def _of_rebuilds(recording: Recording, impl: str | None) -> Iterator[str]:
    """Cached masks: the tables have one step, op by op, and most steps rebuild none. Masks that take in scores have words of their own (`dynamics`)."""
    moved: dict[int, list[int]] = {}
    for name, site in recording.sites.items():
        c, p = site._fxmask_config, recording.parameters.get(name)  # a weight that several layers share is there once
        if p is None or c.refresh <= 1 or c.remembers:
            continue
        shape, triton = matrix_shape(p.shape), implementation(c.impl, Target(impl=impl or "")) == "triton" and not isinstance(site, nn.Conv2d)
        cost = layer_cost.block_index(shape, c.block, recording.size(p) // max(1, p.numel()), triton)
        moved.setdefault(c.refresh, []).append((cost + layer_cost.strip_lists(shape, c.block) if triton else cost).bytes_min)
    for every, each in sorted(moved.items()):
        total = sum(each) / 1e6
        yield (
            f"{len(each)} masks are cached and rebuilt every {every} steps (refresh={every}), which no table and no sentence here counts: a rebuild moves "
            f"{total:.4g} MB, {total / every:.4g} MB a step."
        )


def _of_mixed_dtypes(recording: Recording) -> Iterator[str]:
    """Fake tensors do not mind factors of two dtypes."""
    factors = [(c, [p for p in (c.named.get(n) for n in FACTORS[c.op]) if isinstance(p, Place)]) for c in recording.calls if c.op in FACTORS and not c.backward]
    mixed = [(c, found) for c, found in factors if len({p.dtype for p in found}) > 1]
    if mixed:
        call, found = mixed[0]
        dtypes = " and ".join(str(p.dtype).removeprefix("torch.") for p in found)
        where = call.module or call.node or "(model)"
        what = f"{len(mixed)} products have factors of two dtypes, which PyTorch refuses when it runs them, such as {where} of {dtypes}: "
        yield f"{what}give inputs of the model's dtype."


def _ragged_weights(recording: Recording) -> set[str]:
    """Weights that their blocks do not divide, of those whose masks are made in the forward."""
    made = [(c.named["w"], c.named["block_rows"], c.named["block_cols"]) for c in recording.calls if c.op == "fxmask.block_index"]
    return {w.weight for w, *block in made if any(size % b for size, b in zip(w.shape, block, strict=True))}
