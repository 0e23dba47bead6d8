"""The ratio of pruned inputs by the optimiser's step: what a layer holds of its schedule, and how steps move it.

A layer's `_fxmask_pruning` is the configuration in force, `_fxmask_pruning_given` what the user asked for where that counts steps. Until somebody announces
that steps will come they are one object, whose forward raises in training; from then on the one in force has a ratio and no schedule. How many blocks are kept
is a shape, for which a compiled model may be compiled anew; a schedule therefore goes by stages.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from ..settings.activation_pruning import ActivationPruning

NAMES = ("_fxmask_pruning", "_fxmask_pruning_given", "_fxmask_pruning_step", "_fxmask_pruning_guard", "_fxmask_pruning_resumed")


def install(m: nn.Module, config: ActivationPruning) -> None:
    """Give a layer its configuration; where that counts steps an object of its own, by which a guard knows the layer from one of a later `apply`."""
    config = dataclasses.replace(config) if config.needs_steps else config
    m.__dict__["_fxmask_pruning"] = config
    if config.needs_steps:
        m.__dict__.update(_fxmask_pruning_given=config, _fxmask_pruning_step=0, _fxmask_pruning_guard=None, _fxmask_pruning_resumed=False)


def uninstall(m: nn.Module) -> None:
    """Remove what `install` made."""
    for name in NAMES:
        m.__dict__.pop(name, None)


def is_scheduled(m: nn.Module) -> bool:
    """Whether a layer's pruning counts steps."""
    return "_fxmask_pruning_given" in m.__dict__


def is_announced(m: nn.Module) -> bool:
    """Whether somebody counts the steps of a scheduled layer."""
    return m.__dict__["_fxmask_pruning"] is not m.__dict__["_fxmask_pruning_given"]


def begins_anew(m: nn.Module) -> bool:
    """Whether no step of a scheduled layer was counted, here or in the run that it resumes."""
    return not m.__dict__["_fxmask_pruning_step"] and not m.__dict__.get("_fxmask_pruning_resumed")  # pickles of before have none


def advance(m: nn.Module, n: int) -> None:
    """`n` optimiser steps were taken; 0 announces them."""
    d = m.__dict__
    d["_fxmask_pruning_step"] += n
    now = d["_fxmask_pruning_given"].in_force(d["_fxmask_pruning_step"])
    if now != d["_fxmask_pruning"]:  # the object stays while the ratio does
        d["_fxmask_pruning"] = now


def follow(m: nn.Module, token: object | None) -> None:
    """A guard begins to count the steps of a layer, or with None ends it: training raises until somebody counts them again."""
    m.__dict__["_fxmask_pruning_guard"] = token
    if token is None:
        m.__dict__["_fxmask_pruning"] = m.__dict__["_fxmask_pruning_given"]
    else:
        advance(m, 0)


def copied(attributes: dict[str, Any]) -> dict[str, Any]:
    """The attributes of a copy of a layer: hooks of an optimiser do not follow it, so that nobody counts its steps where a guard did."""
    if attributes.get("_fxmask_pruning_guard") is None:
        return attributes
    return {**attributes, "_fxmask_pruning_guard": None, "_fxmask_pruning": attributes["_fxmask_pruning_given"]}


def words(m: nn.Module) -> str:
    """What `explain` says of a layer's pruning."""
    given: ActivationPruning | None = m.__dict__.get("_fxmask_pruning_given")
    now: ActivationPruning = m.__dict__["_fxmask_pruning"]
    if given is None:
        return now.words()
    if not is_announced(m):
        return f"{given.words()}, by steps that nobody counts yet"
    return now.words() + (f", {100 * given.ratio:g} % in the end" if now.ratio != given.ratio else "")
