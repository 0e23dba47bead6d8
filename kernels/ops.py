"""The ops `torch.ops.fxmask.*`: schemas, shape checks, fakes and gradients; no Triton is imported here.

`block_index` builds the mask, apart from the matmuls, so that a graph shows both and a mask can outlive a step. The matmul ops are opaque to the compiler:
their backward is made of `masked_linear_dx` and `masked_linear_dw`, or of both at once (`kernels.joint`), which are differentiable themselves. The bodies run
the form that `kernels.dispatch` chooses: `kernels.reference`, or the same functions on a CPU or by Triton. Autocast, vmap and FLOP formulas are in
`kernels.op_rules`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch import Tensor

from . import reference
from .dispatch import form
from .errors import ConfigError, ShapeError, UnsupportedError, message
from .grid import grid_shape
from .inductor import register_fake
from .lean import register_autograd, without_gradient
from .lists import LISTED, listed, packed_length
from .strides import empty_result


def _check_mask(mask: Tensor, w_shape: tuple[int, ...] | torch.Size, block: tuple[int, int]) -> None:
    expected = grid_shape(w_shape, block)
    if mask.dtype != torch.bool or mask.shape != expected:
        raise ShapeError(f"mask of a weight {tuple(w_shape)} in blocks {block}: expected bool {expected}, got {mask.dtype} {tuple(mask.shape)}.")


def check_bias(bias: Tensor | None, features: int) -> None:
    """Raise ShapeError for a bias that has not one element, or one for each row of the weight."""
    if bias is not None and (bias.dim() != 1 or bias.shape[0] not in (1, features)):
        raise ShapeError(f"bias: expected ({features},), one for each row of the weight, got {tuple(bias.shape)}.")


def check_lists(lists: Tensor | None, mask: Tensor, block: tuple[int, int]) -> None:
    """Raise ShapeError for lists of another mask: a kernel follows them wherever they point."""
    if lists is None:
        return
    length = packed_length((mask.shape[0], mask.shape[1]), block)
    if lists.dtype != torch.int32 or tuple(lists.shape) != (length,) or not lists.is_contiguous() or lists.device != mask.device:
        got = f"{lists.dtype} {tuple(lists.shape)} with strides {lists.stride()} on {lists.device}"
        raise ShapeError(f"lists of a mask {tuple(mask.shape)} in blocks {block}: expected contiguous torch.int32 ({length},) on {mask.device}, got {got}.")


def _check_backward(backward: str) -> None:
    if backward not in reference.MODES:
        raise ConfigError(f"unknown backward: expected one of {', '.join(reference.MODES)}, got {backward!r}.")


def check_gradients(gy: Tensor, x: Tensor, mask: Tensor, block: tuple[int, int], backward: str, lists: Tensor | None) -> None:
    """Raise ShapeError or ConfigError for operands of dW that do not belong together."""
    _check_mask(mask, (gy.shape[-1], x.shape[-1]), block)
    if gy.shape[:-1] != x.shape[:-1]:
        raise ShapeError(f"tokens of gy and x: expected the same leading axes, got {tuple(gy.shape)} and {tuple(x.shape)}.")
    check_lists(lists, mask, block)
    _check_backward(backward)


def refuse_forward_ad() -> None:
    """Raise UnsupportedError inside forward-mode AD, which loses its tangents at a custom op without a word. `linear` never comes here then.

    Fakes ask, too: the compiler traces a forward derivative by them.
    """
    if forward_ad._current_level >= 0:
        what = "forward-mode AD would silently see a zero tangent through the op of a masked linear, as a graph or a backward calls it."
        fix = "differentiate forward over the module that fxmask.apply has masked, with its forward and backward inside the level; no graph of it."
        raise UnsupportedError(message(what, "torch.autograd.forward_ad, torch.func.jvp", fix))


def check_features(name: str, t: Tensor, expected: int) -> None:
    """Raise ShapeError where the last axis is not `expected` long."""
    if t.dim() == 0 or t.size(-1) != expected:
        raise ShapeError(f"last axis of {name}: expected {expected}, got shape {tuple(t.shape)}.")


# ---- block_index -------------------------------------------------------------------------------------------------------------------------------------


@torch.library.custom_op("fxmask::block_index", mutates_args=())
def block_index(
    w: Tensor,
    keep: Tensor,
    step: Tensor,
    block_rows: int,
    block_cols: int,
    criterion: str,
    ties: str,
    stream: int,
    impl: str = "auto",
    cover: bool = False,
) -> Tensor:
    """Mask of the `keep` best blocks of `w`.

    Args:
        w: weight (N, K), floating. keep, step: 0-d int64 on the device of `w`; `step` and `stream` drive `criterion="random"` alone.
        criterion: see `kernels.score.CRITERIA`. ties: `lowest` (exactly `keep` blocks) or `keep` (all that tie with the last one).
        impl: see `kernels.dispatch`. cover: no block row or column without a block, see `kernels.select.covering`; not with impl="triton".

    Returns: bool (ceil(N / block_rows), ceil(K / block_cols)), True = kept.
    Differentiable: no. Cost: one read of `w`, one sort of its blocks; no host sync.
    """
    grid_shape(w.shape, (block_rows, block_cols))  # raises for what is no matrix
    return form(impl, w).block_index(w, keep, step, (block_rows, block_cols), criterion, ties, stream, cover)


@register_fake(block_index)
def _(
    w: Tensor,
    keep: Tensor,
    step: Tensor,
    block_rows: int,
    block_cols: int,
    criterion: str,
    ties: str,
    stream: int,
    impl: str = "auto",
    cover: bool = False,
) -> Tensor:
    return w.new_empty(grid_shape(w.shape, (block_rows, block_cols)), dtype=torch.bool)


without_gradient(block_index)

# ---- strip_lists -------------------------------------------------------------------------------------------------------------------------------------


@torch.library.custom_op("fxmask::strip_lists", mutates_args=())
def strip_lists(mask: Tensor, block_rows: int, block_cols: int, impl: str = "auto") -> Tensor:
    """Lists of the kept blocks, both directions, for kernels that skip the others: int32 [kernels.lists.packed_length].

    mask: bool (NB, KB), True = kept; block sides of `kernels.lists.LISTED`. Differentiable: no. Cost: one read of the mask; no host sync.
    Raises: ShapeError, UnsupportedError (a weight of more units than an entry can name, see `kernels.lists`).
    """
    if mask.dim() != 2 or mask.dtype != torch.bool or not listed((block_rows, block_cols)):
        got = f"{mask.dtype} {tuple(mask.shape)}, blocks {(block_rows, block_cols)}"
        raise ShapeError(f"fxmask::strip_lists: expected a mask bool (NB, KB) in blocks of {', '.join(map(str, LISTED))}, got {got}.")
    of_mask = form(impl, mask.new_empty(0, dtype=torch.float32))  # a mask has no floating dtype to object to
    return of_mask.strip_lists(mask, (block_rows, block_cols))


@register_fake(strip_lists)
def _(mask: Tensor, block_rows: int, block_cols: int, impl: str = "auto") -> Tensor:
    length = packed_length((mask.shape[0], mask.shape[1]), (block_rows, block_cols))
    return mask.new_empty(length, dtype=torch.int32)


without_gradient(strip_lists)

# ---- masked_linear -----------------------------------------------------------------------------------------------------------------------------------


@torch.library.custom_op("fxmask::masked_linear", mutates_args=())
def masked_linear(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    mask: Tensor,
    block_rows: int,
    block_cols: int,
    backward: str,
    dense: Tensor | None = None,
    impl: str = "auto",
    lists: Tensor | None = None,
) -> Tensor:
    """y = x (W∘M)^T + bias.

    Args:
        x: (..., K); w: (N, K); bias: (N) or None; all of one floating dtype (autocast casts them). mask: bool (NB, KB), True = kept.
        backward: `masked`, `ste`, `unmasked` or `rigl`, see `kernels.reference`. dense: 0-d bool, for `rigl`: dW is dense where it is set.
        impl: see `kernels.dispatch`. lists: what `strip_lists` made of the mask; kernels that skip blocks make them anew without.

    Returns: (..., N), dtype of `x`; contiguous, but for Triton over an input whose tokens are contiguous, and then they stay so (`kernels.strides`).
    Raises: ShapeError.
    Differentiable: x, w, bias; twice, too.
    Cost: 2 M useful FLOP a kept weight element; this plain form multiplies by the masked weight and so issues all 2 M N K.
    """
    refuse_forward_ad()
    block, shape = (block_rows, block_cols), w.shape
    _check_mask(mask, shape, block)
    check_features("x", x, shape[1])
    check_bias(bias, shape[0])
    check_lists(lists, mask, block)
    _check_backward(backward)
    return form(impl, x).masked_linear(x, w, bias, mask, block, lists)


@register_fake(masked_linear)
def _(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    mask: Tensor,
    block_rows: int,
    block_cols: int,
    backward: str,
    dense: Tensor | None = None,
    impl: str = "auto",
    lists: Tensor | None = None,
) -> Tensor:
    refuse_forward_ad()
    _check_mask(mask, w.shape, (block_rows, block_cols))
    check_features("x", x, w.shape[1])
    check_bias(bias, w.shape[0])
    _check_backward(backward)
    return empty_result(x, w.shape[0], (block_rows, block_cols), impl)


def _save_linear(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, w, bias, mask, rows, cols, backward, dense, impl, lists = inputs
    needs_x, needs_w = ctx.needs_input_grad[:2]
    ctx.save_for_backward(x if needs_w else None, w if needs_x else None, mask, dense, lists)
    ctx.config, ctx.impl, ctx.flat = (rows, cols, backward), impl, x.is_contiguous()


def _linear_backward(ctx: Any, gy: Tensor) -> tuple[Tensor | None, ...]:
    x, w, mask, dense, lists = ctx.saved_tensors
    gx = gw = gb = None
    if ctx.needs_input_grad[0] and ctx.needs_input_grad[1] and joint.together(gy.device, ctx.config[2], ctx.impl):
        gx, gw = joint.masked_linear_backward(gy, x, w, mask, *ctx.config, dense, ctx.impl)
    elif ctx.needs_input_grad[0]:
        gx = masked_linear_dx(gy, w, mask, *ctx.config, dense, ctx.impl, lists)
    if ctx.needs_input_grad[1] and gw is None:
        gw = masked_linear_dw(gy, x, mask, *ctx.config, dense, ctx.impl, lists)
    if ctx.needs_input_grad[2]:
        # as the dense bias does it, to the bit: F.linear flattens a contiguous input, and adds the bias to the product of any other
        gb = gy.reshape(-1, gy.shape[-1]).sum(0) if ctx.flat else gy.sum_to_size(gy.shape[-1])
    return gx, gw, gb, *[None] * 7


register_autograd(masked_linear, _linear_backward, _save_linear)

# ---- dX ----------------------------------------------------------------------------------------------------------------------------------------------


@torch.library.custom_op("fxmask::masked_linear_dx", mutates_args=())
def masked_linear_dx(
    gy: Tensor,
    w: Tensor,
    mask: Tensor,
    block_rows: int,
    block_cols: int,
    backward: str,
    dense: Tensor | None = None,
    impl: str = "auto",
    lists: Tensor | None = None,
) -> Tensor:
    """Gradient of `masked_linear` with respect to x: dY (W∘M), or dY W in mode `unmasked`.

    gy (..., N), w (N, K), mask bool (NB, KB) -> (..., K) contiguous. Differentiable: gy, w (there `dense` counts).
    Cost: as `masked_linear`. Raises: ShapeError.
    """
    refuse_forward_ad()
    _check_mask(mask, w.shape, (block_rows, block_cols))
    check_features("gy", gy, w.shape[0])
    check_lists(lists, mask, (block_rows, block_cols))
    _check_backward(backward)
    return form(impl, gy).masked_linear_dx(gy, w, mask, (block_rows, block_cols), backward, lists)


@register_fake(masked_linear_dx)
def _(
    gy: Tensor,
    w: Tensor,
    mask: Tensor,
    block_rows: int,
    block_cols: int,
    backward: str,
    dense: Tensor | None = None,
    impl: str = "auto",
    lists: Tensor | None = None,
) -> Tensor:
    refuse_forward_ad()
    if backward == "unmasked":
        return gy.new_empty((*gy.shape[:-1], w.shape[1]))
    return empty_result(gy, w.shape[1], (block_rows, block_cols), impl)


def _save_dx(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    gy, w, mask, *config, dense, impl, lists = inputs
    ctx.save_for_backward(gy, w, mask, dense, lists)
    ctx.config, ctx.impl = tuple(config), impl


def _dx_backward(ctx: Any, ggx: Tensor) -> tuple[Tensor | None, ...]:
    gy, w, mask, dense, lists = ctx.saved_tensors
    return *derivative_of_dx(ggx, gy, w, mask, ctx.config, dense, ctx.impl, lists, *ctx.needs_input_grad[:2]), *[None] * 7


def derivative_of_dx(
    ggx: Tensor, gy: Tensor, w: Tensor, mask: Tensor, config: Any, dense: Tensor | None, impl: str, lists: Tensor | None, by_gy: bool, by_w: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of `masked_linear_dx` with respect to gy and w, where they are asked for."""
    ggy = gw = None
    if by_gy:
        ggy = F.linear(ggx, w) if config[2] == "unmasked" else masked_linear(ggx, w, None, mask, *config, dense, impl, lists)
    if by_w:
        gw = masked_linear_dw(gy, ggx, mask, *config, dense, impl, lists)
    return ggy, gw


register_autograd(masked_linear_dx, _dx_backward, _save_dx)

# ---- dW ----------------------------------------------------------------------------------------------------------------------------------------------


@torch.library.custom_op("fxmask::masked_linear_dw", mutates_args=())
def masked_linear_dw(
    gy: Tensor,
    x: Tensor,
    mask: Tensor,
    block_rows: int,
    block_cols: int,
    backward: str,
    dense: Tensor | None = None,
    impl: str = "auto",
    lists: Tensor | None = None,
) -> Tensor:
    """Gradient of `masked_linear` with respect to w: (dY^T X)∘M; all of dY^T X in modes `ste` and `unmasked`, and in `rigl` where `dense` is set.

    gy (..., N), x (..., K), mask bool (NB, KB) -> (N, K) contiguous, zeros where nothing is wanted. Differentiable: gy, x.
    Cost: 2 M useful FLOP a wanted weight element. Raises: ShapeError.
    """
    refuse_forward_ad()
    check_gradients(gy, x, mask, (block_rows, block_cols), backward, lists)
    return form(impl, x).masked_linear_dw(gy, x, mask, dense, (block_rows, block_cols), backward, lists).contiguous()


@register_fake(masked_linear_dw)
def _(
    gy: Tensor,
    x: Tensor,
    mask: Tensor,
    block_rows: int,
    block_cols: int,
    backward: str,
    dense: Tensor | None = None,
    impl: str = "auto",
    lists: Tensor | None = None,
) -> Tensor:
    refuse_forward_ad()
    return gy.new_empty((gy.shape[-1], x.shape[-1]))


def _save_dw(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    gy, x, mask, *config, dense, impl, lists = inputs
    ctx.save_for_backward(gy, x, mask, dense, lists)
    ctx.config, ctx.impl = tuple(config), impl


def _dw_backward(ctx: Any, ggw: Tensor) -> tuple[Tensor | None, ...]:
    gy, x, mask, dense, lists = ctx.saved_tensors
    return *derivative_of_dw(ggw, gy, x, mask, ctx.config, dense, ctx.impl, lists, *ctx.needs_input_grad[:2]), *[None] * 7


def derivative_of_dw(
    ggw: Tensor, gy: Tensor, x: Tensor, mask: Tensor, config: Any, dense: Tensor | None, impl: str, lists: Tensor | None, by_gy: bool, by_x: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of `masked_linear_dw` with respect to gy and x, where they are asked for."""
    rows, cols, backward = config
    wanted = reference.gradient_mask(mask, dense, backward)
    lists = lists if wanted is mask else None
    ggy = gx = None
    if by_gy:
        ggy = F.linear(x, ggw) if wanted is None else masked_linear(x, ggw, None, wanted, rows, cols, "masked", None, impl, lists)
    if by_x:
        gx = torch.matmul(gy, ggw) if wanted is None else masked_linear_dx(gy, ggw, wanted, rows, cols, "masked", None, impl, lists)
    return ggy, gx


register_autograd(masked_linear_dw, _dw_backward, _save_dw)


def is_transformed(impl: str) -> bool:
    """Whether a function transform or forward-mode AD is active, which cannot see into a custom op."""
    active = torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
    if active and impl == "triton":
        raise UnsupportedError("impl='triton' inside torch.func or forward-mode AD: those cannot see into a kernel; use impl='auto'.")
    return active


def index(
    w: Tensor, keep: Tensor, step: Tensor, block: tuple[int, int], criterion: str, ties: str, stream: int, impl: str = "auto", cover: bool = False
) -> Tensor:
    """The mask as modules ask for it: `block_index`, or its aten form under function transforms."""
    if is_transformed(impl):
        return reference.block_index(w, keep, step, block, criterion, ties, stream, cover)
    return block_index(w, keep, step, block[0], block[1], criterion, ties, stream, impl, cover)


def lists(mask: Tensor, block: tuple[int, int], impl: str) -> Tensor | None:
    """The lists that the matmuls of `impl` read, made once for forward and backward; None where they read none."""
    if impl != "triton" or not listed(block) or is_transformed(impl):
        return None
    return strip_lists(mask, block[0], block[1], impl)


def linear(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    mask: Tensor,
    block: tuple[int, int],
    backward: str,
    dense: Tensor | None = None,
    impl: str = "auto",
    lists: Tensor | None = None,
) -> Tensor:
    """The masked linear as modules call it: `masked_linear`, or its aten form where PyTorch cannot differentiate a custom op.

    `torch.func.grad` over a custom op raises, and forward-mode AD silently returns a zero tangent; both get
    `reference.composite`, and so do nested tensors. Raises: UnsupportedError where `impl="triton"` meets any of these.
    """
    if x.is_nested and impl == "triton":
        raise UnsupportedError("impl='triton' got a nested tensor: expected a plain one; use impl='auto' or impl='reference'.")
    if is_transformed(impl) or x.is_nested:
        return reference.composite(x, w, bias, mask, block, backward, dense)
    return masked_linear(x, w, bias, mask, block[0], block[1], backward, dense, impl, lists)


from . import joint  # noqa: E402  (it calls these ops)
from . import op_rules as op_rules  # noqa: E402  (the rules name the ops, so they can only be registered now)
