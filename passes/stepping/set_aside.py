"""Freeze where kernels run: what masked blocks hold is set aside before an optimiser's step and put back after it, of all weights and momenta at once.

`passes.stepping.optimiser` does the same by clones of whole tensors, weight by weight, for the weights that are not taken here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ...kernels import dispatch
from ...kernels.grid import expand_mask

if TYPE_CHECKING:
    from .guarded_weight import Guarded

PIECE = 1 << 26  # elements that are set aside together; of a weight alone all of them
WEIGHT = object()  # the key of a weight among its momenta


@dataclass
class Kept:
    """What was set aside of one dtype, block, device and alignment."""

    aside: Any  # kernels.triton.aside.Aside
    of: list[tuple[Guarded, Any]]  # whose, in order; which entry of its state, or WEIGHT
    tensors: list[Tensor]

    def put_back(self, momenta: dict[int, dict[str, Tensor]]) -> None:
        """At once, or one by one where an optimiser has replaced some of its state."""
        now = [g.weight.detach() if key is WEIGHT else momenta[id(g)].get(key) for g, key in self.of]
        if all(t is not None and _lies(t) == _lies(old) for t, old in zip(now, self.tensors, strict=True)):
            self.aside.back(self.tensors[0])
            return
        for i, ((g, _), t) in enumerate(zip(self.of, now, strict=True)):
            if t is not None and g.mask is not None:
                t.copy_(t.where(expand_mask(g.mask, g.weight.shape, g.block), self.aside.of(i, t).to(t.dtype)))


def _lies(t: Tensor) -> tuple[Any, ...]:
    return t.data_ptr(), t.dtype, t.stride()


def fits(g: Guarded, momenta: dict[str, Tensor]) -> bool:
    """Whether the kernel takes a weight and all of its momenta."""
    w = g.weight
    if type(w) is not nn.Parameter or any(type(t) is not Tensor for t in momenta.values()):  # such as a shard
        return False
    if not dispatch.uses_kernels(g.site._fxmask_config.impl, w.device):
        return False
    takes = dispatch.triton_ops().aside.takes
    return takes(w) and all(takes(t) and t.device == w.device for t in momenta.values())


def _pieces(group: list[tuple[Guarded, Any, Tensor]]) -> Iterator[list[tuple[Guarded, Any, Tensor]]]:
    """So small that the memory of one is found again in the next step, among what activations have left."""
    piece: list[tuple[Guarded, Any, Tensor]] = []
    elements = 0
    for member in group:
        if piece and elements + member[2].numel() > PIECE:
            yield piece
            piece, elements = [], 0
        piece.append(member)
        elements += member[2].numel()
    yield piece


def begin(taken: Sequence[tuple[Guarded, dict[str, Tensor]]]) -> list[Kept] | None:
    """Set aside what these hold; None while a CUDA graph is captured for which there is no table yet."""
    kernel = dispatch.triton_ops().aside
    groups: dict[Any, list[tuple[Guarded, Any, Tensor]]] = {}
    for g, momenta in taken:
        for key, t in ((WEIGHT, g.weight), *momenta.items()):
            groups.setdefault((t.dtype, t.device, kernel.width(t), g.block), []).append((g, key, t.detach()))
    kept = []
    for (*_, block), members in ((key, piece) for key, group in groups.items() for piece in _pieces(group)):
        owners = {id(g): g for g, *_ in members}
        place, masks = {key: i for i, key in enumerate(owners)}, [g.mask for g in owners.values()]
        aside = kernel.set_aside([t for *_, t in members], masks, [place[id(g)] for g, *_ in members], block)
        if aside is None:
            return None
        for g, m in zip(owners.values(), aside.masks, strict=True):
            g.mask = m  # a copy: where a CUDA graph reads the site's, a closure may rewrite it in place
        kept.append(Kept(aside, [(g, key) for g, key, _ in members], [t for *_, t in members]))
    return kept
