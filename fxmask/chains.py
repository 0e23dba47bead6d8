"""An nn.Sequential of Linears and elementwise activations, read as the chain of functions that it is, in float64."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from .explaining.inspection import masks
from .fused import FusedDropout
from .kernels.errors import ShapeError, UnsupportedError, message
from .kernels.grid import expand_mask
from .nm.nm_layers import any_nm
from .passes.finding.candidate import base_of, join
from .passes.finding.weights import peek_weight
from .passes.state.site import Site
from .sites import any_masked, expect_module, refuse_scripted, values_of

# the largest slope of each; GELU's is 1.1290, SiLU's 1.0999
SLOPES: dict[type[nn.Module], float] = {
    nn.Identity: 1.0, nn.ReLU: 1.0, nn.ReLU6: 1.0, nn.Hardtanh: 1.0, nn.Tanh: 1.0, nn.Softplus: 1.0, nn.Sigmoid: 0.25, nn.GELU: 1.13, nn.SiLU: 1.1,
}  # fmt: skip
CALLER = "fxmask.stability"
RESTS = (nn.Dropout.forward, nn.AlphaDropout.forward, FusedDropout.forward)  # the identity in eval()
ENDS = (nn.Softmax, nn.LogSoftmax)
LAYERS = "put the layers themselves into an nn.Sequential, which shares weights and masks; convolutions, norms and branches have no such bound here."


@dataclass(frozen=True)
class Link:
    """h -> activation(W h + b). All tensors float64.

    weight, masked: (N, K), the dense weight and W∘M as the next forward in eval() has it, None without a mask; bias: (N,) or None.
    slope: the activation is Lipschitz with that constant.
    """

    name: str
    weight: Tensor
    masked: Tensor | None
    bias: Tensor | None
    activations: tuple[nn.Module, ...] = ()
    slope: float = 1.0

    def __call__(self, h: Tensor, weight: Tensor | None = None) -> Tensor:
        """(B, K) -> (B, N), by the dense weight or by one in its place."""
        h = torch.nn.functional.linear(h, self.weight if weight is None else weight, self.bias)
        for f in self.activations:
            h = f(h)
        return h

    @cached_property
    def norm(self) -> float:
        """The largest singular value of the dense weight."""
        return spectral(self.weight)

    @cached_property
    def row_sum(self) -> float:
        """The largest absolute row sum of the dense weight."""
        return row_sum(self.weight)

    @cached_property
    def change(self) -> float:
        """The largest singular value of W∘M - W; 0 without a mask."""
        return 0.0 if self.masked is None else spectral(self.masked - self.weight)

    def keeps_zero(self) -> bool:
        """Whether 0 goes to 0, so that ‖this(h)‖ <= slope ‖W‖ ‖h‖."""
        return not bool(self(self.weight.new_zeros(1, self.weight.shape[1])).any())


def spectral(w: Tensor) -> float:
    """The largest singular value; inf where an element is not finite."""
    return float(torch.linalg.matrix_norm(w, 2)) if w.isfinite().all() else math.inf


def row_sum(w: Tensor) -> float:
    """The largest sum of a row's absolute values."""
    return float(torch.linalg.matrix_norm(w, math.inf))


def chain_of(model: nn.Module) -> tuple[list[nn.Module], list[Link]]:
    """(what stands in front of the first Linear, the links) of softmax∘f_d∘..∘f_1; the softmax itself may be missing.

    Raises: UnsupportedError for a model that is no such chain, and for weights without values.
    """
    expect_module(model, CALLER)
    refuse_scripted(model, CALLER)
    steps = list(_steps(model, ""))
    if steps and type(steps[-1][1]) in ENDS:
        name, end = steps.pop()
        if end.dim not in (None, 1, -1):  # of predictions (B, classes)
            raise _refusal(f"a softmax over dim={end.dim}, which is none over classes", name, f"{type(end).__name__}(dim=1).")
    kept = _kept(model)
    front: list[nn.Module] = []
    links: list[Link] = []
    for name, m in steps:
        if isinstance(m, nn.Linear):
            links.append(_link(name, m, kept.get(join(name, "weight"))))
        elif not links:
            front.append(m)
        elif not isinstance(m, nn.Flatten):  # behind a Linear there is nothing to flatten
            last = links[-1]
            links[-1] = replace(last, activations=(*last.activations, m), slope=last.slope * slope_of(m, name))
    weights = [id(peek_weight(m)) for _, m in steps if isinstance(m, nn.Linear)]
    if len(set(weights)) < len(weights):  # a mask of one changes the other
        raise _refusal("a weight in two places", type(model).__name__)
    if not links:
        raise _refusal("no Linear at all", type(model).__name__)
    return front, links


def _steps(m: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """The modules that run, one after the other, without what does nothing in eval()."""
    base = base_of(m)
    if m._forward_hooks or m._forward_pre_hooks:
        raise _refusal("forward hooks, which may change what passes", name or type(m).__name__)
    if isinstance(m, nn.Sequential) and base.forward is nn.Sequential.forward:
        for child, part in m._modules.items():  # one that stands in several places runs in each
            if part is None:
                raise _refusal("None, which PyTorch cannot run", join(name, child))
            yield from _steps(part, join(name, child))
    elif isinstance(m, nn.Linear) and base.forward is nn.Linear.forward:
        dropping = m.__dict__.get("_fxmask_dropping")
        if dropping is not None and dropping.mc:
            raise _refusal("block dropout with mc=True, which drops in eval(), too", name)
        yield name, m
    elif isinstance(m, nn.Flatten) and (m.start_dim, m.end_dim) == (1, -1):
        yield name, m
    elif type(m).forward not in RESTS:
        if type(m) not in ENDS:
            slope_of(m, name)  # raises where there is none
        yield name, m


def slope_of(m: nn.Module, name: str) -> float:
    """The Lipschitz constant of an activation; UnsupportedError for a module of which it is not known."""
    if type(m) in SLOPES:
        return SLOPES[type(m)]
    if type(m) is nn.LeakyReLU:
        return max(1.0, abs(m.negative_slope))
    if type(m) is nn.ELU:
        return max(1.0, abs(m.alpha))
    raise _refusal("a softmax before the end" if type(m) in ENDS else type(m).__name__, name)


def _refusal(got: str, where: str, fix: str = LAYERS) -> UnsupportedError:
    known = ", ".join(t.__name__ for t in [*SLOPES, nn.LeakyReLU, nn.ELU])
    what = f"{CALLER} is for softmax after a chain of layers: expected an nn.Sequential of Linear, Flatten, Dropout and {known}, got {got}."
    return UnsupportedError(message(what, where, fix))


@torch.no_grad()
def _kept(model: nn.Module) -> dict[str, Tensor]:
    """{name of a masked weight: its mask, an element each}."""
    if not (any_masked(model) or any_nm(model)):
        return {}
    found = {}
    for name, mask in masks(model).items():
        layer = model.get_submodule(name.removesuffix("weight").removesuffix("."))
        if isinstance(layer, Site):
            if layer._fxmask_softening:
                what = "a soft mask on its ramp is no mask yet: it scales blocks, expected one that keeps or leaves them out."
                raise UnsupportedError(message(what, name, "wait until its schedule has come to the end."))
            mask = expand_mask(mask, peek_weight(layer).shape, layer._fxmask_config.block)
        found[name] = mask
    return found


def _link(name: str, m: nn.Linear, mask: Tensor | None) -> Link:
    with torch.no_grad():
        w = values_of(name, peek_weight(m), CALLER).detach()
        if w.numel() == 0:
            raise ShapeError(message(f"{CALLER}: expected a weight with elements, got shape {tuple(w.shape)}.", name, "leave that layer out."))
        bias = None if m.bias is None else m.bias.detach().double()
        return Link(name, w.double(), None if mask is None else torch.where(mask, w, 0).double(), bias)
