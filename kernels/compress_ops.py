"""The op that packs a linear's input for activation pruning, and its result shared: layers that read one input (q, k and v; gate and up) save it once.

A compiler sees equal calls of the op and keeps one. In eager mode the packed input is found through weak references while a graph holds it, and nothing is
kept alive for this.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.weak import WeakTensorKeyDictionary

from . import prune
from .errors import ShapeError
from .inductor import register_fake
from .lean import without_gradient


def sizes(x: Tensor, block: int, kept: int, turned: bool) -> tuple[int, int]:
    """(samples, blocks of a sample); ShapeError where `kept` is none of their numbers, or a block has no features."""
    if block < 1:
        raise ShapeError(f"features of a kept block: expected 1 or more, got {block}.")
    b, r, c = prune.sample_shape(x.shape, turned)
    n = prune.block_count(r, c, block)
    if not 0 <= kept <= n or (kept == 0 and n):
        raise ShapeError(f"kept blocks of a sample: expected 1 to {n}, got {kept}.")
    return b, n


@torch.library.custom_op("fxmask::compress", mutates_args=())
def compress(x: Tensor, block: int, kept: int, turned: bool, noise: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The kept blocks of an input, see `kernels.prune.compress`.

    x (..., K), floating; block: features of a block; kept: blocks of each sample that are kept; turned: whether the samples lie behind a transposed view;
    noise: (samples, blocks of one), factors of the norms. -> values (samples, kept, block), index (samples, kept) int16 or int32.
    Differentiable: no. Raises: ShapeError. Cost: a read of x, a sort of its blocks' norms, a write of what is kept; no host sync.
    """
    sizes(x, block, kept, turned)
    return prune.compress(x, block, kept, turned, noise)


@register_fake(compress)
def _(x: Tensor, block: int, kept: int, turned: bool, noise: Tensor | None = None) -> tuple[Tensor, Tensor]:
    b, n = sizes(x, block, kept, turned)
    return x.new_empty((b, kept, block)), x.new_empty((b, kept), dtype=prune.index_dtype(n))


# on devices for which there is no leaner kernel, such as meta
compress.register_autograd(lambda ctx, *_: (None,) * 5, setup_context=lambda ctx, inputs, output: ctx.mark_non_differentiable(*output))
without_gradient(compress)

_Forms = dict[tuple[object, ...], tuple[weakref.ref[Tensor], weakref.ref[Tensor]]]
_seen: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # input -> _Forms; not an attribute of it, with which it could not be pickled


def shared(x: Tensor, cast: Tensor, block: int, kept: int, turned: bool, noise: Tensor | None) -> tuple[Tensor, Tensor]:
    """`compress(cast)`, or what it gave for the layer before; cast: x itself, or in autocast's dtype. Blocks that are drawn by lot are each layer's own.

    Only results of ops are looked up, as each forward makes them anew: memory that a user fills again and again might change unseen by x's version. Writes
    into `x.data` between two layers, which neither autograd nor a version sees, are not seen here; a new `x.data` is, by its memory.
    """
    can = noise is None and type(x) in (Tensor, FakeTensor) and not torch.compiler.is_compiling() and x.grad_fn is not None and not x.is_inference()
    if not can:
        return compress(cast, block, kept, turned, noise)
    key = (x._version, x.untyped_storage()._cdata, block, kept, turned, cast.dtype)
    forms: _Forms = _seen.setdefault(x, {})
    if key in forms:
        values, index = forms[key][0](), forms[key][1]()
        if values is not None and index is not None:
            return values, index
    values, index = compress(cast, block, kept, turned)
    forms[key] = weakref.ref(values), weakref.ref(index)
    return values, index
