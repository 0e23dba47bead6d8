"""Which implementation an op runs: `reference` (plain PyTorch, everywhere), `cpu` (strips of kept blocks, see `kernels.cpu`), or `triton` (CUDA tensors, or
CPU tensors in Triton's interpreter).

An explicit request of an op never falls back: it raises. Modules ask `ops.linear`, which under function transforms, forward-mode AD and for nested tensors has
one plain form for all but `triton`, `reference.composite`: `cpu` is dense there, too. `auto` takes on a CPU the fastest of masked-dense and the strips, case by
case. On CUDA an op cannot know the density of its mask without a host sync, so its `auto` is masked-dense, with W masked by a kernel where Triton runs
(`kernels.triton.masked_dense`); whoever knows the ratio asks `kernels.gpu_choice` and requests `triton` where that pays, as masked Linears do. Masks are made
by kernels under `auto`, too, where those take the case. Both kernels give the bits of the reference.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import reference
from .availability import kernels_run
from .availability import triton_ops as triton_ops
from .cpu import chosen
from .errors import ConfigError, UnsupportedError

IMPLEMENTATIONS = ("auto", "reference", "cpu", "triton")
MASKED_DENSE = "masked_dense"  # no option: what a Linear asks of its ops where it knows that `auto` on CUDA skips no blocks


def check_name(impl: str) -> None:
    """Raise ConfigError for an implementation that there is not, which would fall back."""
    if impl not in IMPLEMENTATIONS:
        raise ConfigError(f"unknown impl: expected one of {', '.join(IMPLEMENTATIONS)}, got {impl!r}.")


def form(impl: str, t: Tensor) -> Any:
    """What runs an op on `t`: functions as in `kernels.reference`. Raises: UnsupportedError where an explicit `impl` cannot, ConfigError for an unknown one."""
    if impl == "auto" and t.is_cpu:
        return chosen.AUTO
    if impl in ("auto", MASKED_DENSE):
        return triton_ops().masked_dense if kernels_run(t.device) else reference
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


def uses_kernels(impl: str, device: torch.device) -> bool:
    """Whether Triton kernels make masks and scores, and keep what is masked through a step: where `impl` asks for them, and under `auto` wherever they run."""
    return kernels_run(device) if impl == "auto" else runs_triton(impl, device)


def check_available(impl: str) -> None:
    """Raise UnsupportedError where no tensor of this process could use `impl`."""
    if impl == "triton" and not torch.cuda.is_available() and not triton_ops().interpreting():
        what = "impl='triton' needs a CUDA device, or TRITON_INTERPRET=1 before Triton is imported: got neither"
        raise UnsupportedError(f"{what}; use impl='auto' or impl='reference'.")
