"""Triton's interpreter without work that it repeats for nothing. What a kernel computes, loads and stores is the same.

Written for Triton 3.6 to 3.9. It looks up the functions of `triton.language` anew at each launch and patches them anew at each call of a device function,
makes a table of dtypes for each question about one, checks and names the shape of each value, and computes each sum and product of integers once more in
int64 to see whether it overflows, also where nobody asked for `debug` and the answer is thrown away.

One thing it does wrong: of a comparison of scalars, in a mask of many, it makes integers, and from 3.9 on it refuses such a mask.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import triton.language as tl
from triton.runtime import interpreter

block_type, tensor = tl.core.block_type, tl.core.tensor
NO_SIDES = tl.constexpr(1), tl.core.tuple([])


@functools.cache
def _builtins(package: Any) -> list[tuple[str, Any]]:
    return [(name, member) for name, member in inspect.getmembers(package) if tl.core.is_builtin(member)]


def _patch_builtin(package: Any, builder: Any, *scope: Any) -> None:
    for name, member in _builtins(package):
        if getattr(package, name) is member:  # else it is patched, as in a call from a kernel
            interpreter._patch_attr(package, name, member, builder, *scope)


def _patch_lang(fn: Any, original: Any = interpreter._patch_lang) -> Any:
    """Nothing is left to patch where the kernel that calls `fn` reads the same modules."""
    modules = [value for value in fn.__globals__.values() if value is tl or value is tl.core]
    return original(fn) if not modules or any(tl.core.is_builtin(m.load) for m in modules) else interpreter._LangPatchScope()


@functools.cache
def _block(sides: tuple[int, ...], original: Any = block_type.__init__) -> Any:
    """What a block's type, and a value of it, say of its shape; or the error of a wrong one."""
    made = block_type.__new__(block_type)
    original(made, tl.float32, list(sides))
    return made.shape, made.numel, (tl.constexpr(made.numel), tl.core.tuple([tl.constexpr(side) for side in sides]))


def _init_block_type(self: Any, element_ty: Any, shape: Any) -> None:
    assert isinstance(shape, (list, tl.core.tuple))  # as without this
    sides = tuple([side.value if isinstance(side, tl.constexpr) else side for side in shape])
    self.element_ty, self.name = element_ty, f"<{sides}, {element_ty}>"
    self.shape, self.numel, self.of_values = _block(sides)


def _init_tensor(self: Any, handle: Any, type: Any) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.numel, self.shape = type.of_values if type.is_block() else NO_SIDES


DTYPES: dict[str, Any] = {}


def _get_np_dtype(of: Any, original: Any = interpreter._get_np_dtype) -> Any:
    scalar = of.scalar  # blocks of one scalar are alike
    if scalar.name not in DTYPES:
        DTYPES[scalar.name] = original(scalar)
    return DTYPES[scalar.name]


def _splat(self: Any, of: Any, scalar: Any, original: Any = interpreter.InterpreterBuilder.create_splat) -> Any:
    if scalar.data.dtype == bool:
        scalar = interpreter.TensorHandle(scalar.data, tl.int1)  # a comparison has the type of what it compares
    return original(self, of, scalar)


def quicken() -> None:
    """For this process."""
    interpreter.InterpreterBuilder.create_splat = _splat
    interpreter._patch_builtin, interpreter._patch_lang = _patch_builtin, _patch_lang
    interpreter._get_np_dtype = _get_np_dtype
    block_type.__init__, tensor.__init__ = _init_block_type, _init_tensor
    options = interpreter.interpreter_builder.options
    if not options.debug:
        object.__setattr__(options, "sanitize_overflow", False)  # of a frozen dataclass
