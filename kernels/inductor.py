"""A fault of PyTorch's compiler on CPUs that masked models meet often, mended before it compiles them. It gives wrong gradients in silence.

Where a convolution, ReLU and max pooling stand before a masked layer, Inductor may read the pooling's gradient before it is there: to fuse loops it computes a
node's dependencies anew (`SchedulerNode.recompute_size_and_body`, on CPUs alone), and forgets that a buffer which is changed in place has a new name from then
on, and, before PyTorch 2.13, the order of reads and such changes, too. Dense models meet it less: it takes an op that returns several tensors, as our backward.
Fixed upstream by pytorch/pytorch#177816 (in 2.13) and #185873 (later; both are done here again, which changes nothing where they are).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch

FIXED = "2.14"


def register_fake(op: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """`op.register_fake`; a compiler calls that function of every op of ours before it schedules anything."""

    def register(fake: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            mend()
            return fake(*args, **kwargs)

        op.register_fake(noted)
        return fake

    return register


def mend() -> None:
    """Let a loaded Inductor keep a node's dependencies. Does nothing where it is not loaded, is mended, or is PyTorch's `FIXED` or later."""
    scheduler = sys.modules.get("torch._inductor.scheduler")
    node: Any = getattr(scheduler, "SchedulerNode", None)
    recompute = getattr(node, "recompute_size_and_body", None)
    if recompute is None or hasattr(recompute, "by_fxmask") or torch.__version__ >= FIXED:
        return
    from torch._inductor.dependencies import StarDep, WeakDep
    from torch.utils._ordered_set import OrderedSet

    @functools.wraps(recompute)
    def recomputed(self: Any, *args: Any, **kwargs: Any) -> None:
        by_hand = OrderedSet(d for d in self.read_writes.reads if isinstance(d, (WeakDep, StarDep)))
        recompute(self, *args, **kwargs)
        self.set_read_writes(self.read_writes.with_read(by_hand).rename(self.mutation_renames))

    recomputed.by_fxmask = True  # type: ignore[attr-defined]
    node.recompute_size_and_body = recomputed
