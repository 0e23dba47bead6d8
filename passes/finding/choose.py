"""The rule table: which linears are masked, with which configuration, and why the others are not. One table for modules and graphs."""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from ...kernels.errors import ConfigError, StateError, UnsupportedError, first_of, message, warn
from ...kernels.grid import matrix_shape
from ..settings.config import WeightMask
from ..settings.phases import IN_NODES, changes_any, in_turn
from ..state.saliency import GIVEN
from .candidate import Candidate, linear_like, surround

Pattern = str | type[nn.Module] | Callable[[nn.Module | None, str], bool]
Patterns = Pattern | Sequence[Pattern] | None
LORA_PARTS = {"lora_A", "lora_B", "lora_down", "lora_up", "lora_embedding_A", "lora_embedding_B"}
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


def matches(pattern: Pattern, c: Candidate) -> bool:
    """Whether one pattern (glob, `re:`, module type, or callable of module and name) selects a linear; a type does by its own or by that of a module around it.

    A linear whose weight the graph computes goes by its module's name, and exactly by that of its call, which is its name in `explain` once it is masked.
    A linear that no module makes, and a packed projection, is shown to callables as an nn.Linear of its shape, on the meta device.
    """
    if isinstance(pattern, str):
        if pattern.startswith("re:"):
            return re.search(pattern[3:], c.name) is not None
        return pattern in c.names or fnmatch.fnmatchcase(c.name, pattern)
    if isinstance(pattern, type):
        return issubclass(pattern, nn.Module) and (pattern in c.types or pattern in c.inside)
    try:
        return bool(pattern(_shown(c), c.name))
    except Exception as e:  # one of its own, or of arguments that it does not take
        what = f"a pattern failed: expected a callable (module, name) -> bool, got {type(e).__name__}: {e}"
        raise ConfigError(message(what, c.name, f"write it as def pattern(module, name); here it is {pattern!r}.")) from e


def _named(patterns: Iterable[Pattern], c: Candidate) -> str | None:
    """The first of some patterns that is an exact name of a linear."""
    return next((p for p in patterns if isinstance(p, str) and p in c.names), None)


def names(pattern: Pattern, c: Candidate) -> bool:
    """Whether a pattern selects what is no linear; callables are written for linears, and are not asked."""
    return isinstance(pattern, (str, type)) and matches(pattern, c)


def _shown(c: Candidate) -> nn.Module | None:
    return c.module if c.module is not None or c.weight.dim() != 2 else linear_like(c.weight)


def as_patterns(option: str, patterns: Patterns) -> list[Pattern] | None:
    """One pattern or a sequence of them, checked; None stays None."""
    if patterns is None:
        return None
    listed: list[Any] = list(patterns) if isinstance(patterns, (list, tuple, set, frozenset)) else [patterns]
    for p in listed:
        if isinstance(p, str) and p.startswith("re:"):
            try:
                re.compile(p[3:])
            except re.error as e:
                raise ConfigError(f"{option}: {p!r} is no regular expression: {e}.") from None
        elif not (isinstance(p, str) or callable(p)) or isinstance(p, nn.Module):
            raise ConfigError(f"{option}: expected a glob, a 're:' pattern, a module type or a callable (module, name) -> bool, got {p!r}.")
    return listed


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
    named = [p for p in excluded or [] if any(names(p, c) for c in left)]
    _warn_unused(found, {"include": included or [], "exclude": [p for p in excluded or [] if p not in named], "overrides": list(changes)}, others)
    if model is not None:  # all of its linears, and not those of a graph
        _warn_overtaken([c for c in found if not c.skip and not _why_not(c, included, excluded, defaults)], changes)
    decisions, asked = [], _asked_in_vain(found, [*(included or []), *(p for p, change in changes.items() if change is not False)])
    overridden = [p for p, change in changes.items() if change is not False]
    for c in found:
        reason = _why_not(c, included, excluded, defaults)
        chosen: WeightMask | None = config
        for pattern, change in changes.items():
            if matches(pattern, c):
                chosen = None if change is False else config.replace(change, f"overrides[{pattern!r}]")
        if not reason and chosen is None:
            reason = "overrides: False"
        if not reason and c.skip and not (c.reads_itself and chosen is not None and chosen.read == "weight"):
            reason = c.skip
            if not c.quiet or id(c) in asked:
                warn(f"{c.name or 'the model'} stays dense: {reason}.")
        if reason.startswith(DEFAULT) and (exact := _named(overridden, c)) is not None:
            what = f"overrides[{exact!r}] names a layer that stays dense by {reason}; a name in include, or exclude=(), lifts that."
            warn(what)
        if reason:
            chosen = None
        elif c.owners and not c.masked and chosen is not None:
            chosen = _as_reader(c, chosen)
        decisions.append(Decision(c, chosen, reason or "selected"))
    check_selected(decisions)
    return decisions


def _why_not(c: Candidate, included: list[Pattern] | None, excluded: list[Pattern] | None, defaults: bool) -> str:
    if included is not None and not any(matches(p, c) for p in included):
        return NOT_INCLUDED
    if excluded and any(matches(p, c) for p in excluded):
        return "in exclude"
    if not defaults or _named(included or [], c) is not None:
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


def check_selected(decisions: list[Decision]) -> None:
    """Errors of selected linears: weights that cannot be masked, or are masked already, or twice in two ways."""
    first: dict[int, Decision] = {}
    decisions = [d for d in decisions if not d.candidate.product]
    for d in decisions:
        if d.config is not None:
            where = d.candidate.name or "the model itself"
            _check_weight(d.candidate, d.config, where)
            _check_call(d.candidate, d.config, where)
            _check_shared(d, d.config, where, decisions, first.setdefault(id(d.candidate.weight), d))


def _check_weight(c: Candidate, config: WeightMask, where: str) -> None:
    """Raise where a weight cannot be masked so, whatever calls it."""
    if c.problem:
        raise UnsupportedError(message(f"cannot mask {where!r}: {c.problem}.", where, f"or leave it out: exclude={c.name!r}."))
    if c.masked:
        raise StateError(message(f"{where!r} is masked already: expected a dense layer.", where, "call fxmask.restore(model) first."))
    if config.read == "weight" and nn.Conv2d in c.types:
        what = f"cannot mask {where!r} by read='weight', which is for Linears: got a convolution."
        raise UnsupportedError(message(what, where, f"exclude={c.name!r}, or let its owner call it."))
    if config.read == "weight" and (c.module is None or c.nodes or "weight" not in c.module._parameters):
        what = f"cannot mask {where!r} by read='weight': expected a module with a plain weight parameter."
        raise UnsupportedError(message(what, where, f"exclude={c.name!r}."))
    if config.cached and c.weight.is_meta:
        what = f"a cached mask (refresh={config.refresh}) needs the weight's values: expected real memory, got a meta tensor."
        fix = "materialise the model first" + ("." if config.remembers else ", or use refresh=1.")
        raise UnsupportedError(message(what, where, fix))


def _check_call(c: Candidate, config: WeightMask, where: str) -> None:
    """Raise where a call in a graph cannot have what a module can."""
    if c.host is None:
        return
    baked = changes_any(config, IN_NODES) if c.weight_node is None else []
    if baked:
        what = f"a traced graph holds {' and '.join(baked)} in its nodes: expected phases that change nothing of these, got {config.phases!r}."
        raise UnsupportedError(message(what, where, "call fxmask.apply on the nn.Module instead of its trace; torch.compile that."))
    computed = c.weight_path is None and c.weight_node is None
    if computed and config.ever_cached:
        refresh = next(p.refresh for p in in_turn(config) if p.cached)
        what = f"a cached mask (refresh={refresh}) needs the parameter, and this graph computes the weight."
        fix = "use refresh=1 for it" + (", no gradient criterion, average, hysteresis, regrow or gain." if config.remembers else ".")
        fix = "give the mask or scores to the nn.Module, before it is traced or exported." if config.criterion == GIVEN else fix
        raise UnsupportedError(message(what, where, fix))
    if computed and config.wants_weight:
        what = "Feedback('flip_rate') looks at the weight between steps, and this graph computes it."
        raise UnsupportedError(message(what, where, "call fxmask.apply on the nn.Module instead of its trace, or use another schedule for it."))
    if config.soft:
        what = "soft=True is for modules: expected an nn.Linear that is called, got a call in a graph."
        raise UnsupportedError(message(what, where, "apply fxmask to the nn.Module, and trace or compile it afterwards; or leave soft out."))


def _check_shared(d: Decision, config: WeightMask, where: str, decisions: list[Decision], first: Decision) -> None:
    """Raise where others use the weight in another way. `first`: the first decision about it."""
    c, writes = d.candidate, config.gain or config.regrow is not None
    others = [o.candidate.name for o in decisions if o.candidate.weight is c.weight and o.candidate is not c] if writes else []
    if others or (writes and c.tied_embedding):
        what = f"gain and regrow write the weight of {where!r}, which {', '.join(map(repr, others)) or 'an Embedding'} uses, too: expected one user."
        raise ConfigError(message(what, where, "leave them out for it, or exclude it."))
    if first.config is None or dataclasses.replace(first.config, read="call") != dataclasses.replace(config, read="call"):
        what = f"one weight would be masked twice, differently: {first.candidate.name!r} and {where!r} share it."
        raise ConfigError(message(what, where, "give both the same options, or exclude both."))
