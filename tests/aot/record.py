"""From a launch to what Triton would compile for it: the launchers of fxmask.kernels.triton run on meta tensors, with the launch itself recorded.

The specialization is Triton's own (`JITFunction`'s binder), so an int that is 1 becomes a constant, an int or a pointer that 16 divides says so, and an int
beyond 32 bits is an i64, exactly as at a launch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

from fxmask.kernels.triton import device

MATMULS = ("list_matmul_kernel", "sampled_matmul_kernel", "pruned_matmul_kernel")


class Config(NamedTuple):
    """One kernel as it would be compiled for one architecture."""

    label: str  # what first asked for it
    arch: int
    kernel: Any  # JITFunction
    signature: dict[str, str]
    constants: dict[tuple[int, ...], Any]
    attrs: dict[tuple[int, ...], Any]
    options: dict[str, Any]

    @property
    def name(self) -> str:
        return self.kernel.fn.__name__

    @property
    def key(self) -> tuple[str, str]:
        """The same for two launches that share a binary."""
        return self.name, repr((self.arch, self.signature, self.constants, self.attrs, sorted(self.options.items(), key=lambda item: item[0])))

    @property
    def short_key(self) -> tuple[str, str]:
        """The same for two launches that differ only in what is known of their ints."""
        types = [self.signature[name] for name in self.kernel.arg_names if self.signature[name].startswith(("*", "tensordesc"))]
        constants = [self.constants[(i,)] for i in self.kernel.constexprs]
        return self.name, repr((self.arch, types, constants, self.options["num_warps"]))

    def constant(self, name: str) -> Any:
        return self.constants[(self.kernel.arg_names.index(name),)]

    def pointer(self, name: str) -> str:
        """Element type of a pointer or descriptor argument, as Triton writes it."""
        return self.signature[name].lstrip("*").removeprefix("tensordesc<").partition("[")[0]


class Call(NamedTuple):
    kernel: Any
    args: tuple[Any, ...]
    constants: dict[str, Any]


@contextmanager
def recording() -> Iterator[list[Call]]:
    """Launches inside are recorded and not made."""
    calls: list[Call] = []
    real = device.launch
    device.launch = lambda kernel, grid, like, *args, **constants: calls.append(Call(kernel, args, constants)) if all(grid) else None
    try:
        yield calls
    finally:
        device.launch = real


def configure(call: Call, arch: int, label: str) -> Config:
    """What Triton compiles for a launch on `arch` (90 for sm_90)."""
    backend = make_backend(GPUTarget("cuda", arch, 32))
    bind = create_function_from_signature(call.kernel.signature, call.kernel.params, backend)
    given = {**device.OPTIONS, **call.constants}
    bound, specialization, options = bind(*call.args, **given)
    options, signature, constants, attrs = call.kernel._pack_args(backend, given, bound, specialization, options)
    return Config(label, arch, call.kernel, signature, constants, attrs, options.__dict__)
