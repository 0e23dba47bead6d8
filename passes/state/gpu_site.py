"""Which implementation a masked layer with `impl="auto"` runs on a GPU: `kernels.gpu_choice`, asked with what the host knows of a site.

What a forward looks at is one int of the site, the fewest tokens from which the kernels pay (`Site._fxmask_from`). Compiled code compares it, and so recompiles
when it changes. A ratio that moves therefore counts at a few marks of its way alone, which layers of one schedule reach in the same step; between them the
last mark's, lower ratio decides, which favours masked-dense.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...kernels import gpu_choice
from ...kernels.dispatch import MASKED_DENSE
from ...kernels.grid import keep_count
from ...kernels.operands import is_transformed
from ..settings.feedback import Feedback

if TYPE_CHECKING:
    from ..settings.config import WeightMask
    from .site import Site

MARKS = (1.0, 0.9, 0.75, 0.5)  # of a ratio's way up to where it ends; below the last one no block counts as masked
DOWN = (0.75, 0.5, 0.25, 0.0)  # of the way from where it ends to 1, for one that comes down from above
TOLD = not torch.__version__.startswith("2.11.")  # whether `is_exporting` tells an export from a compile: 2.11 calls all that Dynamo traces an export


def may_take(site: Site, device: torch.device) -> bool:
    """Whether kernels may multiply this layer on a device under `auto`: forms that ask for it, and what `gpu_choice.takes`."""
    c = site._fxmask_config
    return site._fxmask_chooses and c.impl == "auto" and gpu_choice.takes(device, site._fxmask_shape, c.block)


def settled_ratio(c: WeightMask, step: int, final: float) -> float:
    """The ratio that decides at a step: the last of `MARKS` that it has passed."""
    now = c.ratio_at(step)
    marks = [mark * final for mark in MARKS] if now < final else [final + mark * (1 - final) for mark in DOWN]
    return next((mark for mark in marks if mark <= now + 1e-9), 0.0)


def density(site: Site) -> float:
    """The kept share of the blocks, as the choice takes it. Inside `fxmask.dense` that of the masks which come back: nothing recompiles for a look. Of layers
    that move alone, by flips, that of their lowest ratio, or each would recompile."""
    blocks, given = site._fxmask_blocks, site._fxmask_given
    if isinstance(given.schedule, Feedback) and given.schedule.measure == "flip_rate":
        ratio = given.schedule.initial
    else:
        ratio = settled_ratio(site._fxmask_config, site._fxmask_step, given.final_ratio)
    return keep_count(blocks, ratio) / max(1, blocks)


def least_tokens(site: Site, device: torch.device) -> int:
    """`Site._fxmask_from`: the fewest tokens from which kernels multiply, `gpu_choice.NEVER`, or 0 where they are out of the question. Reads no device."""
    c = site._fxmask_config
    return gpu_choice.pays_from(site._fxmask_shape, c.block, density(site), c.backward, not c.cached) if may_take(site, device) else 0


def implementation(site: Site, x: Tensor, weight: Tensor, bias: Tensor | None) -> str:
    """What a forward asks of the op: the layer's `impl`, but for `auto` on a GPU `triton` or `masked_dense`.

    It stays `auto` where no kernel can run: under function transforms, for nested tensors, operands of several dtypes; and in what torch.export makes, which
    may run elsewhere (but for strict=True in torch 2.11, which keeps the choice).
    """
    impl, least = site._fxmask_config.impl, site._fxmask_from
    if impl != "auto" or not least or x.is_nested or is_transformed(impl):
        return impl
    if torch.compiler.is_exporting() and (TOLD or not torch.compiler.is_dynamo_compiling()):
        return impl
    dtype = x.dtype
    if torch.is_autocast_enabled(x.device.type) and dtype != torch.float64 and weight.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(x.device.type)
    elif dtype != weight.dtype or (bias is not None and bias.dtype != dtype):
        return impl
    if dtype not in gpu_choice.DTYPES:
        return MASKED_DENSE
    from torch.fx.experimental.symbolic_shapes import guard_or_false  # with SymPy, so not before it is needed

    return "triton" if guard_or_false(x.numel() >= least * weight.shape[1]) else MASKED_DENSE
