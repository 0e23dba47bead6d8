"""Masks and scores of the user's own: which layers `apply(masks=..., scores=...)` names, and what their blocks are ranked by."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .kernels.errors import ConfigError, UnsupportedError, first_of, meant, message
from .kernels.grid import expand_mask, grid_shape, matrix_shape, ratio_keeping, to_blocks
from .passes.finding.candidate import Candidate
from .passes.finding.choose import NOT_INCLUDED, Decision
from .passes.finding.patterns import Patterns
from .passes.finding.selected import check_selected
from .passes.settings.config import WeightMask
from .passes.state import ranks
from .passes.state.saliency import GIVEN
from .passes.state.tensors import has_values

OPTIONS = ("masks", "scores")
BLOCKS = "fxmask.kernels.grid.to_blocks"
UNNAMED = "no mask or scores are given for it"
WRAPPED = "a layer's name, or its weight's, as fxmask.masks gives it; without what a wrapper puts before it (module., _orig_mod.); layers= for convolutions."


class Given:
    """What the two options say of a model's linears. Raises ConfigError for names that there are not, and for what is no mask or score."""

    def __init__(self, found: list[Candidate], masks: Any, scores: Any) -> None:
        self.by_weight: dict[int, tuple[str, str, Tensor]] = {}  # of a candidate: the option, the name in it, the tensor
        self.names: dict[int, list[str]] = {}
        for option, given in zip(OPTIONS, (masks, scores), strict=True):
            if given is not None and not (isinstance(given, Mapping) and given):
                got = "an empty one" if isinstance(given, Mapping) else type(given).__name__
                raise ConfigError(f"{option}: expected a dict of layer's name to tensor, got {got}.")
            for name, value in (given or {}).items():
                self._take(found, option, name, _checked(option, name, value))

    def __bool__(self) -> bool:
        return bool(self.by_weight)

    def _take(self, found: list[Candidate], option: str, name: str, value: Tensor) -> None:
        hits = [c for c in found if not c.product and name in (c.name, c.param_name)]
        if not hits:
            known = [c.name for c in found if not c.product]
            there = f"expected some of {first_of(known)}{meant(name, known) or '.'}" if known else "it has none."
            raise ConfigError(message(f"{option}: {name!r} is no linear of this model: {there}", "fxmask.apply", WRAPPED))
        for c in hits:
            before = self.by_weight.get(id(c.weight))
            if before is not None and not (before[0] == option and torch.equal(before[2], value)):
                what = f"{option}[{name!r}] and {before[0]}[{before[1]!r}] are of one weight: expected one of them, or the same tensor twice."
                raise ConfigError(message(what, c.name, "leave one out."))
            self.by_weight[id(c.weight)] = (option, name, value)
            self.names.setdefault(id(c.weight), []).append(c.name)

    def include(self, include: Patterns) -> Patterns:
        """Which layers are masked: those that are named here, where nobody says more."""
        return [name for names in self.names.values() for name in names] if include is None and self else include

    def decided(self, decisions: list[Decision], config: WeightMask, include: Patterns) -> list[Decision]:
        """The decisions with these masks and scores. Raises: ConfigError, and what `passes.finding.selected` raises for a cached mask."""
        new = [self._one(d, config) for d in decisions]
        if self:
            self._refuse_idle([d for d in new if d.config is not None], config)
            check_selected(new)
        if self and include is None:
            new = [dataclasses.replace(d, reason=UNNAMED) if d.reason == NOT_INCLUDED else d for d in new]
        return new

    def _one(self, d: Decision, config: WeightMask) -> Decision:
        entry, name = self.by_weight.get(id(d.candidate.weight)), d.candidate.name
        if entry is None:
            if d.config is not None and d.config.criterion == GIVEN:
                what = f"criterion='given' for {name!r}, which has neither a mask nor scores: expected one of them."
                raise ConfigError(message(what, name, "fxmask.apply(model, ..., masks={name: tensor}), or scores=; or another criterion."))
            return d
        option, key, value = entry
        if d.config is None:
            if name not in self.names[id(d.candidate.weight)]:
                return d  # another layer of the same weight, which nobody named
            fix = f"leave it out of {option}" + ("." if d.candidate.skip else ", or let include, exclude and overrides select it.")
            raise ConfigError(message(f"{option}[{key!r}] is of a layer that stays dense: {d.reason}.", name, fix))
        said = ("ratio", "criterion") if option == "masks" else ("criterion",)
        overridden = [n for n in said if getattr(d.config, n) not in (getattr(config, n), GIVEN)]
        if overridden:
            what = f"overrides give {name!r} another {' and '.join(overridden)}, and {option}[{key!r}] says that itself: expected one of them."
            raise ConfigError(message(what, name, "leave one out."))
        _check_shape(value, d, f"{option}[{key!r}]", option == "masks")
        changes: dict[str, Any] = {"criterion": GIVEN}
        if d.config.schedule is None or not d.config.schedule.moves:
            changes["refresh"] = 0  # there is nothing that a step could bring
        if option == "masks":
            if d.config.cover:
                fix = f"overrides={{{name!r}: dict(cover=False)}}, or scores= in place of the mask."
                raise ConfigError(message("masks are kept as they are: expected cover=False beside them, got True.", name, fix))
            changes["ratio"] = ratio_keeping(int(value.sum()), value.numel())
        try:
            return dataclasses.replace(d, config=d.config.replace(changes, f"{option}[{key!r}]"), own=value.float())
        except ConfigError as e:
            raise ConfigError(message(str(e), name, f"leave it out for this layer, by overrides={{{name!r}: dict(...)}}.")) from None

    def _refuse_idle(self, masked: list[Decision], config: WeightMask) -> None:
        """ConfigError for what is asked for and has no part in any layer."""
        if any(d.own is None for d in masked):
            return
        options, default = {self.by_weight[id(d.candidate.weight)][0] for d in masked}, WeightMask()
        idle = [f"criterion={config.criterion!r}"] if config.criterion not in (default.criterion, GIVEN) else []
        idle += [f"ratio={config.ratio}"] if options == {"masks"} and config.ratio != default.ratio else []
        idle += [f"refresh={config.refresh}"] if config.refresh > 1 and all(d.config is not None and d.config.refresh == 0 for d in masked) else []
        if idle:
            what = f"{' and '.join(idle)} beside a mask or scores for each masked layer, which say that themselves: expected the default."
            raise ConfigError(message(what, "fxmask.apply", "leave it out; layers without a mask or scores are masked by it where include names them."))


def refuse_given(masks: Any, scores: Any, beside: str) -> None:
    """ConfigError for masks or scores where they have no place."""
    named = [name for name, value in zip(OPTIONS, (masks, scores), strict=True) if value is not None]
    if named:
        what = f"{' and '.join(named)} are for block masks of weights: expected neither beside {beside}."
        fix = "N:M masks of your own: write the zeros into the weights, then fxmask.apply(model, fxmask.NMMask(n, m)) and fxmask.freeze(model)."
        raise ConfigError(message(what, "fxmask.apply", fix if "NMMask" in beside else "leave one of them out."))


def _checked(option: str, name: Any, value: Any) -> Tensor:
    """A copy on the host of what is given for one layer: bool, or float32."""
    where, is_mask = f"{option}[{name!r}]", option == "masks"
    wanted = "a bool tensor, True = kept" if is_mask else "a tensor of real numbers, the highest are kept"
    if not isinstance(value, Tensor) or ranks.is_shard(value):
        raise ConfigError(f"{where}: expected {wanted}, got {type(value).__name__}.")
    if value.layout is not torch.strided:
        raise ConfigError(f"{where}: expected {wanted}, got a {value.layout} one; .to_dense() makes it plain.")
    if not has_values(value):
        raise UnsupportedError(f"{where}: expected values, got a {'tensor on the meta device' if value.is_meta else 'fake tensor'}.")
    fits = value.dtype == torch.bool if is_mask else value.dtype != torch.bool and not value.is_complex()
    if not fits:
        binary = is_mask and not value.is_complex() and bool(((value == 0) | (value == 1)).all())
        other = "of zeros and ones .bool() makes one." if binary else "scores go into scores=." if is_mask else "a mask goes into masks=."
        raise ConfigError(f"{where}: expected {wanted}, got {value.dtype}; {other}")
    held = value.detach().to("cpu", torch.bool if is_mask else torch.float32, copy=True)
    if is_mask and not held.any():
        fix = "leave the layer out; of a threshold over all layers take scores >= min(threshold, scores.max()), which keeps a block of each."
        raise ConfigError(message(f"{where}: keeps no block: expected at least one, got {tuple(held.shape)} without any.", str(name), fix))
    if not is_mask and held.isnan().any():
        raise ConfigError(f"{where}: expected numbers, got NaN in {int(held.isnan().sum())} of {held.numel()} blocks.")
    return held


def _check_shape(value: Tensor, d: Decision, where: str, is_mask: bool) -> None:
    """ConfigError for another shape than the layer's blocks; of one entry for each weight it says how to come to blocks."""
    assert d.config is not None
    shape, block = matrix_shape(d.candidate.weight.shape), d.config.block
    grid = grid_shape(shape, block)
    if tuple(value.shape) == grid:
        return
    what = f"{where}: expected shape {grid}, an entry for each block of {block} of the weight {shape}, got {tuple(value.shape)}."
    fix = "the block that it was made for, by block=, or by overrides for this layer."
    if value.shape in (d.candidate.weight.shape, shape) and not is_mask:
        fix = f"sums over blocks: {BLOCKS}(scores, {block}).sum(-1)."
    elif value.shape in (d.candidate.weight.shape, shape):
        flat = value.reshape(shape)
        blocks = to_blocks(flat, block).any(-1)
        mixed = int((to_blocks(flat ^ expand_mask(blocks, shape, block), block).any(-1)).sum())
        made = f"{BLOCKS}(mask, {block}).any(-1)"
        fix = f"{made}." if not mixed else f"{mixed} of {blocks.numel()} blocks are kept in part: {made} keeps them whole; block=(1, 1) takes single weights."
    raise ConfigError(message(what, d.candidate.name, fix))
