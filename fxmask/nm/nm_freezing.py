"""`fxmask.freeze`: N:M masks that rest from now on as they are."""

from __future__ import annotations

import torch
from torch import nn

from ..kernels.errors import StateError, message
from ..passes.finding.weights import peek_weight
from ..sites import expect_module, values_of
from .nm_attributes import LOGITS
from .nm_layers import element_mask, nm_layers

FIX_BLOCKS = "block masks are fixed by kept = fxmask.masks(model), fxmask.restore(model), fxmask.apply(model, block=..., masks=kept), and another guard."


@torch.inference_mode(False)
def freeze(model: nn.Module) -> None:
    """Fix the N:M masks of a model as they are now, so that they survive steps and the loading of new weights; learned ones by their option `final`.

    Until then a learned mask in eval() is the argmax of its logits, always the same. Afterwards train() and eval() use one mask, and the logits, which nothing
    uses any more, ask for no gradient. Weights that a learned mask has put to rest stay so: `requires_grad_()` wakes them. `fxmask.state_dict` saves frozen
    masks, `model.state_dict()` does not. Freezing again changes nothing; `fxmask.restore` ends it. Of several processes all call it together, after DDP or
    fully_shard: weights are gathered, and a mask that is drawn is rank 0's.
    Raises: StateError without N:M masks, UnsupportedError for meta weights. Block masks are fixed by WeightMask(refresh=0), or as they are by apply(masks=...).
    """
    expect_module(model, "fxmask.freeze")
    found = list(nm_layers(model))
    if not found:
        what = "fxmask.freeze: this model has no N:M mask: expected one that fxmask.apply(model, fxmask.NMMask(...)) has changed."
        raise StateError(message(what, type(model).__name__, FIX_BLOCKS))
    for name, m in found:
        values_of(name, peek_weight(m), "fxmask.freeze")
    made = {name: element_mask(m, last=True) for name, m in found}
    for name, m in found:
        if m._fxmask_nm_frozen:
            continue
        m.nm_mask, m._fxmask_nm_frozen = made[name], True
        logits = m._parameters.get(LOGITS)
        if logits is not None:
            logits.requires_grad_(False)
