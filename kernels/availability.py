"""Where Triton's kernels can run: whether it is installed, on which devices, and whether it launches there."""

from __future__ import annotations

import importlib
from functools import cache
from types import ModuleType

import torch
from torch.utils._python_dispatch import _disable_current_modes

from .errors import UnsupportedError, warn


def triton_ops() -> ModuleType:
    """The Triton implementation, imported when it is first asked for; UnsupportedError where Triton is not installed."""
    try:
        return _implementation()
    except ImportError as e:
        raise UnsupportedError(f"impl='triton' needs Triton: expected it installed, got {e!r}; use impl='auto' or impl='reference'.") from None


@cache
def _implementation() -> ModuleType:
    return importlib.import_module(".triton.implementation", __package__)


def capability(device: torch.device) -> tuple[int, int] | None:
    """Compute capability of a CUDA device; None for any other."""
    return _capability(device.index) if device.type == "cuda" and torch.version.hip is None and torch.cuda.is_available() else None


@cache
def _capability(index: int | None) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


def kernels_run(device: torch.device) -> bool:
    """Whether Triton is there and launches on a device of compute capability 8 or later; tried once, and a warning says why not. Inside a capture, and where
    memory is short: no, and that is not remembered.
    """
    if device not in _TRIED:
        found = capability(device)
        if found is None or found[0] < 8 or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            return False
        try:
            _TRIED[device] = _try_on(device)
        except torch.OutOfMemoryError:
            return False
    return _TRIED[device]


_TRIED: dict[torch.device, bool] = {}


@torch.inference_mode(False)
@torch.no_grad()
def _try_on(device: torch.device) -> bool:
    """A mask of one block. Triton may be missing, or be without the C compiler that it needs. Under a FakeTensorMode, which says nothing of it, as without."""
    try:
        with _disable_current_modes():
            keep = torch.ones((), dtype=torch.int64, device=device)
            triton_ops().block_index(torch.ones(16, 16, device=device, dtype=torch.float16), keep, keep, (16, 16), "fro", "lowest", 0)
    except torch.OutOfMemoryError:
        raise
    except Exception as e:
        warn(f"impl='auto' stays masked-dense on {device}: Triton does not run there ({type(e).__name__}: {e}).")
        return False
    return True
