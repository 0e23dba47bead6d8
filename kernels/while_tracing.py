"""What the compiler calls once, as it traces, and takes the answer of. Imported then: these decorators import the compiler, which takes seconds."""

from __future__ import annotations

import torch

from . import prune_plan


@torch.compiler.assume_constant_result
def drops_nothing() -> None:
    """Warn; sizes, and even ratios, may be symbols here, which the compiler can hand to no such call."""
    prune_plan.warn_of_nothing("an input of a compiled layer: the ratio of its blocks a sample rounds to none")


@torch.compiler.assume_constant_result
def has_autocast(kind: str) -> bool:
    """Whether a type of device knows autocast; PyTorch 2.11's Dynamo cannot look into that."""
    return torch.amp.is_autocast_available(kind)
