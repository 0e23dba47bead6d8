"""What all configurations share."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, TypeVar
from zlib import crc32

from ...kernels.errors import ConfigError, UnsupportedError, meant

C = TypeVar("C", bound="Options")
SYSTEMS = {"activations": "ActivationPruning", "dropout": "BlockDropout", "nm": "NMMask"}  # other systems: what users call them, and their configurations
BESIDE = ("include", "exclude", "overrides", "allocation", "layers", "masks", "scores")  # options of `fxmask.apply` that are none of a configuration


@dataclasses.dataclass(frozen=True)
class Options:
    """Base of a frozen, validated configuration, whose fields are its options."""

    _kind: ClassVar[int]  # a plain attribute of each instance, and no field

    @property
    def kind(self) -> int:
        """A number for what compiled code holds fixed. `torch.compiler.nested_compile_region` takes one region's code for another by ints alone, and of those
        by a module's own: text and tuples, as most options are, it does not compare. So layers hold it, and forwards look at it."""
        return self._kind

    def _set_kind(self, *fixed: Any) -> None:
        """Set `kind`, by what compiled code holds fixed of it."""
        object.__setattr__(self, "_kind", crc32(repr(fixed).encode()))

    def replace(self: C, changes: dict[str, Any], where: str) -> C:
        """A copy with some fields changed; ConfigError names the fields that there are, or says `where` a value is wrong."""
        known = [f.name for f in dataclasses.fields(self)]
        unknown = sorted(set(changes) - set(known))
        if unknown:
            applied, system = where.startswith("fxmask.apply"), SYSTEMS.get(unknown[0])
            near = meant(unknown[0], [*known, *(BESIDE if applied else ())])
            if system and applied:
                near = f"; expected it as a configuration: fxmask.apply(model, fxmask.{system}(...))."
            elif system and system != "NMMask" and where.startswith("overrides["):  # an NMMask stands beside no other configuration
                near = f"; expected fxmask.{system}(...) in the same fxmask.apply."
            raise ConfigError(f"unknown option in {where}: expected some of {', '.join(known)}, got {', '.join(map(repr, unknown))}{near or '.'}")
        try:
            return dataclasses.replace(self, **changes)
        except (ConfigError, UnsupportedError) as e:
            if where.startswith("fxmask.apply"):  # the call itself says where
                raise
            raise type(e)(f"{where}: {e}") from None


def agreed(config: Options) -> dict[str, Any]:
    """What must agree between the run that saves a state and the one that loads it: not `impl`, which computes the same and another machine may choose
    differently."""
    return {k: v for k, v in dataclasses.asdict(config).items() if k != "impl"}
