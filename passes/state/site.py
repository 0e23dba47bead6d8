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
from torch._subclasses import FakeTensor

from ...kernels import ops
from ...kernels.dispatch import runs_triton
from ...kernels.errors import StateError, UnsupportedError, message
from ...kernels.grid import grid_shape, keep_count, matrix_shape
from ..settings import feedback, phases
from ..settings.config import WeightMask
from . import gpu_site, lost_guards
from .scripting import refuse_scripting

if TYPE_CHECKING:
    from .ties import Ties

STATE = ("keep", "count", "dense", "mask", "lists", "flips", "score", "growth", "scale", "looked")  # the tensors among the attributes

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
    _fxmask_told: bool  # the warning of a gradient without such a forward was given
    _fxmask_seen: torch.dtype | None  # of the weight in the last forward: fully_shard may gather it in another than the optimiser holds
    _fxmask_forward: tuple[Any, ...] | None = ()  # the mask of the only one since a counted step, and of what; None: none so far; (): nobody knows: `remember`
    _fxmask_version: int | None = None  # version of the weight that the cached mask is to go with, see passes.state.uncounted
    _fxmask_lost: bool  # a cached mask went through the meta device, where it has no values
    _fxmask_restored: list[str] | None  # of a cached mask that a state brought before its weights and no step has used: all that it brought, shared, until told
    _fxmask_brought: bool  # a state brought the cached mask, which may be of older weights
    _fxmask_loaded: bool  # weights were loaded, and neither masks nor a step came since: masks that come now come second, in order
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


@torch.inference_mode(False)
def move(site: Site, device: torch.device) -> None:
    """Take the state's tensors to another device."""
    site._fxmask_forward = ()
    own, came = site._fxmask_own, site._fxmask_score is not None and site._fxmask_score.is_meta and device.type != "meta"
    for name in STATE:
        value = getattr(site, f"_fxmask_{name}")
        setattr(site, f"_fxmask_{name}", None if value is None else _moved(value, device))
    if site._fxmask_saved is not None:  # inside fxmask.dense
        mask, lists = site._fxmask_saved
        site._fxmask_saved = (_moved(mask, device), None if lists is None else _moved(lists, device))
    if own is not None and came and not own.is_meta:
        site._fxmask_score = own.to(device, copy=True)
    site._fxmask_written = None  # what was moved from the meta device holds zeros
    sync(site)
    if site._fxmask_mask is not None and site._fxmask_lists is None:  # kernels may run on this device
        site._fxmask_lists = lists_of(site, site._fxmask_mask)


def _moved(t: Tensor, device: torch.device) -> Tensor:
    """A state tensor on another device; from the meta device come zeros, which the caller must replace."""
    return torch.zeros_like(t, device=device) if t.is_meta else t.to(device)


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
    site._fxmask_forward = ()
    site._fxmask_is_dense, site._fxmask_saved = False, None
    site._fxmask_grown, site._fxmask_own = None, own
    place_on(site, weight.device)


@torch.inference_mode(False)  # tensors made inside inference_mode could never be rewritten
def place_on(site: Site, device: torch.device) -> None:
    """Make the state's tensors on a device, as after `install`."""
    config = site._fxmask_config
    site._fxmask_keep, site._fxmask_count = (torch.zeros((), dtype=torch.int64, device=device) for _ in range(2))
    site._fxmask_dense = torch.zeros((), dtype=torch.bool, device=device) if config.backward == "rigl" else None
    site._fxmask_mask = torch.ones(site._fxmask_grid, dtype=torch.bool, device=device) if config.cached else None
    site._fxmask_lists = None if site._fxmask_mask is None else lists_of(site, site._fxmask_mask)
    site._fxmask_written = site._fxmask_looked = None
    site._fxmask_flips = torch.zeros((), dtype=torch.int64, device=device) if config.cached else None
    site._fxmask_score = torch.zeros(site._fxmask_grid, dtype=torch.float32, device=device) if config.observes else None  # whatever the default dtype is
    if site._fxmask_own is not None and not site._fxmask_own.is_meta:
        site._fxmask_score = site._fxmask_own.to(device, copy=True)
    site._fxmask_scale, site._fxmask_scaled = torch.ones((), dtype=torch.float32, device=device) if config.soft else None, 1.0
    site._fxmask_softening = False  # `sync` tells, and of soft masks alone: a phase with refresh=0 is none
    site._fxmask_growth = None
    sync(site)


def uninstall(site: nn.Module) -> None:
    """Remove every attribute that `install` made."""
    for name in [n for n in site.__dict__ if n.startswith("_fxmask_")]:
        delattr(site, name)


@torch.inference_mode(False)
@torch.no_grad()
def sync(*sites: Site) -> None:
    """Write the device scalars from the host's step, where they change; no transfer, no host sync. Many sites share a launch.

    Layers share configs, and each has a turn in every optimiser step: so a ratio is worked out once, and attributes are written past nn.Module's __setattr__.
    """
    scalars, changes = [], []
    ratios: dict[tuple[float, int, int, int], float] = {}
    for site in sites:
        config, step, (nb, kb) = site._fxmask_config, site._fxmask_step, site._fxmask_grid
        d, moment = site.__dict__, (config.ratio, id(config.schedule), config.start, step)
        d["_fxmask_kind"], d["_fxmask_from"] = config.kind, gpu_site.least_tokens(site, site._fxmask_keep.device)
        if moment not in ratios:
            ratios[moment] = config.ratio_at(step)
        keep = nb * kb if site._fxmask_is_dense else keep_count(nb * kb, ratios[moment])
        count = step if config.refresh and config.criterion == "random" else 0
        flag = site._fxmask_dense is not None and site._fxmask_dense_now
        if site._fxmask_scale is not None:
            scale = config.soft_scale_at(step)
            site._fxmask_softening = scale > 0 and not site._fxmask_is_dense  # the one switch of a soft mask that recompiles, once
            if scale != site._fxmask_scaled:
                site._fxmask_scale, site._fxmask_scaled = _filled(site, site._fxmask_scale, scale), scale
        old = site._fxmask_written
        if old is None:
            site._fxmask_keep.fill_(keep)
            site._fxmask_count.fill_(count)
        else:
            moves = [(site._fxmask_keep, keep - old[0]), (site._fxmask_count, count - old[1])]
            scalars += [t for t, change in moves if change]
            changes += [change for _, change in moves if change]
        if site._fxmask_dense is not None and (old is None or flag != old[2]):
            site._fxmask_dense = _filled(site, site._fxmask_dense, flag)
        d["_fxmask_written"] = (keep, count, flag)
    if scalars:
        torch._foreach_add_(scalars, changes)


def _filled(site: Site, t: Tensor, value: float) -> Tensor:
    """A scalar that backwards read, with another value: a new tensor, because one that is still to come holds the old."""
    return t.fill_(value) if site._fxmask_in_place else torch.full_like(t, value)


def has_values(t: Tensor) -> bool:
    """Whether a tensor has values, which one on the meta device, or of a FakeTensorMode, that memory is estimated in, has not."""
    return not t.is_meta and not isinstance(t, FakeTensor)


def capturing(t: Tensor) -> bool:
    """Whether a CUDA graph is being captured on this tensor's device, which would replay what is done now."""
    return t.is_cuda and torch.cuda.is_current_stream_capturing()


def lists_of(site: Site, mask: Tensor) -> Tensor | None:
    """The lists of a mask that is to be cached; None where no kernel can run on its device, or none reads them."""
    return ops.lists(mask, site._fxmask_config.block, "triton") if reads_lists(site, mask.device) else None


def reads_lists(site: Site, device: torch.device) -> bool:
    """Whether kernels that read lists may run on a device; under `auto` also where they do not pay now, so that lists do not come and go with a ratio."""
    return runs_triton(site._fxmask_config.impl, device) or gpu_site.may_take(site, device)


def check_plain(site: Site, weight: Tensor) -> None:
    """Raise UnsupportedError where a step has to read the gradient of a weight, or to write it, that is no Parameter."""
    if site._fxmask_given.touches_weight and not isinstance(weight, nn.Parameter):
        what = "gradient criteria, average, regrow and gain read or write the weight between steps: expected a Parameter, got one that the model computes."
        raise UnsupportedError(message(what, site._fxmask_name, "remove the parametrisation, or use a criterion of the weight alone for this layer."))
