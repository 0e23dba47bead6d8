"""The options of `torch.compile(model, backend="fxmask", options={...})`: what there is, and what a backend that keeps no state cannot take."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping
from typing import Any

import torch

from ..inputs import mask_overrides, selected
from ..kernels.errors import ConfigError, UnsupportedError, meant, message
from ..passes.counting.traced import behind_callback
from ..passes.finding.choose import Decision
from ..passes.finding.patterns import Pattern, as_patterns
from ..passes.infra import Pass
from ..passes.settings.activation_pruning import ActivationPruning
from ..passes.settings.config import WeightMask
from ..passes.state.saliency import GIVEN, LEARNED

MASK = ("ratio", "block", "backward", "criterion", "ties", "impl", "seed", "cover")  # what a mask can be without any state
STATEFUL = ("refresh", "start", "schedule", "dense_every", "average", "hysteresis", "regrow", "soft", "gain", "phases")
OF_APPLY = ("allocation", "layers", "read")  # which go by modules, and a graph has none
OWN = ("activations", "include", "exclude", "overrides", "require", "match", "passes", "inner", "inductor")
WHERE = "torch.compile(backend='fxmask')"
APPLY = "use fxmask.apply(model, ...), fxmask.guard, then torch.compile(model)."


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of the backend.

    Args:
        ratio, block, backward, criterion, ties, impl, seed, cover: as in `fxmask.WeightMask`. include, exclude, overrides: as in `fxmask.apply`.
        activations: an `ActivationPruning` without steps, or a dict of its options: inputs are saved pruned. Masks are made beside it where one of their
            options is given, and else none. With `affine` every product with a parameter is found, as in a trace.
        require: True: a graph in which a linear stays dense unasked, or nothing is masked, is an error. Patterns: each must be masked in each graph.
        match: `linear`, or `matmul`: products with a transposed parameter count as linears.
        passes: `fxmask.passes.infra.Pass` objects of your own, run in order before the masks; see passes/README.md.
        inner: what compiles the rewritten graph: `inductor`, the name of another backend (`eager`, `aot_eager`), or a callable.
        inductor: Inductor's own options, as `torch.compile(options=...)` would take them, and `mode`, which torch.compile takes beside no options.
    """

    config: WeightMask
    masks: bool  # whether any option of the masks, or of pruned inputs, was given
    activations: ActivationPruning | None = None
    alone: bool = False  # inputs are pruned, and nothing is masked
    include: Any = None
    exclude: Any = None
    overrides: Any = None
    require: Any = False
    match: str = "linear"
    passes: tuple[Pass, ...] = ()
    inner: Any = "inductor"
    inductor: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def of_masks(self) -> Mapping[Any, Any] | None:
        """The overrides, without what they say of pruned inputs."""
        return self.overrides if self.activations is None else mask_overrides(self.overrides, self.activations, self.alone)

    def pruned(self, decisions: list[Decision]) -> list[tuple[Decision, ActivationPruning]]:
        """Those whose input is saved pruned, and how. Raises: ConfigError, UnsupportedError."""
        return [] if self.activations is None else selected(decisions, self.activations, self.overrides, self.alone, lifted=True)

    @property
    def require_patterns(self) -> list[Pattern]:
        """The patterns of `require`; none where that is True or False."""
        return [] if isinstance(self.require, bool) else as_patterns("require", self.require) or []


def parse(given: Mapping[str, Any] | None) -> Options:
    """Options from what torch.compile was given. Raises: ConfigError, UnsupportedError."""
    if given is not None and not isinstance(given, Mapping):
        raise ConfigError(message(f"options: expected a dict such as {{'ratio': 0.5, 'block': (64, 64)}}, got {given!r}.", WHERE))
    given = dict(given or {})
    stateful = sorted(set(given) & set(STATEFUL))
    words = {k: v for k, v in given.items() if isinstance(v, str)}  # an array has no single truth
    stateful += [f"{k}={v}" for k, values in (("backward", ("rigl",)), ("criterion", LEARNED)) if (v := words.get(k, "")) in values]
    if stateful:
        what = f"the backend keeps no state between calls, and {', '.join(stateful)} {'counts' if len(stateful) == 1 else 'count'} optimiser steps."
        raise UnsupportedError(message(what, WHERE, APPLY))
    if words.get("criterion") == GIVEN or "masks" in given or "scores" in given:
        raise UnsupportedError(message("the backend makes its masks from weights: expected no masks or scores of your own.", WHERE, APPLY))
    if modules := [k for k in OF_APPLY if k in given]:
        raise UnsupportedError(message(f"the backend meets calls and no modules, and {', '.join(modules)} asks about modules.", WHERE, APPLY))
    unknown = sorted(set(given) - {*MASK, *OWN}, key=str)
    if unknown:
        what = f"unknown option: expected some of {', '.join((*MASK, *OWN))}, got {', '.join(map(repr, unknown))}{meant(unknown[0], (*MASK, *OWN)) or '.'}"
        raise ConfigError(message(what, WHERE, "options of Inductor go into options={'inductor': {...}}."))
    if "match" in given and words.get("match") not in ("linear", "matmul"):
        raise ConfigError(f"match: expected linear or matmul, got {given['match']!r}.")
    if not isinstance(given.get("inductor", {}), Mapping):
        raise ConfigError(f"inductor: expected a dict of Inductor's options, got {given['inductor']!r}.")
    if not isinstance(given.get("require", False), bool):
        as_patterns("require", given["require"])
    _check_inner(given.get("inner", "inductor"))
    if given.get("inductor") and given.get("inner", "inductor") != "inductor":
        raise ConfigError(f"inductor= with inner={given['inner']!r}: expected one of them.")
    pruning = _pruning(given.get("activations"))
    passes = given.get("passes", ())
    if not isinstance(passes, (list, tuple)) or not all(isinstance(p, Pass) for p in passes):
        raise ConfigError(f"passes: expected a list of fxmask.passes.infra.Pass objects, got {given['passes']!r}.")
    mask = {k: given[k] for k in MASK if k in given}
    own: dict[str, Any] = {k: given[k] for k in OWN if k in given}
    about_masks = bool(mask) or bool({"activations", "include", "exclude", "overrides", "require", "match"} & set(own))
    inductor = inductor_options(given.get("inductor", {}))
    own |= {"passes": tuple(passes), "inductor": inductor, "activations": pruning, "alone": pruning is not None and not mask}
    return Options(WeightMask(**mask), about_masks, **own)


def _check_inner(inner: Any) -> None:
    if callable(inner) or (isinstance(inner, str) and inner == "inductor"):
        return
    known = [name for name in torch._dynamo.list_backends(exclude_tags=()) if name != "fxmask"]
    if not isinstance(inner, str) or inner not in known:  # an array has no single truth
        what = f"inner: expected the name of another backend or a function that is one, got {inner!r}{meant(inner, known) or '.'}"
        raise ConfigError(message(what, WHERE, "leave it out: Inductor; torch._dynamo.list_backends(exclude_tags=()) lists the others."))


def given_to(callback: Any) -> tuple[bool, Any]:
    """Whether Dynamo's callback calls this backend in the end, and the options that it was given then."""
    called = behind_callback(callback)
    ours = getattr(getattr(called, "compiler_fn", None), "__module__", "") == f"{__package__}.backend"
    return ours, getattr(called, "kwargs", {}).get("options") if ours else None


def inductor_options(given: Mapping[Any, Any]) -> dict[str, Any]:
    """Options of Inductor, checked as `torch.compile(options=...)` checks them; `mode` becomes the options that it stands for. Raises: ConfigError."""
    if not given:
        return {}
    options = {k.replace("-", "_") if isinstance(k, str) else k: v for k, v in given.items()}
    config, known = importlib.import_module("torch._inductor.config"), ["mode", *torch._inductor.list_options()]
    for name, value in options.items():
        if name not in known:
            what = f"inductor: expected options of Inductor, which torch._inductor.list_options() lists, or 'mode', got {name!r}{meant(name, known) or '.'}"
            raise ConfigError(message(what, WHERE, f"leave it out: this PyTorch ({torch.__version__}) has none of that name."))
        kind = str if name == "mode" else config.get_type(name)
        if isinstance(kind, type) and not isinstance(value, kind):
            raise ConfigError(message(f"inductor: expected {name} as {kind.__name__}, got {value!r}.", WHERE, f"give {kind.__name__} there."))
    mode = options.pop("mode", "default")
    try:
        return {**torch._inductor.list_mode_options(mode), **options}
    except RuntimeError as e:
        raise ConfigError(message(f"inductor: {e}", WHERE, "choose among these.")) from None


def _pruning(given: Any) -> ActivationPruning | None:
    """The option `activations` as a configuration."""
    config = ActivationPruning().replace(dict(given), "options['activations']") if isinstance(given, Mapping) else given
    if config is not None and not isinstance(config, ActivationPruning):
        raise ConfigError(f"activations: expected a fxmask.ActivationPruning or a dict of its options, got {given!r}.")
    refuse_steps(config)
    return config


def refuse_steps(config: ActivationPruning | None) -> None:
    """UnsupportedError where pruned inputs count optimiser steps."""
    if config is not None and config.needs_steps:
        what = "the backend keeps no state between calls, and start and schedule of pruned activations count optimiser steps."
        raise UnsupportedError(message(what, WHERE, APPLY))
