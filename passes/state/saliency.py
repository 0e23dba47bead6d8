"""Scores of blocks that gradients make, or that last over steps: taken in at every optimiser step, read when a mask is rebuilt.

| criterion | score of block B after a step | source |
| --- | --- | --- |
| `gradient` | sqrt(sum over B of g^2) | what RigL grows by (Evci et al. 2020, arXiv:1911.11134), a block's norm for a weight's magnitude |
| `taylor` | abs(sum over B of g w): how the loss would change without the block, to first order | Molchanov et al. 2017 (arXiv:1611.06440), eq. 7, of weights |
| `movement` | sum over steps of -(sum over B of g w): away from zero | Sanh et al. 2020 (arXiv:2005.07683), eq. 3; blocks: Lagunas et al. 2021 |
| `momentum` | mean over B of abs(m), m the optimiser's first moment | what Dettmers and Zettlemoyer 2019 (arXiv:1907.04840) share out and grow by |

g is the gradient as the optimiser is about to use it, w the weight that it was made with. With `average=a` a score begins with its first value, and then s
becomes a s + (1 - a) new, also for norms of the weight (`fro`, `l1`, `linf`, `spectral`); `movement` forgets by a. Under backward="masked" a masked block
has no gradient, so its `taylor` and `gradient` fall to zero and it does not return; `ste` and `rigl` give it one. Its `momentum`, frozen by `fxmask.guard`,
stays that of the day it left, and it may return by that; Muon's is cleared while masked, and it does not. Blocks whose scores tie, as where no gradient has
come, rank by the weight's norm.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...kernels import scoring
from ...kernels.errors import UnsupportedError, message
from ...kernels.grid import as_matrix
from ...kernels.saliency import BY_GRADIENT, block_sums, taken
from ...kernels.score import NORMS, norms_of
from . import ranks

if TYPE_CHECKING:
    from .site import Site

LEARNED = ("gradient", "taylor", "movement", "momentum")
GIVEN = "given"  # scores of the user's own, which no step moves
MOMENTA = ("exp_avg", "momentum_buffer")  # of Adam's family, of SGD


def norms(w: Tensor, block: tuple[int, int], criterion: str, impl: str = "auto") -> Tensor:
    """Norm of each block, float32 [NB, KB], as the keys of `kernels.score` order them; infinite or NaN for a broken block."""
    return norms_of(scoring.block_keys(as_matrix(w.detach()), block, criterion, impl), w, criterion)


@torch.no_grad()
def observe(
    site: Site,
    weight: Tensor | None,
    state: dict[str, object] | None = None,
    stateless: bool = False,
    scale: Tensor | None = None,
    skipped: Tensor | None = None,
) -> None:
    """Take in what this step shows, before the optimiser moves the weight. `state`: the optimiser's for this weight, None without one; `stateless`: its last
    step moved the weight and made none. Of a GradScaler with a fused optimiser `scale`: what the gradient will be divided by; `skipped`: not 0 for no step.

    A gradient that is not finite, of this weight or of another that a scaler skips the step for, changes nothing. No host sync.
    Raises: StateError, UnsupportedError.
    """
    c = site._fxmask_config
    if weight is None:
        return
    refuse_shard(site, weight)
    if not (c.observes or c.wants_growth):
        return
    new = _new_score(site, weight, state, stateless)
    if new is not None:
        assert site._fxmask_score is not None  # of sites that observe
        by_gradient = c.criterion in BY_GRADIENT  # a norm that is not finite is the weight's, and is seen
        if by_gradient and scale is not None:
            new = new / scale
        # in place, where a CUDA graph finds it again
        scoring.take_in(site._fxmask_score, new, c.average, c.criterion == "movement", by_gradient, skipped, c.impl)
    if c.wants_growth and weight.grad is not None and (c.backward != "rigl" or site._fxmask_dense_now):
        growth = scoring.saliency_of(weight, weight.grad, c.block, "gradient", c.impl)
        before = torch.zeros_like(growth) if site._fxmask_growth is None else site._fxmask_growth
        site._fxmask_growth = torch.where(taken(growth, skipped), growth, before)


def refuse_shard(site: Site, weight: Tensor) -> None:
    """Raise UnsupportedError where a step, of whatever phase, would have to read or write the whole of a weight that is shared out."""
    if ranks.is_shard(weight) and site._fxmask_given.touches_weight:
        what = "gradient criteria, average, regrow and gain work on whole weights between steps: expected a weight that is not sharded."
        raise UnsupportedError(message(what, site._fxmask_name, "leave them out under fully_shard; or use DistributedDataParallel."))


def _new_score(site: Site, weight: Tensor, state: dict[str, object] | None, stateless: bool) -> Tensor | None:
    """What this step adds; None where it has nothing to add."""
    c = site._fxmask_config
    if not c.observes:
        return None
    if c.criterion in NORMS:
        return norms(weight, c.block, c.criterion, c.impl)
    if c.criterion == "momentum":
        assert state is not None  # fxmask.step refuses
        found = next((state[k] for k in MOMENTA if isinstance(state.get(k), Tensor)), None)
        if not isinstance(found, Tensor):
            if not state and not stateless:  # the optimiser's first step of this weight is still to come
                return None
            got = ", ".join(map(str, state)) or "none"
            what = f"criterion='momentum' reads the optimiser's first moment: expected one of {', '.join(MOMENTA)}, got {got}."
            raise UnsupportedError(message(what, site._fxmask_name, "use Adam, AdamW or SGD with momentum; or criterion='gradient' with average=0.9."))
        return block_sums(found.detach().float().abs(), c.block) / block_sums(torch.ones_like(weight, dtype=torch.float32), c.block)
    if weight.grad is None:
        return None
    return scoring.saliency_of(weight, weight.grad, c.block, c.criterion, c.impl)
