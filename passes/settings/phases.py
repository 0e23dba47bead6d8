"""What changes at which optimiser step: the `phases` of a WeightMask, as plain values. `passes.settings.phase_change` takes a mask from one to the next."""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from ...kernels.errors import ConfigError, UnsupportedError, meant
from ...kernels.grid import plain_int

if TYPE_CHECKING:
    from .config import WeightMask

FIELDS = ("block", "backward", "criterion", "ties", "cover", "refresh")  # what a phase may change
IN_NODES = ("block", "backward")  # of them, what a rewritten graph holds in its nodes
Phases = tuple[tuple[int, tuple[tuple[str, Any], ...]], ...]  # a dict could be changed, and has no hash
FORM = "phases: expected {optimiser step: dict of options, ...}, such as {1000: dict(backward='ste')}"


def check_phases(config: WeightMask) -> Phases | None:
    """The phases of a config in the order of their steps, as tuples; None where there are none.

    Raises: ConfigError, UnsupportedError: for a step below 1, an option that no phase may change, values that are no valid WeightMask together, and a phase
    that changes nothing.
    """
    given = _pairs(config.phases)
    found: list[tuple[int, tuple[tuple[str, Any], ...]]] = []
    changes: dict[str, Any] = {}
    before = dataclasses.replace(config, phases=None)
    for step, new in given:
        unknown = sorted(set(new) - set(FIELDS))
        if unknown:
            near = meant(unknown[0], FIELDS) or "; the ratio moves by schedule=."
            raise ConfigError(f"phases[{step}]: expected some of {', '.join(FIELDS)}, got {', '.join(unknown)}{near}")
        changes |= new
        try:
            now = _with(config, step, changes)
        except (ConfigError, UnsupportedError) as e:
            raise type(e)(f"phases[{step}]: {e}") from None
        if all(getattr(now, f) == getattr(before, f) for f in FIELDS):
            got = ", ".join(f"{k}={v!r}" for k, v in new.items()) or "no option"
            raise ConfigError(f"phases[{step}] changes nothing: expected another value than before this step, got {got}; leave the phase out.")
        found.append((step, tuple((f, getattr(now, f)) for f in FIELDS if f in new)))
        before = now
    return tuple(found) or None


def _pairs(given: Any) -> list[tuple[int, dict[str, Any]]]:
    """Phases in any form that they may have, in order."""
    if given is None:
        return []
    try:
        pairs = [(step, dict(changes)) for step, changes in (given.items() if isinstance(given, Mapping) else given)]
    except (TypeError, ValueError):
        raise ConfigError(f"{FORM}, got {given!r}.") from None
    found: dict[int, dict[str, Any]] = {}
    for step, changes in pairs:
        n = plain_int(step)
        if n is None or n < 1 or not all(isinstance(k, str) for k in changes):
            raise ConfigError(f"{FORM}, steps of at least 1 (the options of the mask itself are those of step 0), got {step!r}: {changes!r}.")
        found[n] = changes
    if len(found) < len(pairs):
        raise ConfigError(f"{FORM}, each step once, got {given!r}.")
    return sorted(found.items())


def _with(config: WeightMask, step: int, changes: Mapping[str, Any]) -> WeightMask:
    """The config of a phase. A ramp that has ended by its first step is no reason against refresh=0."""
    schedule, steps = config.schedule, getattr(config.schedule, "steps", None)
    if changes.get("refresh") == 0 and steps is not None and step >= config.start + steps:
        schedule = None
    return dataclasses.replace(config, phases=None, schedule=schedule, soft=config.soft and schedule is not None, **changes)


def _tuples(config: WeightMask) -> Phases:
    return cast(Phases, config.phases or ())  # as check_phases has left them


def values(config: WeightMask, field: str) -> set[Any]:
    """The values that a field has in any phase."""
    return {getattr(config, field), *(value for _, new in _tuples(config) for name, value in new if name == field)}


def begun(config: WeightMask, step: int) -> int:
    """How many phases have begun at an optimiser step."""
    return bisect_right([s for s, _ in _tuples(config)], step)


def in_force(config: WeightMask, step: int) -> WeightMask:
    """The config at an optimiser step, itself without phases."""
    if not config.phases:
        return config
    changes = dict[str, Any]()
    for _, new in _tuples(config)[: begun(config, step)]:
        changes |= dict(new)
    return _with(config, step, changes)


def in_turn(config: WeightMask) -> list[WeightMask]:
    """The configs that are in force one after the other."""
    return [in_force(config, step) for step in (0, *(s for s, _ in _tuples(config)))]


def changes_any(config: WeightMask, fields: tuple[str, ...]) -> list[str]:
    """Those of some fields that a later phase changes."""
    return [f for f in fields if len(values(config, f)) > 1]


def to_come(config: WeightMask, step: int, fields: tuple[str, ...]) -> bool:
    """Whether a phase that begins after an optimiser step gives some of these fields another value than they have at that step."""
    now, later = in_force(config, step), _tuples(config)[begun(config, step) :]
    return any(name in fields and value != getattr(now, name) for _, new in later for name, value in new)


def plain(phases: Any) -> dict[int, dict[str, Any]] | None:
    """Phases as a state is saved with them: dicts and lists."""
    return {s: {k: list(v) if isinstance(v, tuple) else v for k, v in new.items()} for s, new in _pairs(phases)} or None
