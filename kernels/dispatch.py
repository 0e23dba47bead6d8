"""Which implementation an op runs: `reference` (plain PyTorch, everywhere) or `triton` (CUDA tensors, or CPU tensors in Triton's interpreter).

An explicit request never falls back: it raises. `auto` is the reference until a recorded run on a device shows that the kernels are faster there.
"""

from __future__ import annotations

import importlib
from types import ModuleType

import torch
from torch import Tensor

from .errors import UnsupportedError

IMPLEMENTATIONS = ("auto", "reference", "cpu", "triton")
AVAILABLE = ("auto", "reference", "triton")


def triton_ops() -> ModuleType:
    """The Triton implementation, imported when it is first asked for; UnsupportedError where Triton is not installed."""
    try:
        return importlib.import_module(".triton.implementation", __package__)
    except ImportError as e:
        raise UnsupportedError(f"impl='triton' needs Triton: expected it installed, got {e!r}; use impl='auto' or impl='reference'.") from None


def use_triton(impl: str, t: Tensor) -> bool:
    """Whether an op on `t` runs Triton kernels; UnsupportedError where they are asked for and cannot."""
    if impl != "triton":
        return False
    triton_ops().require(t)
    return True


def runs_triton(impl: str, device: torch.device) -> bool:
    """Whether `impl` means Triton kernels and they can run on a device."""
    return impl == "triton" and (device.type == "cuda" or triton_ops().interpreting())


def check_available(impl: str) -> None:
    """Raise UnsupportedError where no tensor of this process could use `impl`."""
    if impl not in AVAILABLE:
        raise UnsupportedError(f"impl={impl!r} is not in this version: expected one of {', '.join(AVAILABLE)}.")
    if impl == "triton" and not torch.cuda.is_available() and not triton_ops().interpreting():
        what = "impl='triton' needs a CUDA device, or TRITON_INTERPRET=1 before Triton is imported: got neither"
        raise UnsupportedError(f"{what}; use impl='auto' or impl='reference'.")
