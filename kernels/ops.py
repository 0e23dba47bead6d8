"""The ops `torch.ops.fxmask.masked_linear*` and those that make masks: with their gradients, and with what autocast, vmap and FLOP counts ask of them."""

from __future__ import annotations

from . import gradients as gradients
from . import op_rules as op_rules
from .mask_ops import block_index as block_index
from .mask_ops import index as index
from .mask_ops import lists as lists
from .mask_ops import strip_lists as strip_lists
from .matmul_ops import linear as linear
from .matmul_ops import masked_linear as masked_linear
from .matmul_ops import masked_linear_dw as masked_linear_dw
from .matmul_ops import masked_linear_dx as masked_linear_dx
