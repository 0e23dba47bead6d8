"""The mask of a site: built from the weight as it is, or the cached one, and whether it fits the weight that it is asked for."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._subclasses import FakeTensor
from torch._subclasses.fake_tensor import maybe_get_fake_mode

from ...kernels import ops
from ...kernels.errors import StateError, UnsupportedError, message
from ...kernels.grid import as_matrix, matrix_shape
from . import ranks
from .ranking import ranked
from .site import Site


def build(site: Site, weight: Tensor, grow: bool = False, anew: bool = False) -> Tensor:
    """The mask of a weight, (N, K) as a matrix, as it is now: bool (NB, KB). `grow`, `anew`: see `passes.state.ranking.ranked`."""
    c = site._fxmask_config
    fits(site, weight)
    if c.remembers:
        return ranked(site, weight.detach(), grow, anew)
    stream = site._fxmask_stream if c.criterion == "random" else 0  # a constant of its own in each layer, and layers that are alike share one compile
    keep, count = site._fxmask_keep, site._fxmask_count
    # weights of torch.func.functional_call; and the body of a cond or scan, which PyTorch traces in every call that trains: the host knows what to keep
    elsewhere = (keep.is_meta and not weight.is_meta) or is_traced_anew(keep, weight)
    if elsewhere and site._fxmask_written is not None:  # in this order: what was written moves, and a compiler would compare it
        keep, count = (torch.full((), n, dtype=torch.int64, device=weight.device) for n in site._fxmask_written[:2])
    return ops.index(as_matrix(weight), keep, count, c.block, c.criterion, c.ties, stream, c.impl, c.cover)


def mask_key(site: Site) -> tuple[object, ...]:
    """What decides with the weight about a mask that remembers nothing: sites that are alike here make the same mask of the same weight."""
    c = site._fxmask_config
    return c.block, c.criterion, c.ties, site._fxmask_stream if c.criterion == "random" else 0, c.impl, c.cover, site._fxmask_written


def is_traced_anew(held: Tensor, given: Tensor) -> bool:
    """Whether a forward is traced with tensors that have no values, where those of the state would not be taken."""
    if torch.compiler.is_dynamo_compiling() or (type(given) in (Tensor, nn.Parameter) and not is_functorch_wrapped_tensor(given)):
        return False
    mode = maybe_get_fake_mode(given)  # inside functionalisation and torch.func, too
    return mode is not None and not mode.allow_non_fake_inputs and not isinstance(held, FakeTensor)


def fits(site: Site, weight: Tensor) -> None:
    """Raise StateError where a layer was moved without its mask, or was given a weight of another size."""
    borrowed = site._fxmask_keep.is_meta and site._fxmask_mask is None and site._fxmask_dense is None and site._fxmask_scale is None
    if site._fxmask_keep.device != weight.device and not borrowed:
        what = f"the mask's state is on {site._fxmask_keep.device} and the weight on {weight.device}: expected one device."
        raise StateError(message(what, site._fxmask_name, "move the whole model by model.to(device), or load its weights by model.load_state_dict."))
    _check_form(site, weight)


def _check_form(site: Site, weight: Tensor) -> None:
    """Raise where a weight has another size, or is sparse. Every forward asks, so that shapes are compared as they are first."""
    if weight.shape != site._fxmask_shape and (weight.dim() < 2 or matrix_shape(weight.shape) != site._fxmask_shape):
        refuse_size(site, weight)
    if weight.layout is not torch.strided:
        refuse_layout(site._fxmask_name, weight)


def refuse_size(site: Site, weight: Tensor) -> None:
    """StateError: the mask is of another weight."""
    what = f"the weight has been replaced by one of another size: expected {site._fxmask_shape} as a matrix, got {tuple(weight.shape)}."
    raise StateError(message(what, site._fxmask_name, "call fxmask.restore(model) before it is replaced, and fxmask.apply after that."))


def refuse_layout(name: str, weight: Tensor) -> None:
    """UnsupportedError: the weight is sparse, as `fxmask.finalize(model, "bsr")` saves it."""
    what = f"a masked layer's weight has become a {weight.layout} tensor: expected a plain one."
    fix = "load dense weights: {name: t.to_dense() for name, t in state.items()}; or fxmask.restore(model) first, to use sparse ones as they are."
    raise UnsupportedError(message(what, name, fix))


def current_mask(site: Site, weight: Tensor) -> Tensor:
    """The mask of the next forward, cached or not: bool (NB, KB)."""
    if site._fxmask_mask is None:
        return build(site, weight)
    _check_form(site, weight)
    return site._fxmask_mask


def mask_outside(site: Site, weight: Tensor) -> Tensor:
    """The mask of the next forward, asked for outside of one: bool (NB, KB). Of a weight that fully_shard has shared out, all ranks ask together."""
    if site._fxmask_mask is None and ranks.is_shard(weight):
        weight = ranks.whole(weight)
        weight = weight.to(site._fxmask_seen or weight.dtype)
    return current_mask(site, weight)


@torch.no_grad()
def check_agreed(site: Site, weight: Tensor) -> None:
    """StateError where one of several processes begins with a cached mask that is not its weight's, as after DDP's broadcast: ranks would differ."""
    exempt = site._fxmask_step or site._fxmask_brought or site._fxmask_config.start or site._fxmask_is_dense or site._fxmask_lost
    if site._fxmask_mask is None or exempt or not ranks.several() or torch.equal(build(site, ranks.whole(weight.detach())), site._fxmask_mask):
        return
    what = "the cached mask was built from other weights than the layer has now: expected masks that are the same on all ranks."
    fix = "call fxmask.refresh(model) on all ranks after DistributedDataParallel or fully_shard; or make the model under the same seed on all of them."
    raise StateError(message(what, site._fxmask_name, fix))


def kept(site: Site) -> int:
    """Blocks that the mask in force keeps, by its ratio. Reads no device."""
    c = site._fxmask_config
    return c.keep_at(site._fxmask_built if c.cached else site._fxmask_step, site._fxmask_blocks)


def masks_any(site: Site) -> bool:
    """Whether the mask in force masks a block; a ramp begins with none, and a small layer may keep all. Reads no device."""
    return not site._fxmask_is_dense and kept(site) < site._fxmask_blocks
