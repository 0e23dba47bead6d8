"""What `explain` says of `impl="auto"` on a GPU: which implementation a layer runs, and why."""

from __future__ import annotations

import torch

from ..kernels import gpu_choice
from ..kernels.dispatch import MASKED_DENSE
from ..passes.state import gpu_site
from ..passes.state.site import Site

TOKENS = 8192  # of the forward that a factor is quoted for, where fewer pay already


def runs(site: Site | None, device: torch.device) -> dict[str, str]:
    """{"impl", "why"} of a layer, or of a linear in a graph (None, or a mask of it), on a device with a compute capability."""
    if site is None or not site._fxmask_chooses:
        return _masked_dense("graphs, and weights that an owner reads, have no choice; impl='triton' asks for the kernels")
    if "_fxmask_pruning" in site.__dict__:
        return _masked_dense("its input is saved pruned, and no run has compared that with the kernels")
    if not gpu_site.may_take(site, device):
        return _masked_dense(_why_not(device))
    shape, block, mode, least = site._fxmask_shape, site._fxmask_config.block, site._fxmask_config.backward, gpu_site.least_tokens(site, device)
    tokens = TOKENS if least == gpu_choice.NEVER else max(least, TOKENS)
    factor = gpu_choice.factor(tokens, shape, block, gpu_site.density(site), mode, not site._fxmask_config.cached)
    predicted = f"over {tokens:,} tokens predicted {factor:.2g} times as fast as masked-dense, fitted to an H200's runs"
    if least == gpu_choice.NEVER:
        return _masked_dense(f"the kernels are {predicted}")
    return {"impl": "triton", "why": f"from {least:,} tokens of 16 bits a forward on, else masked-dense; {predicted}"}


def _masked_dense(why: str) -> dict[str, str]:
    return {"impl": MASKED_DENSE, "why": f"masked-dense: {why}"}


def _why_not(device: torch.device) -> str:
    found = gpu_choice.capability(device)
    assert found is not None  # of such a device
    if found[0] != 9:
        return f"no recorded run on a device of compute capability {found[0]}.{found[1]}"
    return "the kernels do not take this block or shape" if gpu_choice.kernels_run(device) else "Triton does not run here"
