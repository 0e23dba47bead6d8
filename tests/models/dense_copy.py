"""A masked model beside a dense copy with W∘M written in, which runs without fxmask: outputs, gradients, what was masked, what was read."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from math import ceil
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fxmask
from fxmask.kernels.grid import expand_mask

RATIO, BLOCK = 0.5, (16, 16)
# why a linear stays dense, in the words of `fxmask.explain`
IN_PROJ, TIED, SMALL, LORA = "its in_proj is a Parameter", "weight tied to an Embedding", "min(out, in) =", "LoRA factor"
OWN = "has its own forward"
SAME = {"timm.layers.linear.Linear"}  # a forward of its own that is nn.Linear's
Masks = dict[str, Tensor]  # parameter's name: which of its elements are kept
Call = Callable[..., Any]  # (model, *inputs) -> a floating tensor, or several


def stirred(model: nn.Module, seed: int = 1) -> nn.Module:
    """The model with noise in every parameter: nothing starts at zero (a head, a layer scale) and hides what stands before it."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p += torch.randn(p.shape, generator=generator) * (0.5 * p[0].numel() ** -0.5 if p.dim() > 1 else 0.1)
    return model


def images(*size: int) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(2))


# ---- what should be masked -------------------------------------------------------------------------------------------------------------------------------


def expected_reasons(model: nn.Module) -> dict[str, str]:
    """Every weight that a model uses as a linear's, with the documented reason why it stays dense, or ''. Written without fxmask, by its README."""
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    found = {}
    for prefix, m in model.named_modules():
        dot = f"{prefix}." if prefix else ""
        if isinstance(m, nn.Linear):
            small, lora = min(m.in_features, m.out_features) < 16, {"lora_A", "lora_B"} & set(prefix.split("."))
            own = type(m).forward is not nn.Linear.forward and f"{type(m).__module__}.{type(m).__name__}" not in SAME
            found[f"{dot}weight"] = TIED if id(m._parameters.get("weight")) in tables else SMALL if small else LORA if lora else OWN if own else ""
        elif isinstance(m, nn.MultiheadAttention):
            names = ["in_proj_weight"] if m.in_proj_weight is not None else ["q_proj_weight", "k_proj_weight", "v_proj_weight"]
            found |= {f"{dot}{name}": IN_PROJ for name in names}
    return found


def check_report(model: nn.Module, reasons: dict[str, str]) -> None:
    """`explain` has a row for each of them and no other; what has no reason to stay dense is masked, half of its blocks."""
    rows, masks = {row["name"]: row for row in fxmask.explain(model).rows}, fxmask.masks(model)
    assert sorted(rows) == sorted(name.removesuffix(".weight") for name in reasons)
    assert sorted(masks) == sorted(name for name, reason in reasons.items() if not reason)
    for name, reason in reasons.items():
        row = rows[name.removesuffix(".weight")]
        assert row["masked"] == (not reason), row
        assert reason in row["reason"] if reason else row["reason"] == "selected"
    for mask in masks.values():
        assert int(mask.sum()) == ceil(mask.numel() / 2)


# ---- running ---------------------------------------------------------------------------------------------------------------------------------------------


class Seen(TorchDispatchMode):
    """What passes the dispatcher: how often each op ran, and the weights whose masks were built."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: set[int] = set()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.fxmask.block_index.default:
            self.weights.add(args[0].data_ptr())
        self.count[func.name()] += 1
        return func(*args, **(kwargs or {}))


@dataclass
class Outcome:
    """What one forward and backward gave."""

    outputs: list[Tensor]
    gradients: dict[str, Tensor | None]  # of parameters by name, of inputs by place


def outputs_of(model: nn.Module, inputs: Sequence[Any], call: Call) -> list[Tensor]:
    """A forward's outputs, with the same random numbers for each model."""
    torch.manual_seed(3)
    y = call(model, *inputs)
    return list(y) if isinstance(y, (tuple, list)) else [y]


def run(model: nn.Module, inputs: Sequence[Any], call: Call) -> Outcome:
    """Forward, and backward from a random combination of all outputs."""
    inputs = [t.clone().requires_grad_() if t.is_floating_point() else t for t in inputs]
    model.zero_grad()
    ys = outputs_of(model, inputs, call)
    generator = torch.Generator().manual_seed(4)
    torch.autograd.backward(ys, [torch.randn(y.shape, generator=generator) for y in ys])
    gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    gradients |= {f"input {i}": t.grad for i, t in enumerate(inputs) if t.requires_grad}
    return Outcome([y.detach() for y in ys], gradients)


def rounding_of_bias_gradients(model: nn.Module, names: Sequence[str]) -> dict[str, Tensor]:
    """How far two orders of summation may lie apart, for the biases of the linears that match; filled by the model's next backward.

    A sum of n terms t in any order is off by at most (n - 1) u sum |t| (Higham, Accuracy and Stability of Numerical Algorithms, 4.2), with u = eps / 2.
    """
    bounds: dict[str, Tensor] = {}

    def note(name: str, gy: Tensor) -> None:
        terms = gy.detach().abs().reshape(-1, gy.shape[-1])
        bounds[name] = len(terms) * torch.finfo(gy.dtype).eps * terms.sum(0)

    def watch(m: nn.Module, inputs: Any, y: Tensor, name: str) -> None:
        if y.requires_grad:
            y.register_hook(partial(note, name))

    for path, m in model.named_modules():
        if any(fnmatchcase(path, pattern) for pattern in names):
            m.register_forward_hook(partial(watch, name=f"{path}.bias"))
    return bounds


# ---- comparing -------------------------------------------------------------------------------------------------------------------------------------------


def write_masks(model: nn.Module, masks: Masks) -> None:
    """W∘M into the parameters of a dense model."""
    with torch.no_grad():
        for name, kept in masks.items():
            model.get_parameter(name).masked_fill_(~kept, 0)


def check_equal(masked: Outcome, dense: Outcome, masks: Masks, bounds: dict[str, Tensor], unused: Sequence[str] = ()) -> None:
    """The same bits (of biases in `bounds`: within them). The gradient of a masked weight is the dense one where it is kept, and zero elsewhere."""
    assert len(masked.outputs) == len(dense.outputs) > 0
    for a, b in zip(masked.outputs, dense.outputs, strict=True):
        assert b.any() and torch.equal(a, b)
    assert masked.gradients.keys() == dense.gradients.keys()
    for name, a in masked.gradients.items():
        b = dense.gradients[name]
        assert (a is None) == (b is None) and (name not in masks or (a is None) == (name in unused)), name
        if a is None or b is None:
            continue
        if name in masks:
            b = b.masked_fill(~masks[name], 0)
            assert b.any(), f"{name} gets no gradient, so that the comparison shows nothing"
        assert torch.equal(a, b) or (name in bounds and (a - b).abs().le(bounds[name]).all()), name


def check_near(masked: Outcome, dense: Outcome, masks: Masks) -> None:
    """Equal but for the rounding of sums in another order."""
    pairs = list(zip(masked.outputs, dense.outputs, strict=True))
    for name, b in dense.gradients.items():
        a = masked.gradients[name]
        if a is not None and b is not None:
            pairs.append((a, b.masked_fill(~masks[name], 0) if name in masks else b))
    for a, b in pairs:
        assert (a - b).norm() <= 1e-4 * b.norm() + 1e-6


def check_unread(model: nn.Module, masks: Masks, inputs: Sequence[Any], call: Call) -> None:
    """No forward reads a masked element: other values there, too small to be kept, change no bit."""
    before = outputs_of(model, inputs, call)
    for name, kept in masks.items():
        w = model.get_parameter(name)
        w.copy_(torch.where(kept, w, -0.5 * w))
    after = outputs_of(model, inputs, call)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def element_masks(model: nn.Module) -> Masks:
    """The masks of the next forward, in the shape of the weights."""
    layers = {name: model.get_submodule(name.rpartition(".")[0]) for name in fxmask.masks(model)}
    shapes = {name: (m.out_features, m.in_features) for name, m in layers.items()}  # a look at a spectral_norm's weight would change it
    return {name: expand_mask(mask, shapes[name], BLOCK) for name, mask in fxmask.masks(model).items()}


def check(
    model: nn.Module,
    *inputs: Tensor,
    call: Call = lambda model, *inputs: model(*inputs),
    read: Sequence[str] = (),
    unused: Sequence[str] = (),
    reordered: Sequence[str] = (),
) -> nn.Module:
    """`fxmask.apply` on a model, unchanged, against a dense copy of it; returns the masked model.

    To the bit where layers multiply densely (`impl="reference"`), to rounding by default, where `auto` may add up kept blocks alone.
    read: masked weights (patterns) whose owner reads `.weight` and never calls the layer. unused: masked weights that these inputs do not reach.
    reordered: linears (patterns) whose bias gradient may be summed in another order; all else is compared to the bit.
    """
    twin, reasons = copy.deepcopy(model), expected_reasons(model)
    default = fxmask.apply(copy.deepcopy(model), ratio=RATIO, block=BLOCK)
    fxmask.apply(model, ratio=RATIO, block=BLOCK, impl="reference")
    check_report(model, reasons)
    masks = element_masks(model)
    write_masks(twin, masks)
    bounds = rounding_of_bias_gradients(twin, reordered)
    reached = {name for name in masks if name not in unused}
    called = [name for name in reached if not any(fnmatchcase(name, pattern) for pattern in read)]
    for training in (True, False):
        with Seen() as seen:
            result = run(model.train(training), inputs, call)
        assert seen.weights == {model.get_parameter(name).data_ptr() for name in reached}, "masks built"
        assert seen.count["fxmask::masked_linear"] == len(called), "masked linears called"
        expected = run(twin.train(training), inputs, call)
        check_equal(result, expected, masks, bounds, unused)
        check_near(run(default.train(training), inputs, call), expected, masks)
    with torch.no_grad():
        for a, b in zip(outputs_of(model, inputs, call), outputs_of(twin, inputs, call), strict=True):
            assert torch.equal(a, b)
        check_unread(model, masks, inputs, call)
    return model
