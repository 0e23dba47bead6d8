"""What PyTorch's transforms do with the ops: autocast, vmap, FLOP counts. Imported once, by `kernels.ops`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nested._internal.nested_tensor import NestedTensor  # the class of the jagged layout, as in PyTorch 2.11 to 2.15
from torch.utils.flop_counter import register_flop_formula

from . import joint, mask_ops, matmul_ops, reference
from .grid import kept_elements
from .layer_cost import useful_flop

# ---- autocast: `register_autocast` fixes one dtype for ever; this follows the ambient one ----------------------------------------------------------------

_LIBRARY = torch.library.Library("fxmask", "FRAGMENT")


def follow_autocast(*names: str, casts: bool = True) -> None:
    """Let ops follow the ambient dtype of autocast on CPUs and CUDA devices; without `casts` their arguments are left as they are."""
    for name in names:
        for device, key in (("cpu", "AutocastCPU"), ("cuda", "AutocastCUDA")):
            _LIBRARY.impl(name, _autocast_rule(getattr(torch.ops.fxmask, name), device, key, casts), key)


def _autocast_rule(op: Any, device: str, key: str, casts: bool) -> Callable[..., Any]:
    """Runs an op with autocast off, its floating arguments cast or, without `casts`, as they are."""
    exclude = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))

    def rule(*args: Any) -> Any:
        dtype = torch.get_autocast_dtype(device)

        def cast(a: Any) -> Any:
            wide = isinstance(a, Tensor) and a.is_floating_point() and a.dtype != torch.float64 and a.device.type == device
            return a.to(dtype) if wide else a

        with torch._C._ExcludeDispatchKeyGuard(exclude):  # the body's own matmuls must not be cast again
            return op(*(cast(a) for a in args)) if casts else op(*args)

    return rule


follow_autocast("masked_linear", "masked_linear_dx", "masked_linear_dw", "masked_linear_backward")

# ---- nested tensors, which graphs give the op itself; modules ask `ops.linear` ---------------------------------------------------------------------------


def _nested(x: Tensor, w: Tensor, bias: Tensor | None, mask: Tensor, rows: int, cols: int, *rest: Any) -> Tensor:
    return matmul_ops.linear(x, w, bias, mask, (rows, cols), *rest)


for _key in ("AutogradNestedTensor", "NestedTensorCPU", "NestedTensorCUDA"):
    _LIBRARY.impl("masked_linear", _nested, _key)
torch.library.register_torch_dispatch("fxmask::masked_linear", NestedTensor, lambda _, func, types, args, kwargs: _nested(*args, **kwargs))

# ---- vmap: a batch of tokens is more tokens; a batch of weights is a loop ------------------------------------------------------------------------------


def _loop(op: Any, info: Any, in_dims: tuple[Any, ...], args: tuple[Any, ...]) -> tuple[Any, Any]:
    def pick(i: int) -> list[Any]:
        return [a.select(d, i) if d is not None else a for a, d in zip(args, in_dims, strict=True)]

    n = info.batch_size
    if not n:  # of one of zeros the shapes are the same
        args = tuple(a if d is None else a.new_zeros([1 if i == d else size for i, size in enumerate(a.shape)]) for a, d in zip(args, in_dims, strict=True))
    found = [op(*pick(i)) for i in range(n or 1)]
    if isinstance(found[0], tuple):
        return tuple(torch.stack(t)[:n] for t in zip(*found, strict=True)), (0,) * len(found[0])
    return torch.stack(found)[:n], 0


def _fold_tokens(op: Any) -> Callable[..., tuple[Any, Any]]:
    def rule(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        if in_dims[0] is not None and all(d is None for d in in_dims[1:]):
            return op(args[0].movedim(in_dims[0], 0), *args[1:]), 0
        return _loop(op, info, in_dims, args)

    return rule


def _always_loop(op: Any) -> Callable[..., tuple[Any, Any]]:
    return lambda info, in_dims, *args: _loop(op, info, in_dims, args)


matmul_ops.masked_linear.register_vmap(_fold_tokens(matmul_ops.masked_linear))
matmul_ops.masked_linear_dx.register_vmap(_fold_tokens(matmul_ops.masked_linear_dx))
matmul_ops.masked_linear_dw.register_vmap(_always_loop(matmul_ops.masked_linear_dw))
joint.masked_linear_backward.register_vmap(_always_loop(joint.masked_linear_backward))
mask_ops.block_index.register_vmap(_always_loop(mask_ops.block_index))
mask_ops.strip_lists.register_vmap(_always_loop(mask_ops.strip_lists))

# ---- FLOP formulas: useful FLOP, read from the mask itself ---------------------------------------------------------------------------------------------


def linear_flop(tokens: Tensor, shape: tuple[int, int], wanted: Tensor | None, block: tuple[int, int]) -> int:
    """2 FLOP a token and wanted weight element. A fake or meta mask has no values, and then the count is dense: an upper bound."""
    m = tokens.shape[:-1].numel()
    known = wanted is not None and wanted.device.type != "meta" and type(wanted) in (Tensor, torch.nn.Parameter)
    elements = int(kept_elements(wanted, shape, block)) if known and wanted is not None else shape[0] * shape[1]
    return useful_flop(m, elements)


@register_flop_formula(torch.ops.fxmask.masked_linear, get_raw=True)
def _linear_flop(x: Tensor, w: Tensor, bias: Tensor | None, mask: Tensor, rows: int, cols: int, *rest: Any, **kwargs: Any) -> int:
    return linear_flop(x, (w.shape[0], w.shape[1]), mask, (rows, cols))


@register_flop_formula(torch.ops.fxmask.masked_linear_dx, get_raw=True)
def _dx_flop(gy: Tensor, w: Tensor, mask: Tensor, rows: int, cols: int, backward: str, *rest: Any, **kwargs: Any) -> int:
    return linear_flop(gy, (w.shape[0], w.shape[1]), None if backward == "unmasked" else mask, (rows, cols))


@register_flop_formula(torch.ops.fxmask.masked_linear_dw, get_raw=True)
def _dw_flop(gy: Tensor, x: Tensor, mask: Tensor, rows: int, cols: int, backward: str, dense: Tensor | None = None, *rest: Any, **kwargs: Any) -> int:
    return linear_flop(gy, (gy.shape[-1], x.shape[-1]), reference.gradient_mask(mask, dense, backward), (rows, cols))


@register_flop_formula(torch.ops.fxmask.masked_linear_backward, get_raw=True)
def _backward_flop(
    gy: Tensor, x: Tensor, w: Tensor, mask: Tensor, rows: int, cols: int, backward: str, dense: Tensor | None = None, *rest: Any, **kwargs: Any
) -> int:
    return _dx_flop(gy, w, mask, rows, cols, backward) + _dw_flop(gy, x, mask, rows, cols, backward, dense)
