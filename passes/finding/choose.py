"""The rule table: which linears are masked, with which configuration, and why the others are not. One table for modules and graphs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from ...kernels.errors import ConfigError, UnsupportedError, first_of, message, warn
from ...kernels.grid import matrix_shape
from ..settings.config import WeightMask
from .candidate import Candidate, surround
from .patterns import Pattern, Patterns, as_patterns, exact_name, matches, matches_other
from .selected import check_selected

LORA_PARTS = {"lora_A", "lora_B", "lora_a", "lora_b", "lora_down", "lora_up", "lora_embedding_A", "lora_embedding_B"}  # PEFT's, torchtune's, kohya's
SMALLEST = 16
DEFAULT = "default exclusion"
NOT_INCLUDED = "not in include"


@dataclasses.dataclass
class Decision:
    """What becomes of one linear: a configuration, or None and the reason."""

    candidate: Candidate
    config: WeightMask | None
    reason: str
    own: Tensor | None = None  # float32 [NB, KB], scores of the user's by which its blocks are ranked


def reasons_of(decisions: list[Decision], none: str = "it has no linear") -> str:
    """Why nothing came of any."""
    return "; ".join(f"{d.candidate.name or 'the model itself'}: {d.reason}" for d in decisions) or none


def choose(
    found: list[Candidate], config: WeightMask, include: Patterns, exclude: Patterns, overrides: Mapping[str, Any] | None, model: nn.Module | None,
    others: Callable[[], list[Candidate]] = list, left: Sequence[Candidate] = (),
) -> list[Decision]:  # fmt: skip
    """Decide for every linear; `model` is None for a compiler's graphs. Raises before anything is changed. Warns of patterns that match nothing here, nor in
    `others`, the linears of the model's other graphs. `left`: what is no linear, which `exclude` may name."""
    surround(found, model)
    included, excluded = as_patterns("include", include), as_patterns("exclude", exclude)
    defaults = exclude is None or bool(excluded)  # exclude=() switches the default exclusions off
    changes = _check_overrides(overrides)
    named = [p for p in excluded or [] if any(matches_other(p, c) for c in left)]
    _warn_unused(found, {"include": included or [], "exclude": [p for p in excluded or [] if p not in named], "overrides": list(changes)}, others)
    if model is not None:  # all of its linears, and not those of a graph
        _warn_overtaken([c for c in found if not c.skip and not _why_not(c, included, excluded, defaults)], changes)
    overridden = [p for p, change in changes.items() if change is not False]
    decisions, asked = [], _asked_in_vain(found, [*(included or []), *overridden])
    for c in found:
        reason = _why_not(c, included, excluded, defaults)
        chosen, off = config, False
        for pattern, change in changes.items():
            if matches(pattern, c):
                off = change is False
                chosen = config if off else config.replace(change, f"overrides[{pattern!r}]")
        if not reason and off:
            reason = "overrides: False"
        if not reason and c.skip and not (c.reads_itself and chosen.read == "weight"):
            reason = c.skip
            if not c.quiet or id(c) in asked:
                warn(f"{c.name or 'the model'} stays dense: {reason}.")
        if reason.startswith(DEFAULT) and (exact := exact_name(overridden, c)) is not None:
            warn(f"overrides[{exact!r}] names a layer that stays dense by {reason}; a name in include, or exclude=(), lifts that.")
        if not reason and c.owners and not c.masked:
            chosen = _as_reader(c, chosen)
        decisions.append(Decision(c, None if reason else chosen, reason or "selected"))
    check_selected(decisions)
    return decisions


def _why_not(c: Candidate, included: list[Pattern] | None, excluded: list[Pattern] | None, defaults: bool) -> str:
    if included is not None and not any(matches(p, c) for p in included):
        return NOT_INCLUDED
    if excluded and any(matches(p, c) for p in excluded):
        return "in exclude"
    if not defaults or exact_name(included or [], c) is not None:
        return ""  # an exact name lifts the default exclusions
    if c.tied_embedding:
        return f"{DEFAULT}: weight tied to an Embedding"
    if c.sized and not c.problem and c.weight.dim() >= 2 and min(matrix_shape(c.weight.shape)) < SMALLEST:
        return f"{DEFAULT}: min(out, in) = {min(matrix_shape(c.weight.shape))} < {SMALLEST}"
    if LORA_PARTS & set(c.name.split(".")):
        return f"{DEFAULT}: LoRA factor"
    return ""


def _as_reader(c: Candidate, config: WeightMask) -> WeightMask:
    try:
        return dataclasses.replace(config, read="weight")
    except UnsupportedError as e:
        fix = f"overrides={{{c.name!r}: dict(backward='ste')}} or {{{c.name!r}: False}}."
        raise UnsupportedError(message(f"the owner of this layer reads its weight and never calls it; {e}", c.name, fix)) from None


def _check_overrides(overrides: Mapping[str, Any] | None) -> dict[str, Any]:
    if overrides is not None and not isinstance(overrides, Mapping):
        raise ConfigError(f"overrides: expected a dict of pattern to options, got {overrides!r}.")
    changes = dict(overrides or {})
    as_patterns("overrides", list(changes))
    for pattern, change in changes.items():
        if change is not False and not isinstance(change, Mapping):
            raise ConfigError(f"overrides[{pattern!r}]: expected a dict of options or False, got {change!r}.")
    return changes


def _warn_unused(found: list[Candidate], options: dict[str, list[Pattern]], others: Callable[[], list[Candidate]]) -> None:
    names = ", ".join(c.name or "(the model itself)" for c in found) or "no linear at all"
    here = {id(c.weight) for c in found}  # a pattern for another name of these has no effect
    for option, patterns in options.items():
        for p in patterns:
            if not any(matches(p, c) for c in (*found, *(c for c in others() if id(c.weight) not in here))):
                under = f"{p}.*" if isinstance(p, str) else ""
                hint = f" For what lies in it write {under!r}." if under and any(matches(under, c) for c in found) else ""
                shared = {id(c.weight) for c in others() if matches(p, c)}
                if called := [c.name for c in found if id(c.weight) in shared]:
                    hint += f" A weight that layers share goes by the first one's name here: {first_of(called)}."
                warn(f"{option}: {p!r} matches nothing; there are: {names}.{hint}")


def _warn_overtaken(found: list[Candidate], changes: dict[Any, Any]) -> None:
    """A pattern that matches every linear that could be masked leaves those before it without effect, as the last match wins and nothing adds up."""
    patterns = list(changes)
    last = max((i for i, p in enumerate(patterns) if len(found) > 1 and all(matches(p, c) for c in found)), default=0)
    with_masks = [p for p in patterns[:last] if changes[p] is False or changes[p]]  # and not those of what goes beside them alone
    if lost := [repr(p) for p in with_masks if any(matches(p, c) for c in found)]:
        what = f"overrides: no effect has {first_of(lost)} (what they say of inputs beside masks aside), as {patterns[last]!r} behind matches every layer"
        warn(f"{what}: the last match wins, and options do not add up. Put {patterns[last]!r} first, or its options into the config.")


def _asked_in_vain(found: list[Candidate], patterns: list[Pattern]) -> set[int]:
    """What patterns name that select nothing else than linears which stay dense: whoever wrote these means them."""
    hits = [[c for c in found if matches(p, c)] for p in patterns]
    return {id(c) for hit in hits if all(c.skip for c in hit) for c in hit}
