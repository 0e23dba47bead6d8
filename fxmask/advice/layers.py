"""Which linears a forward calls, and on what: one real forward under a function mode, which sees `F.linear` whoever calls it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..kernels.errors import UnsupportedError, message
from ..passes.finding.choose import Decision
from ..passes.graphs.graph_calls import LINEARS


@dataclasses.dataclass(frozen=True)
class Seen:
    """One input of a linear."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    needs_gradient: bool
    graph: bool = True  # gradients are on where it is called
    autocast: torch.dtype | None = None  # what is in force there

    @property
    def tokens(self) -> int:
        return prod(self.shape[:-1])


@dataclasses.dataclass
class Layer:
    """A linear that may be masked, and every input that it had in one forward. `why`: what speaks against timing it; empty where nothing does."""

    name: str
    weight: Tensor
    bias: bool
    calls: tuple[Seen, ...]
    why: str = ""
    others: tuple[str, ...] = ()  # names of modules that share the weight

    @property
    def tokens(self) -> int:
        return sum(c.tokens for c in self.calls)

    @property
    def signature(self) -> tuple[Any, ...]:
        """Layers that agree in this take the same time."""
        return tuple(self.weight.shape), self.weight.dtype, self.weight.requires_grad, self.bias, self.calls


class _Watch(TorchFunctionMode):
    """Notes the inputs of linears by the identity of their weights."""

    def __init__(self, weights: set[int]) -> None:
        super().__init__()
        self.weights = weights
        self.calls: dict[int, list[Seen]] = {}
        self.bias: dict[int, bool] = {}
        self.nested: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in LINEARS:
            self._note(*args, **kwargs)
        return func(*args, **kwargs)

    def _note(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
        if id(weight) in self.weights and input.is_nested:  # which has no sizes, or no numbers for them
            self.nested.add(id(weight))
        elif id(weight) in self.weights:
            kind = input.device.type
            autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
            seen = Seen(tuple(input.shape), tuple(input.stride()), input.dtype, input.requires_grad, torch.is_grad_enabled(), autocast)
            self.calls.setdefault(id(weight), []).append(seen)
            self.bias[id(weight)] = bias is not None


def layers_of(model: nn.Module, decisions: Sequence[Decision], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Layer]:
    """The layers that `apply` would mask, in the model's order, each weight once. Runs one forward with gradients enabled."""
    chosen = [d for d in decisions if d.config is not None]
    watch = _Watch({id(d.candidate.weight) for d in chosen})
    with watch, torch.enable_grad():
        try:
            model(*args, **kwargs)
        except Exception as e:
            what = f"fxmask.advise: the model cannot run on these inputs: {type(e).__name__}: {str(e)[:300]}"
            raise UnsupportedError(message(what, type(model).__name__, "check the inputs' number, shapes and dtypes.")) from e
    found: dict[int, Layer] = {}
    for d in chosen:
        c = d.candidate
        key = id(c.weight)
        if key not in found:
            why = "" if key in watch.calls else "not called with these inputs"
            if key in watch.nested:
                why = "its input is a nested tensor: expected a plain one"
            elif why and d.config is not None and d.config.read == "weight":
                why = "its owner reads its weight and multiplies densely"
            elif why and c.module is not None and "weight" not in c.module._parameters:
                why = "its weight is computed from other parameters: expected a plain one"
            found[key] = Layer(c.name, c.weight, watch.bias.get(key, False), tuple(watch.calls.get(key, ())), why)
        else:
            found[key].others += (c.name,)
    return list(found.values())
