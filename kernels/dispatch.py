"""Which implementation an op runs: `reference` (plain PyTorch, everywhere), `cpu` (strips of kept blocks, see `kernels.cpu`), or `triton` (CUDA tensors, or
CPU tensors in Triton's interpreter).

An explicit request never falls back: it raises. `auto` takes on a CPU the fastest of masked-dense and the strips, case by case. On CUDA an op cannot know the
density of its mask without a host sync, so its `auto` is the reference; whoever knows the ratio asks `kernels.gpu_choice` and requests `triton` where that
pays, as masked Linears do. Masks are made by kernels under `auto`, too, where those take the case: they are the same to the bit.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from . import reference
from .cpu import chosen
from .errors import ConfigError, UnsupportedError

IMPLEMENTATIONS = ("auto", "reference", "cpu", "triton")


def check_name(impl: str) -> None:
    """Raise ConfigError for an implementation that there is not, which would fall back."""
    if impl not in IMPLEMENTATIONS:
        raise ConfigError(f"unknown impl: expected one of {', '.join(IMPLEMENTATIONS)}, got {impl!r}.")


def triton_ops() -> ModuleType:
    """The Triton implementation, imported when it is first asked for; UnsupportedError where Triton is not installed."""
    try:
        return importlib.import_module(".triton.implementation", __package__)
    except ImportError as e:
        raise UnsupportedError(f"impl='triton' needs Triton: expected it installed, got {e!r}; use impl='auto' or impl='reference'.") from None


def form(impl: str, t: Tensor) -> Any:
    """What runs an op on `t`: functions as in `kernels.reference`. Raises: UnsupportedError where an explicit `impl` cannot, ConfigError for an unknown one."""
    if impl == "auto":
        return chosen.AUTO if t.is_cpu else reference
    check_name(impl)
    if impl == "triton":
        triton_ops().require(t)
        return triton_ops()
    if impl == "cpu":
        chosen.require(t)
        return chosen.FORCED
    return reference


def runs_triton(impl: str, device: torch.device) -> bool:
    """Whether `impl` means Triton kernels and they can run on a device."""
    return impl == "triton" and (device.type == "cuda" or triton_ops().interpreting())


def check_available(impl: str) -> None:
    """Raise UnsupportedError where no tensor of this process could use `impl`."""
    if impl == "triton" and not torch.cuda.is_available() and not triton_ops().interpreting():
        what = "impl='triton' needs a CUDA device, or TRITON_INTERPRET=1 before Triton is imported: got neither"
        raise UnsupportedError(f"{what}; use impl='auto' or impl='reference'.")
