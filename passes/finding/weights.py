"""The dense weight of a linear, whatever stands in front of it: read without side effects where it is only looked at."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ...kernels.errors import StateError, UnsupportedError, message
from .candidate import weight_problem

LAZY = "its weight is not initialised yet; run one forward first"


def raw_weight(m: nn.Module) -> Tensor:
    """The dense weight (N, K) as a forward uses it; a parametrised one computes it, gradient included."""
    weight = m._parameters.get("weight")
    if weight is not None:
        return weight
    if "weight" in m.__dict__:  # put there in the Parameter's place; the attribute of a layer that its owner reads would be W∘M
        return m.__dict__["weight"]
    return _there(m)


def peek_weight(m: nn.Module) -> Tensor:
    """The dense weight as the next forward will see it, for looking: no power iteration is run, and weights that a forward hook computes are computed."""
    weight = m._parameters.get("weight")
    if weight is not None:
        return weight
    if parametrize.is_parametrized(m, "weight"):
        with _at_rest(m.get_submodule("parametrizations")):
            made: Tensor = m.weight  # type: ignore[assignment]
        return made.view_as(made) if isinstance(made, nn.Parameter) else made  # one that gives back what it is given, as a fake quantiser that is off does
    for hook in m._forward_pre_hooks.values():  # old-style norms and pruning write .weight, or the bias alone, before each forward
        if type(hook).__name__ == "WeightNorm" and hook.name == "weight":  # type: ignore[attr-defined]
            return hook.compute_weight(m)  # type: ignore[attr-defined]
        if type(hook).__name__ == "SpectralNorm" and hook.name == "weight":  # type: ignore[attr-defined]
            return hook.compute_weight(m, do_power_iteration=False)  # type: ignore[attr-defined]
        if hasattr(hook, "apply_mask") and getattr(hook, "_tensor_name", "") == "weight":
            return hook.apply_mask(m)
    return _there(m)


def lacks_weight(m: nn.Module) -> bool:
    """Whether a layer has no weight by that name: None is in its place, it was deleted, or a subclass keeps it packed elsewhere."""
    return m._parameters.get("weight") is None and not parametrize.is_parametrized(m, "weight") and getattr(m, "weight", None) is None


def weight_or_problem(m: nn.Module) -> tuple[Tensor, str]:
    """The weight of a layer, and why it cannot be masked: empty ones where it has none, or is lazy, as its first forward gives it another class."""
    lazy = isinstance(m, nn.modules.lazy.LazyModuleMixin)
    if lazy or lacks_weight(m):
        return torch.empty(0, 0, device="meta"), LAZY if lazy else "it has no weight"
    weight = peek_weight(m)
    return weight, weight_problem(weight)


def _there(m: nn.Module) -> Tensor:
    weight = getattr(m, "weight", None)
    if weight is None:
        refuse_missing(m)
    return weight


def refuse_missing(m: nn.Module) -> NoReturn:
    """StateError for a layer without a weight."""
    name = m.__dict__.get("_fxmask_name") or f"{type(m).__name__}({m.extra_repr()})"
    what = "this layer has no weight any more: expected its Parameter, got None in its place, or nothing."
    fix = "give it one of its shape, layer.weight = torch.nn.Parameter(...); or call fxmask.restore(model), and fxmask.apply without the layer."
    raise StateError(message(what, name, fix))


def is_wrapped(weight: Tensor) -> bool:
    """Whether a weight is of another class, which knows none of our ops, as torchao's quantised ones are. Those of torch.distributed (a shard, a result that
    is waited for) have rules of their own. By the class: Dynamo sees no methods at such a tensor."""
    cls = type(weight)
    return cls is not nn.Parameter and hasattr(cls, "__tensor_flatten__") and not cls.__module__.startswith("torch.distributed")


def refuse_wrapped(name: str, weight: Tensor) -> None:
    """UnsupportedError for such a weight."""
    if is_wrapped(weight):
        what = f"a masked layer's weight has become a {type(weight).__name__} since fxmask.apply, as quantisation makes them: expected a plain one."
        fix = "call fxmask.finalize(model) first, then quantise; after it fxmask.restore(model) takes the masks off."
        raise UnsupportedError(message(what, name, fix))


def is_ensemble(weight: Tensor) -> bool:
    """Whether vmap maps over this weight, so that it stands for those of many models."""
    t = weight
    while torch._C._functorch.is_functorch_wrapped_tensor(t):
        if torch._C._functorch.is_batchedtensor(t):
            return True
        t = torch._C._functorch.get_unwrapped(t)
    return False


@contextmanager
def _at_rest(m: nn.Module) -> Iterator[None]:
    """Inside, a parametrisation is in eval mode: spectral_norm iterates in training only."""
    modes = [(c, c.training) for c in m.modules()]
    try:
        for c, _ in modes:
            c.training = False
        yield
    finally:
        for c, mode in modes:
            c.training = mode
