"""`fxmask.finalize` for N:M masks: zeros in the weights, or PyTorch's semi-structured 2:4 ones."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..kernels.errors import UnsupportedError, message
from ..passes.finding.candidate import join
from ..passes.finding.weights import peek_weight
from ..sites import any_masked, refuse_shared, values_of
from .nm_layers import NMLayer, element_mask, nm_layers
from .semi_structured import semi_structured


def final_nm(model: nn.Module, format: str) -> tuple[list[tuple[nn.Module, Tensor]], dict[int, Tensor]]:
    """(layers with their weights, what the weights become, by their ids), where N:M masks are to be permanent. Raises for what cannot be made so."""
    if any_masked(model):
        what = "fxmask.finalize of N:M masks and block masks in one model: expected one kind."
        raise UnsupportedError(message(what, type(model).__name__, "finalize the submodules that were masked, one by one."))
    found = list(nm_layers(model))
    users = _users(model)
    made: dict[int, tuple[Tensor, Tensor]] = {}  # its mask, and what it becomes
    for name, m in found:
        weight = _checked(name, m, format, users)
        mask = element_mask(m, last=True)
        if id(weight) in made:  # by magnitude, of the same options: the same mask, if none of them was frozen earlier
            if not torch.equal(mask, made[id(weight)][0]):
                raise UnsupportedError(message("layers that share a weight have frozen different masks of it.", name, "untie them first."))
            continue
        w = torch.where(mask, weight.detach(), 0)
        made[id(weight)] = mask, semi_structured(name, w, f"a mask {m._fxmask_nm.words()}") if format == "2:4" else w
    return [(m, peek_weight(m)) for _, m in found], {key: w for key, (_, w) in made.items()}


def _users(model: nn.Module) -> dict[int, str]:
    """Who else holds a weight, by its id, and would get the zeros."""
    others = [(n, m) for n, m in model.named_modules() if not isinstance(m, NMLayer)]
    return {id(p): join(name, leaf) for name, m in others for leaf, p in m._parameters.items() if p is not None}


def _checked(name: str, m: NMLayer, format: str, users: dict[int, str]) -> nn.Parameter:
    weight = values_of(name, peek_weight(m), "fxmask.finalize")
    if not isinstance(weight, nn.Parameter) or is_traceable_wrapper_subclass(weight):
        what = f"fxmask.finalize writes into whole Parameters, and this weight is computed or sharded (a {type(weight).__name__})."
        raise UnsupportedError(message(what, name, "remove the parametrisation or the pruning, or gather the shards, first."))
    refuse_shared(name, weight, users)
    if format == "bsr":
        raise UnsupportedError(message("an N:M mask has no blocks for format='bsr'.", name, "use format='dense', or '2:4'."))
    if format == "2:4" and not isinstance(m, nn.Linear):
        what = "PyTorch multiplies semi-structured weights in Linears alone: got a convolution."
        fix = "use format='dense', which writes the zeros into it; or exclude the convolutions, or finalize the Linears' submodule alone."
        raise UnsupportedError(message(what, name, f"{fix} fxmask.kernels.unfolded.conv2d multiplies patches by a 2:4 matrix."))
    return weight
