"""A masked model beside a dense copy with W∘M written in, which runs without fxmask: outputs and gradients, to the bit or to rounding."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

import fxmask
from fxmask.kernels.grid import expand_mask
from zoo.sources import Made

RATIO, BLOCK = 0.5, (16, 16)
LOOSE = {torch.float32: 1e-4, torch.float64: 1e-9}  # of a tensor's norm: two orders of the same sums
WITHIN = 10  # times as far from float64 as plain PyTorch in float32, where that rounds more
Masks = dict[str, Tensor]  # parameter's name: which of its elements are kept


@dataclass
class Outcome:
    """What one forward and backward gave; gradients of parameters by name, of inputs by place."""

    outputs: list[Tensor]
    gradients: dict[str, Tensor | None]


def floats(y: Any) -> list[Tensor]:
    """The floating tensors of any output: a tensor, a tuple, a dict, an output class of transformers."""
    leaves = tree_leaves(dict(y) if isinstance(y, Mapping) else y)
    return [t for t in leaves if isinstance(t, Tensor) and t.is_floating_point()]


def outputs_of(model: Callable[..., Any], made: Made, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """A forward without gradients, with the same random numbers for each model."""
    args, kwargs = inputs_of(made, dtype, grad=False)
    torch.manual_seed(3)
    with torch.no_grad():
        return floats(model(*args, **kwargs))


def run(model: nn.Module, made: Made, call: Callable[..., Any] | None = None, dtype: torch.dtype = torch.float32) -> Outcome:
    """Forward, and backward from a random combination of all outputs. `call`: the compiled model."""
    args, kwargs = inputs_of(made, dtype)
    model.zero_grad()
    torch.manual_seed(3)
    ys = [y for y in floats((model if call is None else call)(*args, **kwargs)) if y.requires_grad]
    generator = torch.Generator().manual_seed(4)
    torch.autograd.backward(ys, [torch.randn(y.shape, generator=generator).to(y.dtype) for y in ys])
    gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    gradients |= {f"input {i}": t.grad for i, t in enumerate(tree_leaves((args, kwargs))) if isinstance(t, Tensor) and t.requires_grad}
    return Outcome([y.detach() for y in ys], gradients)


def inputs_of(made: Made, dtype: torch.dtype, grad: bool = True) -> tuple[Any, Any]:
    """Fresh copies of a model's arguments, floating ones in `dtype`."""

    def fresh(t: Any) -> Any:
        if not isinstance(t, Tensor):
            return t
        return t.to(dtype, copy=True).requires_grad_(grad) if t.is_floating_point() else t.clone()

    return tree_map(fresh, (made.args, made.kwargs))


# ---- the dense copy --------------------------------------------------------------------------------------------------------------------------------------


def masked_copy(model: nn.Module) -> nn.Module:
    return fxmask.apply(copy.deepcopy(model), ratio=RATIO, block=BLOCK)


def element_masks(masked: nn.Module) -> Masks:
    """The masks of the next forward, in the shape of the weights."""
    if not fxmask.explain(masked).summary["masked"]:
        return {}
    return {name: expand_mask(mask, masked.get_parameter(name).shape, BLOCK) for name, mask in fxmask.masks(masked).items()}


def written_in(model: nn.Module, masks: Masks) -> nn.Module:
    """A copy of the dense model with W∘M as its weights."""
    return write_in(copy.deepcopy(model), masks)


def write_in(model: nn.Module, masks: Masks) -> nn.Module:
    """The model itself, with W∘M as its weights."""
    with torch.no_grad():
        for name, kept in masks.items():
            model.get_parameter(name).masked_fill_(~kept, 0)
    return model


def wrong_masks(model: nn.Module, masks: Masks) -> list[str]:
    """Names of the masks that do not keep exactly the larger half of the blocks, by Frobenius norm, written without fxmask. Equal norms may go either way."""
    wrong = []
    for name, kept in masks.items():
        norms = _blocks(model.get_parameter(name).detach()).square().sum((1, 3))
        whole, none = _blocks(kept, 1.0).amin((1, 3)) == 1, _blocks(kept).amax((1, 3)) == 0
        right = bool((whole ^ none).all()) and int(whole.sum()) == max(1, math.ceil(norms.numel() * (1 - RATIO)))
        if not right or (bool(none.any()) and float(norms[whole].min()) < float(norms[none].max()) * (1 - 1e-5)):
            wrong.append(name)
    return wrong


def _blocks(t: Tensor, fill: float = 0.0) -> Tensor:
    """A matrix in float64 as (block rows, rows, block columns, columns), filled up at ragged edges."""
    rows, cols = BLOCK
    t = F.pad(t.double(), (0, -t.shape[1] % cols, 0, -t.shape[0] % rows), value=fill)
    return t.view(t.shape[0] // rows, rows, t.shape[1] // cols, cols)


# ---- comparing -------------------------------------------------------------------------------------------------------------------------------------------


def compare(masked: Outcome, dense: Outcome, masks: Masks) -> str:
    """ "bits", "rounding", or "no: " and what differs most. The gradient of a masked weight is the dense one where it is kept, and zero elsewhere."""
    pairs = _pairs(masked, dense, masks)
    if isinstance(pairs, str):
        return pairs
    if all(torch.equal(a, b) for _, a, b in pairs):
        return "bits"
    worst, where = max((_distance(a, b), name) for name, a, b in pairs)
    return "rounding" if worst <= 1 else f"no: {where} is {worst:.3g} times as far off as rounding"


def settle(narrow: tuple[Outcome, Outcome], wide: tuple[Outcome, Outcome], masks: Masks) -> str:
    """Where float32 rounds more than `compare` allows: "float64", or "no: " and why.

    The pairs (masked, dense) agree in float64, and in float32 the masked model lies at most `WITHIN` times as far from the dense one in float64 as that in
    float32 does: a fault of float32 kernels alone does not hide behind float64.
    """
    same, near, true = compare(*wide, masks), _pairs(*narrow, masks), _pairs(*wide, masks)
    if isinstance(true, str) or same.startswith("no"):
        return same
    if isinstance(near, str):
        return near
    values = {name: t for name, _, t in true}
    worst, where = max((_farther(a, b, values[name]), name) for name, a, b in near)
    return "float64" if worst <= 1 else f"no: {where} is {WITHIN * worst:.3g} times as far from float64 as plain PyTorch in float32"


def _pairs(masked: Outcome, dense: Outcome, masks: Masks) -> list[tuple[str, Tensor, Tensor]] | str:
    """What is to be equal, by name, or why there is nothing to compare."""
    if len(masked.outputs) != len(dense.outputs) or not dense.outputs:
        return f"no: {len(masked.outputs)} outputs for {len(dense.outputs)}"
    pairs = [(f"output {i}", a, b) for i, (a, b) in enumerate(zip(masked.outputs, dense.outputs, strict=True))]
    if not all(bool(b.isfinite().all()) for _, _, b in pairs):
        return "no: the dense copy's outputs are not finite"
    if not any(bool(b.any()) for _, _, b in pairs):
        return "no: the dense copy's outputs are zero, so that the comparison shows nothing"
    for name, b in dense.gradients.items():
        a = masked.gradients[name]
        if a is None or b is None:
            if (a is None) != (b is None) and bool((b if a is None else a).any()):  # type: ignore[union-attr]
                return f"no: {name} has {'no' if a is None else 'a'} gradient"
            continue
        pairs.append((name, a, b.masked_fill(~masks[name], 0) if name in masks else b))
    return pairs


def compare_outputs(found: list[Tensor], expected: list[Tensor]) -> str:
    return compare(Outcome(found, {}), Outcome(expected, {}), {})


def _distance(a: Tensor, b: Tensor) -> float:
    """|a - b| over what rounding explains."""
    share = LOOSE.get(b.dtype, 1e-2)
    off = (a.double() - b.double()).norm() / (share * b.double().norm() + share * 1e-2)
    return float(off) if bool(off.isfinite()) else float("inf")


def _farther(a: Tensor, b: Tensor, true: Tensor) -> float:
    """|a - true| over `WITHIN` times |b - true|, or over what rounding explains where that is more."""
    allowed = WITHIN * (b.double() - true).norm() + LOOSE[torch.float32] * (true.norm() + 1e-2)
    off = (a.double() - true).norm() / allowed
    return float(off) if bool(off.isfinite()) else float("inf")
