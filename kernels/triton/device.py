"""Where Triton can run, and how a kernel is launched."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

import triton

from ..errors import UnsupportedError, message

LAUNCHES: Counter[str] = Counter()  # kernel's name -> launches of this process, for tests and for `explain`
OPTIONS = {"enable_fp_fusion": True}  # of launches that do not say otherwise: the default of Triton, which warns from 3.9 on that it will be another one
INTERPRETED: bool = triton.knobs.runtime.interpret  # read when the kernels are made: later changes of TRITON_INTERPRET change nothing
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def interpreting() -> bool:
    """Whether kernels run in Triton's interpreter, on CPU tensors."""
    return INTERPRETED


def why_not(t: Tensor) -> str:
    """Why Triton cannot run on a tensor; empty where it can."""
    if t.dtype not in DTYPES:
        return f"dtype {t.dtype} (expected float16, bfloat16 or float32)"
    if not t.is_cuda and not interpreting():
        return f"a tensor on {t.device.type} (expected a CUDA device, or TRITON_INTERPRET=1 before Triton is imported)"
    return ""


def require(t: Tensor) -> None:
    """Raise UnsupportedError unless Triton can run on `t`."""
    reason = why_not(t)
    if reason:
        raise UnsupportedError(f"impl='triton' cannot run on {reason}; use impl='auto' or impl='reference'.")


@cache
def _major(device: torch.device) -> int:
    return torch.cuda.get_device_capability(device)[0]


def major(t: Tensor) -> int:
    """Major compute capability of a tensor's device; in the interpreter that of the devices for which tiles were measured."""
    return _major(t.device) if t.is_cuda else 9


def allows_tf32(t: Tensor) -> bool:
    """Whether the user lets float32 matmuls round to TF32."""
    return t.dtype == torch.float32 and t.is_cuda and torch.backends.cuda.matmul.fp32_precision == "tf32"  # the old flags raise beside the new ones


def launch(kernel: Any, grid: tuple[int, ...], like: Tensor, *args: Any, **constants: Any) -> None:
    """Launch on the device of `like`; an empty grid is nothing to do, and no legal launch."""
    if not all(grid):
        return
    LAUNCHES[kernel.fn.__name__] += 1
    with torch.cuda.device(like.device) if like.is_cuda else nullcontext():  # Triton launches on the current device
        kernel[grid](*args, **{**OPTIONS, **constants})


def capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured, which would replay what is launched now."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def sent(t: Tensor, device: torch.device) -> Tensor:
    """A small tensor of the host on a device, in the order of the current stream, and the host does not wait: from pageable memory it would.

    Raises: UnsupportedError while a CUDA graph is captured, whose replays would copy from memory that is somebody else's by then.
    """
    if device.type != "cuda":
        return t.to(device)
    if capturing(device):
        what = "a CUDA graph cannot copy from the host: expected weights whose masks were rebuilt just before, where they lie now."
        fix = "take a step that rebuilds the same masks before the capture; 256 groups of one dtype, block and time of rebuilding are remembered."
        raise UnsupportedError(message(what, "a captured rebuild of masks", fix))
    return t.pin_memory().to(device, non_blocking=True)


def rows_of(t: Tensor) -> Tensor:
    """A 2-D view with its last axis contiguous; a copy where there is none."""
    flat = t.reshape(t.shape[:-1].numel(), t.shape[-1])  # -1 says nothing where the last axis is empty
    return flat if flat.stride(1) == 1 or flat.shape[1] == 1 else flat.contiguous()


def aligned(t: Tensor) -> Tensor:
    """A matrix that kernels can copy in pieces of 4 bytes and more: rows an even number of elements apart, from an address that 16 divides. Else a copy."""
    apart = t.shape[0] > 1 and t.stride(0) % 2
    return t.clone(memory_format=torch.contiguous_format) if apart or t.data_ptr() % 16 else t


@lru_cache(maxsize=4096)
def divisor(n: int) -> int:
    """The largest power of two up to 16 that divides a size or stride; passed as a constant, because Triton itself only looks for 16."""
    return next(d for d in (16, 8, 4, 2, 1) if n % d == 0)
