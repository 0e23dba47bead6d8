"""Block dropout as a user asks for it, and what it makes of a layer's forward. In graphs: `passes.graphs.fused_dropout`."""

from __future__ import annotations

import dataclasses

import torch.nn.functional as F
from torch import Tensor

from ...kernels import draw_ops, dropout, dropout_ops, ops
from ...kernels.dispatch import IMPLEMENTATIONS, check_available
from ...kernels.errors import ConfigError
from ...kernels.grid import check_block
from .checks import one_of
from .options import Options


@dataclasses.dataclass(frozen=True)
class BlockDropout(Options):
    """The input of a linear is dropped in blocks while training, and the matmuls leave dropped blocks out (SparseDrop, Lo 2024).

    y = (X∘m) W^T / (1 - p) + b, m a mask of blocks, each kept with probability 1 - p; dX and dW are its exact gradients. Evaluation is the plain linear.

    Args:
        p: probability that a block is dropped, in [0, 1); None: that of the dropout that goes before the linear, and linears without one are left alone.
        block: (tokens, features) of a block of X, whose leading axes are flattened into tokens, so that a block mixes samples; edges may be ragged, and a block
            larger than X is all of X.
        mc: whether evaluation drops, too (Monte-Carlo dropout).
        impl: `auto`, `reference`, `cpu` (float32 and float64) or `triton` (float16, bfloat16 and float32); an explicit one never falls back. `auto` leaves
            dropped blocks out on a CPU where that pays; on a GPU it multiplies by dropped zeros until a run of dropout shows that the kernels are faster.

    A dropout right before a selected linear (in nn.Sequential; in a graph) is fused: it does nothing any more, whatever is done to its p or its training flag,
    since the linear's count (eager forwards of nn.Sequential warn of both); p, where it is given, stands for its own. Whoever else calls its module drops
    nothing: `explain` names those that are fused. Every other dropout is left alone, and `explain` names it, if it is a module or a graph's call; F.dropout
    inside a module's own forward nobody sees. In a graph a dropout that feeds other ops stays for those; one whose input or output is written into before the
    linear is left alone, and so is one that writes into what others read (in place), where one in nn.Sequential is fused and writes no more; linears behind one
    dropout draw a mask each. A graph of torch.export has no eval(): `gm.fxmask_dropped.eval()` ends its dropping. `fxmask.dense` changes none of it. The mask
    is a hash of one number that each forward draws from PyTorch's generator of the device: checkpointing redraws it.
    The kernels of `triton` read m through lists that each direction cuts for tiles of its own: a block says what is dropped together, and the tiles of forward
    and backward do not depend on it. They take sides of 16, 32, 64 and 128 and even numbers of features; all else is dropped in one pass and multiplied
    densely. Beside a WeightMask, whose own impl counts, the input is dropped in plain PyTorch; `cpu` and `triton` raise there.
    Raises: ConfigError. Not with torch.func, forward-mode AD or nested tensors (UnsupportedError), nor beside ActivationPruning.
    """

    p: float | None = None
    block: tuple[int, int] = (128, 128)
    mc: bool = False
    impl: str = "auto"

    def __post_init__(self) -> None:
        if self.p is not None:
            object.__setattr__(self, "p", dropout.check_probability(self.p))
        object.__setattr__(self, "block", check_block(self.block, "(tokens, features)"))
        if type(self.mc) is not bool:
            raise ConfigError(f"mc: expected a bool, got {self.mc!r}.")
        one_of("impl", self.impl, IMPLEMENTATIONS)
        check_available(self.impl)
        self._set_kind(self)

    def words(self) -> str:
        """What `explain` says of it."""
        more = (", in evaluation too" if self.mc else "") + (f", impl={self.impl!r}" if self.impl != "auto" else "")
        return f"p={self.p:g} in {self.block[0]}x{self.block[1]}{more}"

    def drops(self, training: bool) -> bool:
        """Whether a forward drops anything."""
        assert self.p is not None  # resolved by apply
        return self.p > 0 and (training or self.mc)

    def mask(self, x: Tensor, training: bool) -> Tensor | None:
        """A new mask for an input; None where nothing is dropped."""
        assert self.p is not None
        return draw_ops.mask(x, self.block, self.p, self.impl) if self.drops(training) else None

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, training: bool) -> Tensor:
        """The layer's forward."""
        keep = self.mask(x, training)
        if keep is None:
            return F.linear(x, weight, bias)
        return dropout_ops.dropped_linear(x, weight, bias, keep, *self.block, self.p, self.impl, ops.lists(keep, self.block, self.impl))

    def drop(self, x: Tensor, training: bool) -> Tensor:
        """(X∘m) / (1 - p): for a matmul that cannot leave blocks out of X."""
        keep = self.mask(x, training)
        return x if keep is None else dropout.drop(x, keep, self.block, self.p)  # type: ignore[arg-type]
