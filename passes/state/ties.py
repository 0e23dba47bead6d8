"""Masks of one weight, which several layers hold."""

from __future__ import annotations

import weakref

from torch import Tensor, nn

from .site import Site


class Ties:
    """The masks of one weight, and which modules hold it: layers load one after the other, and what one loads is the weight of all.

    It keeps nothing alive, and a copy of a layer brings none of the others: copies that were made together have one that is empty, and join it themselves.
    """

    def __init__(self) -> None:
        self._held: weakref.WeakKeyDictionary[Site, tuple[weakref.ref[nn.Module], str]] = weakref.WeakKeyDictionary()

    def __reduce__(self) -> tuple[type[Ties], tuple[()]]:
        return Ties, ()

    def join(self, site: Site, owner: nn.Module, leaf: str) -> None:
        """Note a mask, and under which name a module holds its weight."""
        self._held[site] = weakref.ref(owner), leaf

    def others(self, site: Site, weight: Tensor) -> list[Site]:
        """Cached masks of the same weight, but for this one; of layers that have another weight by now, or are masked no longer, there are none."""
        held = [(other, owner(), leaf) for other, (owner, leaf) in list(self._held.items()) if other is not site]
        same = [other for other, owner, leaf in held if owner is not None and owner._parameters.get(leaf) is weight]
        return [other for other in same if other.__dict__.get("_fxmask_tied") is self and other._fxmask_mask is not None]
