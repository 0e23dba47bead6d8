"""What a run on fake tensors has told: the ops, what autograd saved, and the model's tensors as they were there before."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..state.site import Site
from .calls import Call, Place


@dataclass
class Saved:
    """A tensor that autograd holds for the backward."""

    place: Place
    module: str
    bytes: int  # of its whole storage: a view keeps all of it


@dataclass
class Recording:
    """What ran, and the tensors that were there before."""

    calls: list[Call]
    saved: list[Saved]  # each storage once, without parameters, buffers, cached masks and inputs of the model
    parameters: dict[str, Tensor]  # by name, tied ones once; the real ones
    buffers: dict[str, Tensor]
    inputs: list[Tensor]
    modules: dict[str, str]  # name -> class
    sites: dict[str, Site] = field(default_factory=dict)  # parameter's name -> owner of its mask
    changed: set[str] = field(default_factory=set)  # layers whose forward is another now: masked, pruned, dropped
    own: set[str] = field(default_factory=set)  # those of `changed` whose class had a forward of its own, which reads a masked weight
    idle: dict[str, int] = field(default_factory=dict)  # masked parameters that no op read -> their elements in kept blocks
    by_element: dict[str, int] = field(default_factory=dict)  # parameters under N:M masks -> elements that these keep
    executions: dict[str, int] = field(default_factory=dict)  # module -> how often it was called
    typical: set[str] = field(default_factory=set)  # weights whose masks were drawn at random, because they have no values
    uncounted: set[str] = field(default_factory=set)  # masked weights of which nothing says how many blocks are kept
    backward: bool = False  # whether a backward ran
    trained: set[str] = field(default_factory=set)  # parameters that got a gradient: what a step moves
    dtype: torch.dtype | None = None  # that floating tensors were taken to have

    def size(self, t: Tensor) -> int:
        """Bytes of a tensor, in the dtype that was asked for."""
        return t.numel() * (self.dtype if self.dtype and t.is_floating_point() else t.dtype).itemsize
