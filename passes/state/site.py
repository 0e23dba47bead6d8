"""The state of one masked weight: its configuration, its step, and the device scalars and mask that the forward reads.

The forward reads nothing from the host that moves: the number of kept blocks, the step and a cached mask are tensors, rewritten between optimiser steps. So a
schedule recompiles nothing. They are plain attributes and no buffers: a buffer would be averaged by EMA, broadcast by DDP and listed by whoever walks buffers.
The state lives on the masked module itself, in attributes that start with `_fxmask_`; what acts on it are functions, so that no method of a user's class is
shadowed.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...kernels.errors import StateError, UnsupportedError, message
from ...kernels.grid import grid_shape, matrix_shape
from ..settings import feedback, phases
from ..settings.config import WeightMask
from . import gpu_site, lost_guards
from .scripting import refuse_scripting
from .tensors import STATE, move, place_on

if TYPE_CHECKING:
    from .ties import Ties

UNKNOWN = -1  # of a copy's weight: the cached mask may be another one's


class Site(nn.Module):
    """Mixin of every module that owns a mask."""

    # what is asked for, and of which weight
    _fxmask_given: WeightMask  # what the user asked for
    _fxmask_config: WeightMask  # what is in force: that of the phase
    _fxmask_progress: feedback.Progress | None  # of a feedback that has something to remember
    _fxmask_phase: int  # phases that have begun
    _fxmask_kind: int = 0  # of what is in force, see `WeightMask.kind`
    _fxmask_name: str  # the parameter's
    _fxmask_shape: tuple[int, int]  # of the weight as a matrix
    _fxmask_grid: tuple[int, int]
    _fxmask_stream: int  # seed of random masks
    _fxmask_chooses: bool = False  # of the class: whether its forward asks `passes.state.gpu_site`
    _fxmask_from: int = 0  # tokens from which kernels multiply under `auto`, see `passes.state.gpu_site`

    # optimiser steps, and who counts them
    _fxmask_step: int  # optimiser steps taken
    _fxmask_built: int  # step of the last rebuild of a cached mask
    _fxmask_announced: bool  # somebody counts the steps
    _fxmask_copied: bool = False  # this is a copy, and no step of its own has been told
    _fxmask_policy: str | None  # of the guard that is in force
    _fxmask_guard: object | None  # token of the guard that counts the steps
    _fxmask_choice: str  # what that guard was asked for: `auto` follows the phases
    _fxmask_was: str | None  # policy of the guard that this layer has lost, as every copy has
    _fxmask_unguarded: bool  # a state was loaded that had a guard, and this process has made none

    # what forwards and loads have left
    _fxmask_called: bool  # a forward has used the mask
    _fxmask_past_first: bool = False  # fxmask.step was told of one, after which it looks for adapters no more; a state brings steps that others made
    _fxmask_told: bool  # the warning of a gradient without such a forward was given
    _fxmask_seen: torch.dtype | None  # of the weight in the last forward: fully_shard may gather it in another than the optimiser holds
    _fxmask_forward: tuple[Any, ...] | None = ()  # what the only one since a counted step noted, see `remember`; None before it; () where nobody knows
    _fxmask_version: int | None = None  # version of the weight that the cached mask is to go with, see passes.state.uncounted
    _fxmask_lost: bool  # a cached mask went through the meta device, where it has no values
    _fxmask_restored: list[str] | None  # of a cached mask that a state brought before its weights and no step has used: all that it brought, shared, until told
    _fxmask_resumed: bool = False  # a state was loaded, which says at which step the masks are
    _fxmask_brought: bool  # a state brought the cached mask, which may be of older weights
    _fxmask_loaded: bool  # weights were loaded, and neither masks nor a step came since: masks that come now come second, in order
    _fxmask_loaded_since_step: bool = False  # weights were loaded since a guarded step last began, whatever masks came then
    _fxmask_tied: Ties | None  # where several masks are of one weight: they share it

    # inside fxmask.dense
    _fxmask_is_dense: bool
    _fxmask_saved: tuple[Tensor, Tensor | None] | None  # the cached mask and lists that come back

    # tensors on the weight's device, and what the host knows of them
    _fxmask_keep: Tensor  # 0-d int64, blocks to keep
    _fxmask_count: Tensor  # 0-d int64, the step as random masks see it
    _fxmask_written: tuple[int, int, bool] | None  # what the device scalars hold, so that they are written only when they change
    _fxmask_dense: Tensor | None  # 0-d bool, rigl: dW is dense now
    _fxmask_mask: Tensor | None  # bool [NB, KB] where the mask is cached
    _fxmask_lists: Tensor | None  # the cached mask's lists, where kernels read them
    _fxmask_in_place: bool = False  # a CUDA graph of fxmask.graphed reads these tensors where they lie: they are rewritten, not replaced
    _fxmask_flips: Tensor | None  # 0-d int64, blocks that changed place over all rebuilds of a cached mask
    _fxmask_looked: Tensor | None  # bool [NB, KB], the mask at the last look of a feedback by flips
    _fxmask_score: Tensor | None  # float32 [NB, KB], what optimiser steps add to, see passes.state.saliency, or what the user gave
    _fxmask_own: Tensor | None = None  # float32 [NB, KB] on the host, the score of criterion='given'
    _fxmask_growth: Tensor | None  # float32 [NB, KB], norms of the last dense gradient since an exchange, for regrowth
    _fxmask_grown: Tensor | None  # bool [NB, KB], while a mask is built: the blocks that an exchange brings back
    _fxmask_scale: Tensor | None  # 0-d float32, the factor of masked blocks of a soft mask
    _fxmask_scaled: float  # that factor
    _fxmask_softening: bool  # it is not 0 yet

    @property
    def _fxmask_blocks(self) -> int:
        """How many blocks the weight has."""
        return self._fxmask_grid[0] * self._fxmask_grid[1]

    @property
    def _fxmask_dense_now(self) -> bool:
        """Whether the weight's gradient of this step is dense under `rigl`."""
        c = self._fxmask_config
        return (self._fxmask_step - c.start + 1) % c.dense_every == 0

    __prepare_scriptable__ = refuse_scripting

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        result = super()._apply(fn, recurse)
        self._fxmask_lost = self._fxmask_lost or (self._fxmask_keep.is_meta and self._fxmask_mask is not None)
        weight = self._parameters.get("weight")
        if self._fxmask_keep.is_meta and weight is not None and not weight.is_meta:  # assigned to a model that was built on the meta device
            device = weight.device
        else:
            device = fn(torch.empty(0, device=self._fxmask_keep.device)).device  # the state follows the device, and no change of dtype
        move(self, device)
        return result

    def __getstate__(self) -> dict[str, Any]:
        if self._fxmask_is_dense:
            what = "copying or pickling a masked model inside fxmask.dense: expected masks in force, or the copy would stay dense for ever."
            raise StateError(message(what, self._fxmask_name, "copy it outside of the with block; fxmask.restore(copy) makes a dense one."))
        ends = {"_fxmask_in_place": False, "_fxmask_forward": ()}  # no graph reads a copy, and no step of it follows
        attributes = {**self.__dict__, **ends, "_fxmask_copied": True, "_fxmask_version": _version_in_copy(self)}
        attributes.pop("_compiled_call_impl", None)  # as nn.Module does: what compile() has made calls this layer, with its weights
        if self._fxmask_guard is None:
            return attributes
        gone = {"_fxmask_policy": None, "_fxmask_guard": None, "_fxmask_announced": False}  # hooks of an optimiser do not follow a copy
        return {**attributes, **gone, "_fxmask_was": self._fxmask_policy}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self.__dict__.get("_fxmask_was") is not None:
            lost_guards.expect_guard(self)
        ties = self.__dict__.get("_fxmask_tied")
        if ties is not None and "weight" in self._parameters:  # masks in graphs hold no weight, and join when theirs is loaded
            ties.join(self, self, "weight")
        for name in (f"_fxmask_{name}" for name in STATE):  # weights may be shared between processes, what each of them has counted may not
            if isinstance(t := self.__dict__.get(name), Tensor) and t.is_shared():
                setattr(self, name, t.clone())
        if "_fxmask_keep" in self.__dict__:  # it may have been on another machine
            self._fxmask_from = gpu_site.least_tokens(self, self._fxmask_keep.device)
            if self._fxmask_version is None:
                note_weight(self, self._parameters.get("weight"))


def _version_in_copy(site: Site) -> int | None:
    """What a copy notes of its weight: nothing yet, or that a copy of a stale copy is stale."""
    weight = site._parameters.get("weight")
    return UNKNOWN if weight is None or (site._fxmask_copied and version(weight) != site._fxmask_version) else None


def note_weight(site: Site, weight: Tensor | None) -> None:
    """Note that the cached mask is to go with the weight as it is; a mask in a graph holds none, and goes with that of the next forward."""
    site.__dict__["_fxmask_version"] = None if weight is None else version(weight)


def version(weight: Tensor) -> int | None:
    """Of a tensor's values, as far as PyTorch counts writes: fused optimisers and `.data` leave it. For warnings alone."""
    return None if weight.is_inference() else weight._version


def stream_of(seed: int, name: str) -> int:
    """Seed of a weight's random masks: the same on every rank and in every run, another one for every weight."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:7], "big")


def install(site: Site, config: WeightMask, name: str, weight: Tensor, stream_name: str, own: Tensor | None = None) -> None:
    """Attach the state. Only the shape and the device of `weight` are read; a cached mask keeps every block until `rebuild`. `own`: scores of the user's."""
    site._fxmask_given, site._fxmask_progress, site._fxmask_phase = config, feedback.begin(config), 0
    site._fxmask_config = feedback.held(phases.in_force(config, 0), config, site._fxmask_progress)
    site._fxmask_name, site._fxmask_shape = name, matrix_shape(weight.shape)
    site._fxmask_grid = grid_shape(site._fxmask_shape, config.block)
    site._fxmask_stream = stream_of(config.seed, stream_name)
    check_plain(site, weight)
    site._fxmask_step = site._fxmask_built = 0
    site._fxmask_announced = site._fxmask_unguarded = False
    site._fxmask_policy, site._fxmask_guard, site._fxmask_choice, site._fxmask_was = None, None, "auto", None
    site._fxmask_called = site._fxmask_told = site._fxmask_lost = site._fxmask_brought = site._fxmask_loaded = False
    site._fxmask_seen = site._fxmask_restored = site._fxmask_tied = None
    site._fxmask_is_dense, site._fxmask_saved = False, None
    site._fxmask_grown, site._fxmask_own = None, own
    place_on(site, weight.device)


def uninstall(site: nn.Module) -> None:
    """Remove every attribute that `install` made."""
    for name in [n for n in site.__dict__ if n.startswith("_fxmask_")]:
        delattr(site, name)


def check_plain(site: Site, weight: Tensor) -> None:
    """Raise UnsupportedError where a step has to read the gradient of a weight, or to write it, that is no Parameter."""
    if site._fxmask_given.touches_weight and not isinstance(weight, nn.Parameter):
        what = "gradient criteria, average, regrow and gain read or write the weight between steps: expected a Parameter, got one that the model computes."
        raise UnsupportedError(message(what, site._fxmask_name, "remove the parametrisation, or use a criterion of the weight alone for this layer."))
