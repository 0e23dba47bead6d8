"""A CUDA graph for a machine without a GPU: every ATen op of a function, run again on the tensors that it had, without the function's Python.

As in a capture nothing happens while it is recorded: what the ops write is put back. As in a replay results come to lie where they lay.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

READS = {"aten::_local_scalar_dense", "aten::is_nonzero", "aten::nonzero", "aten::equal", "aten::masked_select"}  # what waits for a device
recording = [False]


class Tape(TorchDispatchMode):
    def __init__(self, pool=None, stream=None):
        super().__init__()
        self.pool, self.calls, self.made, self.before = pool or object(), [], {}, {}

    def record(self, step):
        recording[0], drawn = True, torch.get_rng_state()
        try:
            with self:
                return step()
        finally:
            recording[0] = False
            torch.set_rng_state(drawn)
            for t, values in self.before.values():
                t.detach().copy_(values)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func._schema.name in READS:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        for t in written(func, args, kwargs):
            storage = t.untyped_storage().data_ptr()
            if storage not in self.made and storage not in self.before:
                whole = t if t._base is None else t._base
                self.before[storage] = whole, whole.detach().clone()
        out = func(*args, **kwargs)
        self.calls.append((func, args, kwargs, out))
        for t in fresh(func, out):
            self.made[t.untyped_storage().data_ptr()] = t  # kept, so that nothing else comes to lie there
        return out

    @torch.no_grad()
    def replay(self):
        for func, args, kwargs, out in self.calls:
            if any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns):
                continue  # a view, which shares what is replayed
            for old, new in zip(fresh(func, out), fresh(func, func(*args, **kwargs)), strict=True):
                old.detach().copy_(new)


def written(func, args, kwargs):
    named = [(a, args[i] if i < len(args) else kwargs.get(a.name)) for i, a in enumerate(func._schema.arguments)]
    return [t for a, value in named if a.alias_info is not None and a.alias_info.is_write for t in tree_leaves(value) if isinstance(t, Tensor)]


def fresh(func, out):
    """The results that are tensors of their own."""
    returns = func._schema.returns
    outs = [out] if len(returns) == 1 else list(out or ())
    return [t for r, value in zip(returns, outs, strict=True) if r.alias_info is None for t in tree_leaves(value) if isinstance(t, Tensor)]
