"""The ops of pruned products with a parameter, y = a x (+ b): x is saved block-sparse, for da alone. `kernels.prune` is the plain form, and the oracle.

y, dx = a dY and db are those of the dense product, to the bit; only da sees the pruned input. They move data and multiply no matrices: no kernel of ours.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import operands, producer, prune
from .compress_ops import sizes
from .errors import ShapeError, message, warn
from .inductor import register_fake
from .lean import register_autograd
from .prune_ops import no_second
from .prune_plan import plan


def _check(x: Tensor, a: Tensor, b: Tensor | None, block: int, kept: int, turned: bool) -> tuple[int, int]:
    operands.refuse_forward_ad()
    if not fits(x, a, b):
        others = tuple(a.shape) if b is None else f"{tuple(a.shape)} and {tuple(b.shape)}"
        raise ShapeError(f"a pruned product: expected a floating x that has its result's shape, got {x.dtype} {tuple(x.shape)} with {others}.")
    return sizes(x, block, kept, turned)


def fits(x: Tensor, a: Tensor, b: Tensor | None) -> bool:
    """Whether x is a floating tensor of at least one axis that is not repeated along any: what is summed for da is then x itself."""
    shapes = [a.shape] if b is None else [a.shape, b.shape]
    return x.is_floating_point() and x.dim() > 0 and torch.broadcast_shapes(x.shape, *shapes) == x.shape


@torch.library.custom_op("fxmask::pruned_scale", mutates_args=())
def pruned_scale(x: Tensor, a: Tensor, b: Tensor | None, block: int, kept: int, turned: bool, noise: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """y = a x, or a x + b as `torch.addcmul(b, a, x)` rounds it, and the input's kept blocks for the backward.

    Args:
        x (..., C): floating. a, b: any shapes that broadcast to x's, such as (C), (R, 1) or (); dtypes are promoted as PyTorch does it.
        block, kept, turned, noise: as `kernels.compress_ops.compress`.

    Returns: y, of x's shape; values (samples, kept, block) of x's dtype; index (samples, kept) int16 or int32.
    Differentiable: x, a, b, once; da is `pruned_scale_da`, the rest is exact. Raises: ShapeError.
    Cost: the product, and a read of x, a sort of its blocks' norms, a write of what is kept.
    """
    _check(x, a, b, block, kept, turned)
    return prune.scaled(x, a, b), *prune.compress(x, block, kept, turned, noise)


@register_fake(pruned_scale)
def _(x: Tensor, a: Tensor, b: Tensor | None, block: int, kept: int, turned: bool, noise: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    samples, n = _check(x, a, b, block, kept, turned)
    return prune.scaled(x, a, b), x.new_empty((samples, kept, block)), x.new_empty((samples, kept), dtype=prune.index_dtype(n))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, a, b, block, _, turned, _ = inputs
    _, values, index = output
    ctx.mark_non_differentiable(values, index)
    ctx.set_materialize_grads(False)  # or the backward would fill zeros of the size of what is saved
    needs_x, needs_a = ctx.needs_input_grad[:2]
    ctx.held = producer.holds(x)
    ctx.save_for_backward(*((x if ctx.held else values, index) if needs_a else (None, None)), a if needs_x else None)
    ctx.block, ctx.turned, ctx.shape, ctx.dtypes = block, turned, tuple(x.shape), [t if t is None else t.dtype for t in (x, a, b)]
    ctx.sizes = tuple(a.shape), None if b is None else tuple(b.shape)


def _backward(ctx: Any, gy: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    values, index, a = ctx.saved_tensors
    if gy is None:
        return (None,) * 7
    gx = ga = gb = None
    if ctx.needs_input_grad[0]:
        gx = (gy * a).to(ctx.dtypes[0])
    if ctx.needs_input_grad[1]:
        values = prune.values_of(values, index, ctx.block, ctx.turned) if ctx.held else values
        ga = pruned_scale_da(gy, values, index, ctx.shape, ctx.turned, ctx.sizes[0]).to(ctx.dtypes[1])
    if ctx.needs_input_grad[2]:
        gb = gy.sum_to_size(ctx.sizes[1]).to(ctx.dtypes[2])
    return gx, ga, gb, None, None, None, None


register_autograd(pruned_scale, _backward, _save)


@torch.library.custom_op("fxmask::pruned_scale_da", mutates_args=())
def pruned_scale_da(gy: Tensor, values: Tensor, index: Tensor, shape: list[int], turned: bool, like: list[int]) -> Tensor:
    """da of `pruned_scale`, in the shape `like`; see `kernels.prune.da`. gy: of the input's `shape`; values, index, turned: of `pruned_scale`.

    Differentiable: no, and a second derivative through it raises. Raises: ShapeError. Cost: a tensor of gy's size for a while, as the dense product's da.
    """
    if tuple(gy.shape) != tuple(shape):
        raise ShapeError(f"gy: expected the shape of the input, {tuple(shape)}, got {tuple(gy.shape)}.")
    found = prune.da(gy, values, index, tuple(shape), turned, tuple(like))
    return found.contiguous()


@register_fake(pruned_scale_da)
def _(gy: Tensor, values: Tensor, index: Tensor, shape: list[int], turned: bool, like: list[int]) -> Tensor:
    return gy.new_empty(like, dtype=torch.promote_types(gy.dtype, values.dtype))


pruned_scale_da.register_autograd(no_second, setup_context=lambda ctx, inputs, output: None)


def dense(x: Tensor, a: Tensor, b: Tensor | None, inplace: bool) -> Tensor:
    """The product as the model has it, written into x or not."""
    return x.mul_(a) if inplace else prune.scaled(x, a, b)


def scale(x: Tensor, a: Tensor, b: Tensor | None, block: int, ratio: float, noise: float = 0.0, inplace: bool = False) -> Tensor:
    """The product as modules call it: as `kernels.prune_ops.linear`, but that what `fits` refuses is dense."""
    planned = None
    if fits(x, a, b):
        planned = plan(x, block, ratio, noise)
    elif not torch.compiler.is_compiling():
        what = f"a product with a parameter stays dense: expected a floating input of its result's shape, got {x.dtype} {tuple(x.shape)} by {tuple(a.shape)}."
        warn(message(what, "", "exclude it."))
    if planned is None:
        return dense(x, a, b, inplace)
    kept, turned, drawn = planned
    y = pruned_scale(x, a, b, min(block, x.shape[-2 if turned else -1]), kept, turned, drawn)[0]
    return x.copy_(y) if inplace else y
