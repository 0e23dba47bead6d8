"""`ActivationPruning` on modules: another forward by class swap, as for masks, or an attribute of a layer that is masked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from .passes.finding.candidate import join
from .passes.finding.choose import Decision
from .passes.finding.graph_linears import graph_modules, name_now
from .passes.finding.plain_forward import Product, product_of
from .passes.finding.weights import raw_weight
from .passes.graphs.pruned_linears import PruneActivations, PrunedSite, RestoreActivations
from .passes.graphs.pruned_products import PruneProducts, RestoreProducts
from .passes.infra import run_passes
from .passes.settings.activation_pruning import ActivationPruning, saves
from .passes.state import ranks
from .passes.state.pruning_schedule import install, is_scheduled, uninstall, words
from .swap import MaskedLinear
from .swapped import Swapped, begin, masked_class, note_asked, of_now


class Pruned(Swapped):
    """What layers share whose input is saved pruned. Mixed into a subclass of the layer's own class, never constructed."""

    _fxmask_prefix = "Pruned"
    _fxmask_pruning: ActivationPruning

    def extra_repr(self) -> str:
        return ", ".join(filter(None, (super().extra_repr(), f"activations: {words(self)}")))


def _refuse_shard(m: nn.Module, weight: Tensor) -> None:
    if saves(weight):  # else it is PyTorch's own linear
        ranks.refuse_shard(weight, "a layer whose input is saved pruned", type(m).__name__)


class PrunedLinear(Pruned):
    """Forward of a Linear whose input (..., K) is saved pruned."""

    bias: Tensor | None

    def forward(self, input: Tensor) -> Any:
        if not isinstance(self, PrunedLinear):
            return of_now(self, input)
        begin(self, input, "a pruned layer", "ActivationPruning")
        weight = raw_weight(self)
        _refuse_shard(self, weight)
        return self._fxmask_pruning.linear(input, weight, self.bias, self.training)


class PrunedProduct(Pruned):
    """Forward of a module that is a product with a parameter, y = a x (+ b), whose x is saved pruned."""

    _fxmask_product: Product

    def forward(self, input: Tensor) -> Any:
        if not isinstance(self, PrunedProduct):
            return of_now(self, input)
        begin(self, input, "a pruned layer", "ActivationPruning")
        p = self._fxmask_product
        _refuse_shard(self, getattr(self, p.a))
        b = getattr(self, p.b) if p.b else None
        inplace = bool(p.inplace and getattr(self, p.inplace))
        y = self._fxmask_pruning.product(input, getattr(self, p.a), b if p.fused else None, inplace, self.training)
        return y if b is None or p.fused else y + b


def prune(model: nn.Module, chosen: list[tuple[Decision, ActivationPruning]]) -> None:
    """Change what was chosen; masks are in place by then."""
    for d, config in chosen:
        m = d.candidate.module
        if d.candidate.host is None and m is not None:
            cls: Any = type(m)
            if d.candidate.product:
                m.__dict__["_fxmask_product"] = product_of(cls)
            if not isinstance(m, MaskedLinear):
                m.__class__ = masked_class(cls, PrunedProduct if d.candidate.product else PrunedLinear)
            install(m, config)
            note_asked(m, config)
    products = [(d, config) for d, config in chosen if d.candidate.product]
    linears = [(d, config) for d, config in chosen if not d.candidate.product]
    rewrites = [PruneActivations(linears), PruneProducts(products)]
    for _, gm in graph_modules(model):
        run_passes(gm, rewrites)


def unprune(model: nn.Module) -> None:
    """Make pruned layers what they were."""
    for _, gm in graph_modules(model):
        run_passes(gm, [RestoreActivations(), RestoreProducts()])
    for m in model.modules():
        if isinstance(m, Pruned):
            m.__class__ = m._fxmask_base  # type: ignore[assignment]
        m.__dict__.pop("_fxmask_product", None)
        uninstall(m)


def pruned_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(name of the layer, or of a product's parameter, the module that holds its configuration)."""
    graphs = list(graph_modules(model))
    for name, m in model.named_modules():
        if "_fxmask_pruning" in m.__dict__:
            if isinstance(m, PrunedSite):
                name = name_now(m, name, graphs)
            yield (join(name, m._fxmask_product.a) if isinstance(m, PrunedProduct) else name), m


def scheduled_layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Those whose ratio depends on the step."""
    return [(name, m) for name, m in pruned_layers(model) if is_scheduled(m)]


def any_pruned(model: nn.Module) -> bool:
    return any("_fxmask_pruning" in m.__dict__ for m in model.modules())
