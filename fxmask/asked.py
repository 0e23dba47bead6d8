"""What `fxmask.apply` was asked for: configurations from its arguments, and whether the model is one that it can change."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from typing import Any

from torch import nn

from .inputs import Other
from .kernels.errors import ConfigError, UnsupportedError, message
from .passes.settings.activation_pruning import ActivationPruning
from .passes.settings.block_dropout import BlockDropout
from .passes.settings.config import WeightMask
from .passes.settings.nm_mask import NMMask
from .passes.state import ranks
from .sites import expect_module, refuse_scripted


class _Int(int):
    """An int of its own, where Python keeps one object for every small one."""


# objects of their own: identity tells a default from the same value typed by a user
DEFAULT_RATIO: float = float("0.5")
DEFAULT_BLOCK: tuple[int, int] = (int("16"), 16)
MASKED, FRO, AUTO = (str(text, "ascii") for text in (b"masked", b"fro", b"auto"))
ONE, START, SEED = _Int(1), _Int(0), _Int(0)
DEFAULTS: dict[str, Any] = dict(
    ratio=DEFAULT_RATIO, block=DEFAULT_BLOCK, backward=MASKED, criterion=FRO, refresh=ONE, start=START, schedule=None, impl=AUTO, seed=SEED
)


ALONE: dict[type, str] = {  # why an NMMask does not go with another config; its own kind is last, as one is always there
    WeightMask: "a block that is left out would leave groups of fewer than n of m",
    ActivationPruning: "its layers multiply by W∘M in PyTorch's own product, which saves inputs whole",
    BlockDropout: "its layers multiply by W∘M in PyTorch's own product, which drops nothing of inputs",
    NMMask: "a weight has one mask",
}


def configs_of(configs: tuple[Any, ...], options: Mapping[str, Any], more: Mapping[str, Any]) -> tuple[WeightMask | None, Other | NMMask | None]:
    """The WeightMask, if there is one, and the other configuration. `options`: values of `DEFAULTS`, given or not; `more`: others that were given."""
    if not configs:
        where = "fxmask.apply, besides include, exclude, overrides, allocation, layers, masks and scores"
        return WeightMask().replace({**options, **more}, where), None
    for c in configs:
        if not isinstance(c, (WeightMask, ActivationPruning, BlockDropout, NMMask)):
            hint = f"; a ratio goes by name: fxmask.apply(model, ratio={c!r})." if isinstance(c, float) else "."
            raise ConfigError(f"config: expected a fxmask.WeightMask, ActivationPruning, BlockDropout or NMMask, got {c!r}{hint}")
    given = [*more, *(n for n, v in options.items() if v is not DEFAULTS[n])]
    if given:
        _refuse_beside(configs, given, {**options, **more})
    if len(configs) > 1 and any(isinstance(c, NMMask) for c in configs):
        kinds = " and ".join(type(c).__name__ for c in configs)
        fix = "give one of them, and overrides= for layers that differ."
        why = next(why for kind, why in ALONE.items() if any(isinstance(c, kind) for c in configs))
        raise ConfigError(message(f"an NMMask goes alone: expected one config, got {kinds}; {why}.", "fxmask.apply", fix))
    for kind, what in ((WeightMask, "a weight would be masked"), (ActivationPruning, "an input would be pruned"), (BlockDropout, "an input would be dropped")):
        count = sum(isinstance(c, kind) for c in configs)
        if count > 1:
            raise ConfigError(f"{what} twice: expected one {kind.__name__}, got {count}; use overrides= for layers that differ.")
    others = [c for c in configs if not isinstance(c, WeightMask)]
    if len(others) > 1:
        what = "BlockDropout with ActivationPruning: dropout saves its input whole, and its dW leaves out the dropped blocks, not the smallest ones."
        raise ConfigError(message(what, "fxmask.apply", "give one of them."))
    return next((c for c in configs if isinstance(c, WeightMask)), None), next(iter(others), None)


def _refuse_beside(configs: tuple[Any, ...], given: list[str], values: Mapping[str, Any]) -> None:
    """ConfigError for options beside configurations: it says where they belong."""
    there: list[Any] = [WeightMask, *(type(c) for c in configs if not isinstance(c, WeightMask))]
    known = {c: [f.name for f in dataclasses.fields(c)] for c in there}
    homes = {name: [c.__name__ for c, fields in known.items() if name in fields] for name in sorted(given)}
    lost = [name for name, classes in homes.items() if not classes]
    if lost:
        each = "; ".join(f"{c.__name__}: {', '.join(fields)}" for c, fields in known.items())
        raise ConfigError(f"unknown option beside configs: expected options inside of them ({each}), got {', '.join(map(repr, lost))}.")
    alone = [name for name, classes in homes.items() if NMMask in there and NMMask.__name__ not in classes]
    if alone:
        fields = ", ".join(known[NMMask])
        raise ConfigError(f"an NMMask goes alone, without the options of a WeightMask: expected some of {fields}, inside of it, got {', '.join(alone)}.")
    inside = sorted({c for classes in homes.values() for c in classes})
    what = f"configs and {', '.join(homes)}: expected options of the mask inside {'(...) or '.join(inside)}(...), got both."
    written = ", ".join(f"{name}={values[name]!r}" for name in homes)
    beside = "beside a config go include, exclude, overrides, allocation, layers, masks and scores"
    raise ConfigError(message(what, "fxmask.apply", f"write fxmask.{inside[0]}(..., {written}), or leave out what is the default; {beside}."))


def check_model(model: nn.Module, caller: str = "fxmask.apply") -> None:
    """UnsupportedError for a model that is compiled, wrapped or sharded already, ConfigError for what is no model."""
    expect_module(model, caller)
    refuse_scripted(model, caller)
    wrappers = (nn.DataParallel, nn.parallel.DistributedDataParallel)
    optimized = getattr(sys.modules.get("torch._dynamo"), "OptimizedModule", ())  # nothing is compiled before it is imported, which takes seconds
    for name, m in model.named_modules():
        kinds = {
            "compiled": isinstance(m, optimized) or m._compiled_call_impl is not None,
            "wrapped for data parallelism": isinstance(m, wrappers),
            "wrapped by FSDP": type(m).__name__ == "FullyShardedDataParallel",
            "sharded by fully_shard": ranks.is_sharded_module(m),
        }
        if kind := next((kind for kind, holds in kinds.items() if holds), ""):
            fix = f"call {caller} on the plain module first, then compile or wrap it."
            raise UnsupportedError(message(f"{caller}: expected a plain nn.Module, got one that is {kind}.", name or type(m).__name__, fix))
