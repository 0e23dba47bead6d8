"""What the ops ask of their operands, and where they cannot be called at all: under transforms that see into no custom op."""

from __future__ import annotations

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from . import reference
from .errors import ConfigError, ShapeError, UnsupportedError, message
from .grid import grid_shape
from .lists import fixed_length


def check_mask(mask: Tensor, w_shape: tuple[int, ...] | torch.Size, block: tuple[int, int]) -> None:
    """Raise ShapeError for a mask of another weight, or in other blocks."""
    expected = grid_shape(w_shape, block)
    if mask.dtype != torch.bool or mask.shape != expected:
        raise ShapeError(f"mask of a weight {tuple(w_shape)} in blocks {block}: expected bool {expected}, got {mask.dtype} {tuple(mask.shape)}.")


def check_devices(x: Tensor, **others: Tensor | None) -> None:
    """Raise ShapeError for operands of several devices. Fakes ask: they run where one of these is on the meta device, and would give memory that nobody has
    written."""
    for name, t in others.items():
        if t is not None and t.device != x.device:
            what = f"{name} is on {t.device} and the input on {x.device}: expected one device."
            raise ShapeError(message(what, "", "move the input, or the model by model.to(device); a model on meta wants its weights loaded first."))


def check_bias(bias: Tensor | None, features: int) -> None:
    """Raise ShapeError for a bias that has not one element, or one for each row of the weight."""
    if bias is not None and (bias.dim() != 1 or bias.shape[0] not in (1, features)):
        raise ShapeError(f"bias: expected ({features},), one for each row of the weight, got {tuple(bias.shape)}.")


def check_lists(lists: Tensor | None, mask: Tensor, block: tuple[int, int]) -> None:
    """Raise ShapeError for lists of another mask: a kernel follows them wherever they point."""
    if lists is None:
        return
    length = fixed_length((mask.shape[0], mask.shape[1]), block)
    if lists.dtype != torch.int32 or tuple(lists.shape) != (length,) or not lists.is_contiguous() or lists.device != mask.device:
        got = f"{lists.dtype} {tuple(lists.shape)} with strides {lists.stride()} on {lists.device}"
        raise ShapeError(f"lists of a mask {tuple(mask.shape)} in blocks {block}: expected contiguous torch.int32 ({length},) on {mask.device}, got {got}.")


def check_backward(backward: str) -> None:
    """Raise ConfigError for a mode that there is not."""
    if backward not in reference.MODES:
        raise ConfigError(f"unknown backward: expected one of {', '.join(reference.MODES)}, got {backward!r}.")


def check_tokens(gy: Tensor, x: Tensor) -> None:
    """Raise ShapeError for a gradient of other tokens than the input's."""
    if gy.shape[:-1] != x.shape[:-1]:
        raise ShapeError(f"tokens of gy and x: expected the same leading axes, got {tuple(gy.shape)} and {tuple(x.shape)}.")


def check_gradients(gy: Tensor, x: Tensor, mask: Tensor, block: tuple[int, int], backward: str, lists: Tensor | None) -> None:
    """Raise ShapeError or ConfigError for operands of dW that do not belong together."""
    check_mask(mask, (gy.shape[-1], x.shape[-1]), block)
    check_tokens(gy, x)
    check_lists(lists, mask, block)
    check_backward(backward)


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


def check_input(x: Tensor, method: str, name: str, impl: str = "auto") -> None:
    """Raise for an input that `method` cannot take, `name` in words: TypeError for no tensor, UnsupportedError for nested ones and under function transforms,
    ShapeError where it has no axis or no floats."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: expected a Tensor (..., K), got {type(x).__name__}.")
    if x.is_nested or is_transformed(impl):
        what = "a nested tensor" if x.is_nested else "a function transform or forward-mode AD"
        raise UnsupportedError(f"{method} got {what}: expected plain tensors in reverse mode; use the model without it there.")
    if x.dim() == 0 or not x.is_floating_point():
        raise ShapeError(f"{name}: expected floats (..., K), got {x.dtype} of shape {tuple(x.shape)}.")


def is_transformed(impl: str) -> bool:
    """Whether a function transform or forward-mode AD is active, which cannot see into a custom op."""
    active = torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
    if active and impl == "triton":
        raise UnsupportedError("impl='triton' inside torch.func or forward-mode AD: those cannot see into a kernel; use impl='auto'.")
    return active
