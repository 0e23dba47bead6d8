"""Masks and scores of the user's own: which layers `apply(masks=..., scores=...)` names, and what their blocks are ranked by."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .asked import DEFAULT_RATIO
from .kernels.errors import ConfigError, UnsupportedError, first_of, meant, message
from .kernels.grid import grid_shape, matrix_shape, ratio_keeping
from .passes.finding.candidate import Candidate
from .passes.finding.choose import Decision, Patterns, check_selected
from .passes.settings.config import WeightMask
from .passes.state import ranks
from .passes.state.saliency import GIVEN

OPTIONS = ("masks", "scores")


class Given:
    """What the two options say of a model's linears. Raises ConfigError for names that there are not, and for what is no mask or score."""

    def __init__(self, found: list[Candidate], masks: Any, scores: Any) -> None:
        self.by_weight: dict[int, tuple[str, str, Tensor]] = {}  # of a candidate: the option, the name in it, the tensor
        self.names: dict[int, list[str]] = {}
        for option, given in zip(OPTIONS, (masks, scores), strict=True):
            if given is not None and not isinstance(given, Mapping):
                raise ConfigError(f"{option}: expected a dict of layer's name to tensor, got {type(given).__name__}.")
            for name, value in (given or {}).items():
                self._take(found, option, name, _checked(option, name, value))

    def __bool__(self) -> bool:
        return bool(self.by_weight)

    def _take(self, found: list[Candidate], option: str, name: str, value: Tensor) -> None:
        hits = [c for c in found if not c.product and name in (c.name, c.param_name)]
        if not hits:
            known = [c.name for c in found if not c.product]
            what = f"{option}: {name!r} is no linear of this model: expected some of {first_of(known)}{meant(name, known) or '.'}"
            raise ConfigError(message(what, "fxmask.apply", "a layer's name, or its weight's, as fxmask.masks gives it; layers= for convolutions."))
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

    def decided(self, decisions: list[Decision], config: WeightMask) -> list[Decision]:
        """The decisions with these masks and scores. Raises: ConfigError, and what `passes.finding.choose` raises for a cached mask."""
        new = [self._one(d) for d in decisions]
        if self:
            self._refuse_idle([d for d in new if d.config is not None], config)
            check_selected(new)
        return new

    def _one(self, d: Decision) -> Decision:
        entry = self.by_weight.get(id(d.candidate.weight))
        if entry is None:
            if d.config is not None and d.config.criterion == GIVEN:
                what = f"criterion='given' for {d.candidate.name!r}, which has neither a mask nor scores: expected one of them."
                raise ConfigError(message(what, d.candidate.name, "fxmask.apply(model, ..., masks={name: tensor}), or scores=; or another criterion."))
            return d
        option, name, value = entry
        if d.config is None:
            if d.candidate.name not in self.names[id(d.candidate.weight)]:
                return d  # another layer of the same weight, which nobody named
            what = f"{option}[{name!r}] is of a layer that stays dense: {d.reason}."
            raise ConfigError(message(what, d.candidate.name, f"leave it out of {option}, or let include, exclude and overrides select it."))
        shape, block = matrix_shape(d.candidate.weight.shape), d.config.block
        grid = grid_shape(shape, block)
        if tuple(value.shape) != grid:
            what = f"{option}[{name!r}]: expected shape {grid}, an entry for each block of {block} of the weight {shape}, got {tuple(value.shape)}."
            fix = f"one of single weights that is the same in each block: mask[::{block[0]}, ::{block[1]}]." if tuple(value.shape) == shape else ""
            raise ConfigError(message(what, d.candidate.name, fix or "the block that it was made for, by block=, or by overrides for this layer."))
        changes: dict[str, Any] = {"criterion": GIVEN}
        if option == "masks":
            if d.config.cover:
                raise ConfigError(message("masks are kept as they are: expected cover=False beside them, got True.", d.candidate.name, "or scores=."))
            changes["ratio"] = ratio_keeping(int(value.sum()), value.numel())
        return dataclasses.replace(d, config=d.config.replace(changes, f"{option}[{name!r}]"), own=value.float())

    def _refuse_idle(self, masked: list[Decision], config: WeightMask) -> None:
        """ConfigError for what is asked for and has no part in any layer."""
        options = {self.by_weight[id(d.candidate.weight)][0] if d.own is not None else None for d in masked}
        idle = [f"criterion={config.criterion!r}"] if None not in options and config.criterion not in (WeightMask().criterion, GIVEN) else []
        if options == {"masks"} and config.ratio != DEFAULT_RATIO:
            idle.append(f"ratio={config.ratio}")
        if idle:
            what = f"{' and '.join(idle)} beside a mask or scores for each masked layer, which say that themselves: expected the default."
            raise ConfigError(message(what, "fxmask.apply", "leave it out; layers without a mask or scores are masked by it where include names them."))


def refuse_given(masks: Any, scores: Any, beside: str) -> None:
    """ConfigError for masks or scores where they have no place."""
    named = [name for name, value in zip(OPTIONS, (masks, scores), strict=True) if value is not None]
    if named:
        raise ConfigError(f"{' and '.join(named)} are for block masks of weights: expected neither beside {beside}.")


def _checked(option: str, name: Any, value: Any) -> Tensor:
    """A copy on the host of what is given for one layer: bool, or float32."""
    where = f"{option}[{name!r}]"
    wanted = "a bool tensor, True = kept" if option == "masks" else "a tensor of real numbers, the highest are kept"
    if not isinstance(value, Tensor) or value.layout is not torch.strided or ranks.is_shard(value):
        raise ConfigError(f"{where}: expected {wanted}, got {type(value).__name__}.")
    fits = value.dtype == torch.bool if option == "masks" else value.dtype != torch.bool and not value.is_complex()
    if not fits:
        other = " A mask goes into masks=." if value.dtype == torch.bool else " Scores go into scores=." if option == "masks" else ""
        raise ConfigError(f"{where}: expected {wanted}, got {value.dtype}.{other}")
    if value.is_meta:
        raise UnsupportedError(f"{where}: expected values, got a tensor on the meta device.")
    held = value.detach().to("cpu", torch.bool if option == "masks" else torch.float32, copy=True)
    if option == "masks" and not held.any():
        raise ConfigError(f"{where}: keeps no block: expected at least one, got {tuple(held.shape)} without any.")
    if option == "scores" and held.isnan().any():
        raise ConfigError(f"{where}: expected numbers, got NaN in {int(held.isnan().sum())} of {held.numel()} blocks.")
    return held
